"""Reads the batches of images and clips (videos) that vLLM's model classes make, as packed rows.

vLLM is not imported here. Each public reader takes the inputs of a batch, by their names in vLLM,
and the encoder that will run them. Source: the classes ``*PixelInputs`` of vLLM 0.26.0, 0.32.0 and
0.33.0.

Shapes: P patches, B tiles, C channels, I images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

import torch
from einops import rearrange
from torch import Tensor

from encoders import PatchEncoder, PathInputs, PathsEncoder, VisionEncoder, VisionInputs
from encoders.contract import Grid


class BatchInputs(Protocol):
    """The inputs of a batch by their names in vLLM: tensors, or lists if image sizes differ."""

    def __getitem__(self, name: str, /) -> object: ...

    def get(self, name: str, /) -> object: ...


Embeddings: TypeAlias = "Tensor | Sequence[Tensor]"
"""The features of a batch in the form for vLLM: a tensor per item, or one tensor for all items."""


class Packed(NamedTuple):
    """The images or clips of a batch, in the form for an encoder.

    ``pixel_values`` holds packed patches or tiles, ``grids`` one (t, h, w) in patches per image,
    tile, frame or clip.
    """

    pixel_values: Tensor
    grids: list[Grid]
    counts: list[int]
    """The number of grids per item: the tiles of an image, the frames of a clip, or 1."""

    def items(self) -> Iterator[Packed]:
        """Yield the images or clips one by one."""
        rows, grids = self.pixel_values, self.grids
        for count in self.counts:
            own, grids = grids[:count], grids[count:]
            first = sum(map(prod, own))
            yield Packed(rows[:first], own, [count])
            rows = rows[first:]


def read_tensor(batch: BatchInputs, name: str) -> Tensor:
    """Return the tensor ``name`` of a batch.

    Raises:
        ValueError: the batch has no tensor under this name.
    """
    value = batch[name]
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__} in this batch: pass a tensor")
    return value


def read_tensors(batch: BatchInputs, name: str) -> list[Tensor]:
    """Return the entry ``name`` of a batch as a list: a tensor is divided along its first axis.

    Raises:
        ValueError: the entry is neither a tensor nor a list of tensors.
    """
    value = batch[name]
    parts = list(value) if isinstance(value, Tensor | Sequence) else [value]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) != len(parts):
        raise ValueError(f"{name} is a {type(value).__name__} in this batch: pass only tensors")
    return tensors


def read_flags(value: object, count: int, usual: bool) -> list[bool]:
    """Return a flag for each of ``count`` items, from the tensors or numbers that vLLM batched.

    One value is for all items; None stands for ``usual``.
    """
    if value is None:
        return [usual] * count
    parts = value if isinstance(value, list | tuple) else [value]
    flags = [bool(flag) for part in parts for flag in torch.as_tensor(part).flatten()]
    return flags if len(flags) == count else [any(flags)] * count


def read_tiles(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Take the tiles [B, C, H, W] of Gemma 3, Idefics3 or SmolVLM out of a batch of vLLM.

    The number of tiles per image is taken from the entry ``num_patches``. vLLM adds no tiles
    to fill a batch, and the tiles of these models have no padded edges.

    Args:
        batch: the inputs of a batch, by their names in vLLM.
        encoder: the encoder that will run them.
    """
    return _tiles_of(batch, "num_patches", encoder)


def read_chunked_tiles(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Take the tiles [B, C, H, W] of Llama 4's images out of a batch of vLLM.

    The number of tiles per image is taken from the entry ``patches_per_image``. ``batch`` has
    vLLM's inputs by name, ``encoder`` encodes them.
    """
    return _tiles_of(batch, "patches_per_image", encoder)


def _tiles_of(batch: BatchInputs, counts: str, encoder: VisionEncoder) -> Packed:
    """Return the tiles of a batch; its entry ``counts`` has the number of tiles per image."""
    tiles = read_tensor(batch, "pixel_values")
    grids = [encoder.grid_for(1)] * len(tiles)
    return Packed(tiles, grids, read_tensor(batch, counts).tolist())


def read_images(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Take the images [C, H, W] of Pixtral or Mistral 3 out of a vLLM batch.

    Images are divided into patches in the order that the encoder needs; H and W are multiples of a
    token's side. ``batch`` has vLLM's inputs by name, ``encoder`` encodes them.
    """
    assert isinstance(encoder, PatchEncoder)
    images = read_tensors(batch, "pixel_values")
    merge, patch = encoder.config.spatial_merge_size, encoder.config.patch_size
    rows, grids = [], []
    for image in images:
        h, w = (side // patch for side in image.shape[1:])
        cells = image.view(-1, h // merge, merge, patch, w // merge, merge, patch)
        rows.append(cells.permute(1, 4, 2, 5, 0, 3, 6).reshape(h * w, -1))
        grids.append((1, h, w))
    return Packed(torch.cat(rows), grids, [1] * len(grids))


def read_grids(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Take patches [P, C, p, p] of Kimi-VL out of a vLLM batch.

    Its entry ``image_grid_hws`` has the rows and columns of patches of each image. ``batch`` has
    vLLM's inputs by name, ``encoder`` encodes them.
    """
    return _rows_of_sizes(batch, "pixel_values", "image_grid_hws")


def read_ragged(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Take patches [P, C, p, p] of DeepSeek-V4 or V4.1 out of a vLLM batch.

    Its entry ``vit_grid`` has the rows and columns of patches of each image. ``batch`` has vLLM's
    inputs by name, ``encoder`` encodes them.
    """
    return _rows_of_sizes(batch, "patches", "vit_grid")


def _rows_of_sizes(batch: BatchInputs, pixels: str, sizes: str) -> Packed:
    """Return the P patches of all images as rows; the entry ``sizes`` has rows and columns."""
    grids = [(1, h, w) for h, w in read_tensor(batch, sizes).tolist()]
    return Packed(read_tensor(batch, pixels).flatten(1), grids, [1] * len(grids))


def read_patches(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Take patches out of a vLLM batch of images of PaddleOCR-VL, dots.ocr, ERNIE or MiniMax-M3.

    P patches become rows [P, columns] with the grid of each image. vLLM has [P, columns] or, for
    patches of p x p pixels, [P, C, p, p]; before 0.33 it has for PaddleOCR-VL a list of such
    tensors or one [images, P, C, p, p]. ``batch`` has vLLM's inputs by name, ``encoder``
    encodes them.
    """
    return _rows_of(batch, "pixel_values", "image_grid_thw")


def read_clips(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Take the clips' patches [P, columns] of ERNIE-4.5-VL or MiniMax-M3 out of a vLLM batch.

    ``batch`` has vLLM's inputs by name, ``encoder`` encodes them.
    """
    return _rows_of(batch, "pixel_values_videos", "video_grid_thw")


def read_padded(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Take B tiles of LFM2-VL [B, S, C*p*p] out of a vLLM batch: flat patches, padded to S.

    The entry ``spatial_shapes`` has the rows and columns of patches per tile, ``num_patches`` the
    number of tiles per image. ``batch`` has vLLM's inputs by name, ``encoder`` encodes them.
    """
    shapes = read_tensor(batch, "spatial_shapes").tolist()
    tiles = zip(read_tensors(batch, "pixel_values"), shapes, strict=True)
    rows = torch.cat([tile[: h * w] for tile, (h, w) in tiles])
    grids = [(1, h, w) for h, w in shapes]
    return Packed(rows, grids, read_tensor(batch, "num_patches").tolist())


def read_slices(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Take whole images and slices of MiniCPM-V out of a vLLM batch: a tensor [C, p, n*p] each.

    It has the n patches side by side. The entry ``tgt_sizes`` has the rows and columns of patches
    of each, ``num_slices`` the number of tensors per image or frames. ``batch`` has vLLM's inputs
    by name, ``encoder`` encodes them.
    """
    parts = [
        rearrange(part, "c p (n q) -> n (c p q)", q=part.shape[1])
        for part in read_tensors(batch, "pixel_values")
    ]
    grids = [(1, h, w) for h, w in read_tensor(batch, "tgt_sizes").tolist()]
    return Packed(torch.cat(parts), grids, read_tensor(batch, "num_slices").tolist())


def read_chunks(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Take patches [P, C, p, p] of Kimi-K2.5's images and clips out of a vLLM batch.

    Its entry ``grid_thws`` has (t, h, w) each. A clip is a part of a video whose t frames become
    the tokens of one frame. ``batch`` has vLLM's inputs by name, ``encoder`` encodes them.
    """
    return _rows_of(batch, "pixel_values", "grid_thws")


def _rows_of(batch: BatchInputs, pixels: str, grid_thw: str) -> Packed:
    """Return the P patches of all items as rows, with a grid per item."""
    patches = batch[pixels]
    cells = patches if isinstance(patches, Tensor) else torch.cat(read_tensors(batch, pixels))
    grids = [(t, h, w) for t, h, w in read_tensor(batch, grid_thw).tolist()]
    return Packed(cells.reshape(sum(map(prod, grids)), -1), grids, [1] * len(grids))


def read_positions(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Take the patches and grids of Gemma 4's images or frames out of a vLLM batch.

    vLLM pads the patches of an image, and has a (column, row) per patch, -1 for padding. Reading
    the grids from these positions waits for the device; vLLM's own code waits, too. ``batch`` has
    vLLM's inputs by name, ``encoder`` encodes them.
    """
    images = read_tensors(batch, "pixel_values")
    positions = read_tensors(batch, "pixel_position_ids")
    ends = torch.stack([image_positions.amax(0) for image_positions in positions]).tolist()
    grids = [(1, rows + 1, columns + 1) for columns, rows in ends]
    rows = [image[: h * w] for image, (_, h, w) in zip(images, grids, strict=True)]
    return Packed(2 * (torch.cat(rows) - 0.5), grids, [1] * len(grids))


def read_frames(batch: BatchInputs, encoder: VisionEncoder) -> Packed:
    """Read clips of Gemma 4: each frame gets a grid, and ``counts`` has the frames per clip."""
    names = ("pixel_values", "pixel_position_ids")
    packed = read_positions({name: batch[f"{name}_videos"] for name in names}, encoder)
    return packed._replace(counts=torch.as_tensor(batch["video_frame_counts"]).tolist())


def read_views(batch: BatchInputs, encoder: PathsEncoder) -> VisionInputs:
    """Read I whole images [I, C, H, W] of Step3 or Step3-VL, and their B tiles [B, C, h, w].

    The entry ``num_patches`` has the number of tiles per image. ``batch`` has vLLM's inputs by
    name, ``encoder`` encodes them.
    """
    counts = read_tensor(batch, "num_patches").tolist()
    return _views_of(batch, ("pixel_values", "patch_pixel_values"), counts, encoder)


def read_crops(batch: BatchInputs, encoder: PathsEncoder) -> VisionInputs:
    """Read I whole images [I, C, H, W] of DeepSeek-OCR-2, and their B tiles [B, C, h, w].

    The entry ``images_spatial_crop`` has the columns and rows of tiles of each image, (1, 1) for an
    image without tiles. ``batch`` has vLLM's inputs by name, ``encoder`` encodes them.
    """
    crops = read_tensor(batch, "images_spatial_crop").tolist()
    counts = [columns * rows if columns * rows > 1 else 0 for columns, rows in crops]
    return _views_of(batch, ("data", "images_crop"), counts, encoder)


def _views_of(
    batch: BatchInputs, names: tuple[str, str], counts: list[int], encoder: PathsEncoder
) -> VisionInputs:
    """Return whole images and tiles, under ``names`` in a batch, with so many tiles per image."""
    patch = encoder.paths["image"].config.patch_size
    views, tiles = (read_tensor(batch, name) for name in names)
    (h, w), (rows, columns) = ([side // patch for side in x.shape[2:]] for x in (views, tiles))
    tiled = tuple(number for number, count in enumerate(counts) if count)
    grids = torch.tensor([[counts[number], rows, columns] for number in tiled]).view(-1, 3)
    return VisionInputs(
        views,
        torch.tensor([[1, h, w]] * len(views)),
        [(count, 1, True) if count else (1, 1, False) for count in counts],
        {"tiles": PathInputs(tiles, grids, tiled)},
    )


READERS: Mapping[str, Callable[[BatchInputs, VisionEncoder], Packed]] = {
    "tiles": read_tiles,
    "chunked tiles": read_chunked_tiles,
    "images": read_images,
    "grids": read_grids,
    "ragged": read_ragged,
    "patches": read_patches,
    "chunks": read_chunks,
    "padded": read_padded,
    "slices": read_slices,
    "positions": read_positions,
}
"""Value of ``Record.reader`` -> the function that reads a batch of images."""
VIEW_READERS: Mapping[str, Callable[[BatchInputs, PathsEncoder], VisionInputs]] = {
    "views": read_views,
    "crops": read_crops,
}
"""Value of ``Record.reader`` -> the function that reads a batch of whole images and tiles."""
CLIP_READERS: Mapping[str, Callable[[BatchInputs, VisionEncoder], Packed]] = {
    "patches": read_clips,
    "positions": read_frames,
}
"""Value of ``Record.reader`` -> the function that reads a batch of clips (videos)."""


def tokens_per_item(packed: Packed, encoder: VisionEncoder) -> Sequence[int]:
    """Return the number of output tokens of each image or clip of a batch, for ``encoder``."""
    specs = iter(encoder.item_specs(packed.grids))
    return [sum(next(specs).output_tokens for _ in range(count)) for count in packed.counts]
