"""Batches of transformers' models, encoded to the output that a model expects from its tower.

The encoder that replaces a tower returns tokens that are projected already, in a shape that the
model's code between tower and projector does not change. :class:`Passing` replaces the projector.

Source: ``get_image_features`` of ``models/*/modeling_*.py`` of transformers 5.23.0.

Shapes: P patches, B tiles, C channels, I images, M patches of the longest image, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoders import PatchEncoder
from encoders.contract import Grid

from ..vllm_plugin.inputs import (
    BatchInputs,
    read_images,
    read_positions,
    read_tensor,
    read_tensors,
)

if TYPE_CHECKING:
    from encoders import VisionEncoder

Encode = Callable[[Tensor, list[Grid]], Tensor]
"""A function that encodes packed pixels, with a grid per image or tile, to tokens [N, D]."""


class Passing(nn.Module):
    """Replaces a model's projector, and returns its input, which is projected already.

    Args:
        merge: patches per side of a token; some models read it as an attribute of their projector.
    """

    def __init__(self, merge: int) -> None:
        super().__init__()
        self.spatial_merge_size, self.temporal_merge_size = merge, 2

    def forward(
        self,
        image_features: Tensor | None = None,
        sizes: object = None,
        *,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens that a model passes to its projector, in one of two arguments.

        Args:
            image_features: the tokens of all images, [N, D] or [tiles, tokens per tile, D]. LFM2-VL
                passes one image as [1, h, w, D], a row per patch; its tokens are the first
                h * w / merge² rows, and only they are returned.
            sizes: the sizes of the images; not read.
            inputs_embeds: the tokens, if the model is Gemma 4, which uses this keyword.
        """
        tokens = inputs_embeds if image_features is None else image_features
        assert tokens is not None
        if tokens.ndim < 4:
            return tokens
        rows = tokens.flatten(0, 2)
        return rows[: len(rows) // self.spatial_merge_size**2]


def run_tiles(encode: Encode, encoder: VisionEncoder, batch: BatchInputs) -> Tensor:
    """Encode B tiles, ``batch["pixel_values"]`` [B, C, H, W], to tokens [B, tokens per tile, D].

    Args:
        encode: function that runs the encoder, or its CUDA graphs, on packed pixels with grids.
        encoder: the encoder, to read its sizes from.
        batch: the keywords with which a model calls its tower, by name.
    """
    tiles = read_tensor(batch, "pixel_values")
    h, w = (side // encoder.config.patch_size for side in tiles.shape[2:])
    tokens = encode(tiles, [(1, h, w)] * len(tiles))
    return torch.unflatten(tokens, 0, (len(tiles), -1))


def run_unpadded_tiles(encode: Encode, encoder: VisionEncoder, batch: BatchInputs) -> Tensor:
    """Encode B tiles of Idefics3 and SmolVLM like :func:`run_tiles`, if no tile has padding.

    Raises:
        ValueError: a tile has padding, which the encoder cannot mask.
    """
    mask = read_tensor(batch, "patch_attention_mask")
    if not mask.all():
        raise ValueError(
            f"{int((~mask).sum())} of {mask.numel()} patches are padding, which this tower does "
            "not take: let the processor split images, do_image_splitting=True"
        )
    return run_tiles(encode, encoder, batch)


def run_shuffled_tiles(encode: Encode, encoder: VisionEncoder, batch: BatchInputs) -> Tensor:
    """Encode B tiles of InternVL, [B, C, H, W], to rows [B, 1 + n, D/4], as its own tower does.

    From such rows the model makes n/4 tokens of width D per tile: it drops the class token (here a
    row of zeros) and joins 2x2 rows to a token. So each row returned here is a quarter of a token.
    ``encode`` runs the encoder; ``batch`` has the model's keywords for its tower.
    """
    tokens = run_tiles(encode, encoder, batch)
    side = round(tokens.shape[1] ** 0.5)
    # The last three axes are row and column in a block of 2x2 rows, and a quarter of a token.
    cells = tokens.view(len(tokens), side, side, 2, 2, -1)
    rows = cells.transpose(2, 3).flatten(1, 4)
    return F.pad(rows, (0, 0, 1, 0))


def run_images(encode: Encode, encoder: VisionEncoder, batch: BatchInputs) -> Tensor:
    """Encode I images of Pixtral, [I, C, H, W], to the tokens [1, N, D] of all images.

    The images are padded to one size; ``image_sizes`` has the rows and columns of pixels of each.
    ``encode`` runs the encoder; ``batch`` has the model's keywords for its tower.
    """
    sizes = torch.as_tensor(batch["image_sizes"]).tolist()
    padded = read_tensors(batch, "pixel_values")
    images = [image[:, :h, :w] for image, (h, w) in zip(padded, sizes, strict=True)]
    packed = read_images({"pixel_values": images}, encoder)
    return encode(packed.pixel_values, packed.grids)[None]


def run_positions(encode: Encode, encoder: VisionEncoder, batch: BatchInputs) -> Tensor:
    """Encode I images of Gemma 4 to the tokens [N, D] of all images.

    ``pixel_values`` are flat patches [I, M, C*p*p], padded to M per image; a patch of padding has
    the position -1. ``encode`` runs the encoder; ``batch`` has the model's keywords for its tower.
    """
    packed = read_positions(batch, encoder)
    return encode(packed.pixel_values, packed.grids)


def run_padded(encode: Encode, encoder: VisionEncoder, batch: BatchInputs) -> Tensor:
    """Encode I images of LFM2-VL to rows [I, M, D]: per image its tokens, padded with zeros.

    ``pixel_values`` are flat patches [I, M, C*p*p], padded to M per image. ``encode`` runs the
    encoder; ``batch`` has the model's keywords for its tower.
    """
    assert isinstance(encoder, PatchEncoder)  # LFM2-VL's path "image"
    images = read_tensor(batch, "pixel_values")
    shapes = read_tensor(batch, "spatial_shapes").tolist()
    rows = torch.cat([image[: h * w] for image, (h, w) in zip(images, shapes, strict=True)])
    tokens = encode(rows, [(1, h, w) for h, w in shapes])
    unit = encoder.config.spatial_merge_size**2
    parts = tokens.split([h * w // unit for h, w in shapes])
    hidden = nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    return F.pad(hidden, (0, 0, 0, images.shape[1] - hidden.shape[1]))


def run_patches(encode: Encode, encoder: VisionEncoder, batch: BatchInputs) -> Tensor:
    """Encode packed patches to the tokens [1, N, D] of all images; ``grid_thw`` has their grids.

    P patches with sides of p pixels are [P, C*p*p], [P, C, p, p] or [1, P, C, p, p]. ``encode``
    runs the encoder; ``batch`` has the model's keywords for its tower.
    """
    grids = [(t, h, w) for t, h, w in read_tensor(batch, "grid_thw").tolist()]
    count = sum(t * h * w for t, h, w in grids)
    return encode(read_tensor(batch, "pixel_values").reshape(count, -1), grids)[None]


def run_flat(encode: Encode, encoder: VisionEncoder, batch: BatchInputs) -> Tensor:
    """Encode packed patches like :func:`run_patches`, but to tokens [N, D]."""
    return run_patches(encode, encoder, batch)[0]
