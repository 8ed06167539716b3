"""Resizes, normalises and cuts whole images in vLLM's engine process, to the bit of its processor.

vLLM is not imported here. ``raw_processor`` sends what is read here: the bytes of all images of a
batch in one uint8 tensor, and a row of integers per image.

Shapes: I images, P patches of p x p pixels, B tiles.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from encoders.inputs import cut_frames, is_exact_on, look_up, resize, resize_many

from . import LOGGER

PIXELS, IMAGE, LEVELS = "vitgraph_pixels", "vitgraph_image", "vitgraph_levels"
"""The names of what is sent: the bytes of images, a row of integers per image (int64 [I, 8]), and
the normalised value of every level, as the bits of float32 (int32 [I, 3, 256]; vLLM rounds floats).
"""


class Sent(NamedTuple):
    """An image as it is sent, and what is made of it: the row of integers under :data:`IMAGE`."""

    layout: int
    """The number of a layout in :data:`LAYOUTS`."""
    height: int
    width: int
    new_height: int
    """Height in pixels to which the image is resized."""
    new_width: int
    patch: int = 0
    """Side of a patch or tile in pixels, where the layout has some."""
    merge: int = 1
    """Side of a token in patches, where the layout orders patches by tokens."""
    extra: int = 1
    """Frames of a patch; the number to which a list of patches is filled up; 1 where tiles are
    followed by a thumbnail."""


Layout: TypeAlias = "Callable[[Sequence[Tensor], Sent], dict[str, Tensor]]"
"""Cuts a resized image [H, W, 3], and the thumbnail after it, into what vLLM takes by its names."""


def as_rows(views: Sequence[Tensor], sent: Sent) -> dict[str, Tensor]:
    """Cut an image as Qwen, GLM and MiniMax do, into rows [P, 3 * frames * p * p], by tokens."""
    rows = cut_frames(views[0][None, None], sent.patch, sent.merge, sent.extra)
    return {"pixel_values": rows.flatten(1)}


def as_patches(views: Sequence[Tensor], sent: Sent) -> dict[str, Tensor]:
    """Cut an image as PaddleOCR-VL does, into patches [P, 3 * frames, p, p], line by line."""
    rows = cut_frames(views[0][None, None], sent.patch, 1, sent.extra)
    return {"pixel_values": rows.view(len(rows), -1, sent.patch, sent.patch)}


def as_image(views: Sequence[Tensor], sent: Sent) -> dict[str, Tensor]:
    """Return a whole image [3, H, W], as Pixtral takes it."""
    return {"pixel_values": views[0].permute(2, 0, 1).contiguous()}


def as_positions(views: Sequence[Tensor], sent: Sent) -> dict[str, Tensor]:
    """Cut an image as Gemma 4 does, into rows [extra, p * p * 3] and their (column, row)."""
    rows = cut_frames(views[0][None, None], sent.patch, 1, channels_last=True).flatten(1)
    height, width = (torch.arange(side // sent.patch) for side in (sent.new_height, sent.new_width))
    positions = torch.cartesian_prod(height, width).flip(1).to(rows.device)
    filled = (0, 0, 0, sent.extra - len(rows))
    pad = torch.nn.functional.pad
    return {
        "pixel_values": pad(rows, filled),
        "pixel_position_ids": pad(positions, filled, value=-1),
    }


def as_tiles(views: Sequence[Tensor], sent: Sent) -> dict[str, Tensor]:
    """Cut an image as InternVL does, into tiles [B, 3, p, p], line by line, and its thumbnail."""
    tiles = [cut_frames(view[None, None], sent.patch, 1) for view in views]
    return {"pixel_values_flat": torch.cat(tiles).view(-1, 3, sent.patch, sent.patch)}


LAYOUTS: Sequence[Layout] = (as_rows, as_patches, as_image, as_positions, as_tiles)
"""The layouts, by the numbers under which images that are sent name them."""
JOINED = (as_rows, as_tiles)
"""The layouts whose items vLLM joins along the first axis; it stacks those of the others."""


def describe_levels(levels: Tensor, count: int) -> Tensor:
    """Return the entry :data:`LEVELS` for ``count`` images, from float32 [3, 256]."""
    return levels.contiguous().view(torch.int32)[None].expand(count, -1, -1)


def with_patches(inputs: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Return a batch of vLLM with patches in place of images that were sent as bytes.

    Other batches are returned as they are.

    Args:
        inputs: the inputs of a batch by their names in vLLM.
        dtype: dtype of normalised patches, which is that of vLLM's model.
    """
    made = dict(inputs)
    pixels, rows, levels = (made.pop(name, None) for name in (PIXELS, IMAGE, LEVELS))
    if isinstance(pixels, Tensor) and isinstance(rows, Tensor):
        made |= cut_images(pixels, rows, levels, dtype)
    return made


def cut_images(
    pixels: Tensor, rows: Tensor, levels: object, dtype: torch.dtype
) -> dict[str, Tensor | list[Tensor]]:
    """Resize and cut images on the device of their bytes, and normalise them if asked.

    Args:
        pixels: the bytes of I images, [H, W, 3] each, flat.
        rows: the entry :data:`IMAGE` of the images.
        levels: the entry :data:`LEVELS`; without it pixels stay uint8, and vLLM normalises them.
        dtype: dtype of normalised pixels.

    Returns:
        What vLLM's processor makes of the images, by its name in vLLM.
    """
    sent = [Sent(*row) for row in rows.tolist()]
    parts = pixels.split([3 * one.height * one.width for one in sent])
    images = [x.view(one.height, one.width, 3) for x, one in zip(parts, sent, strict=True)]
    cut = LAYOUTS[sent[0].layout]
    jobs = [(number, (one.new_height, one.new_width)) for number, one in enumerate(sent)]
    if cut is as_tiles:
        jobs += [(n, (one.patch, one.patch)) for n, one in enumerate(sent) if one.extra]
    numbers, sizes = zip(*jobs, strict=True)
    views: list[list[Tensor]] = [[] for _ in sent]
    resized = resize_all([images[n] for n in numbers], sizes, by_pillow=cut is as_tiles)
    for number, view in zip(numbers, resized, strict=True):
        if isinstance(levels, Tensor):
            bits = levels[number].contiguous().numpy().tobytes()
            view = look_up(view, _table(bits, dtype, view.device, _cuda_stream(view)), axis=2)
        views[number].append(view)
    items = [cut(*one) for one in zip(views, sent, strict=True)]
    join = torch.cat if cut in JOINED else stack
    return {name: join([item[name] for item in items]) for name in items[0]}


def resize_all(
    images: Sequence[Tensor], sizes: Sequence[tuple[int, int]], *, by_pillow: bool
) -> list[Tensor]:
    """Resize uint8 images [H, W, 3] by the bicubic filter of torch or Pillow, on their device."""
    if is_exact_on(images[0].device):
        pixels = [image[None] for image in images]
        made = resize_many(pixels, sizes, "bicubic", "pillow" if by_pillow else "torch")
        return [image[0] for image in made]
    function = _resize_by_pillow if by_pillow else _resize_by_torch
    return [function(image, *size) for image, size in zip(images, sizes, strict=True)]


def _resize_by_torch(image: Tensor, height: int, width: int) -> Tensor:
    return resize(image.permute(2, 0, 1), height, width).permute(1, 2, 0)


def _resize_by_pillow(image: Tensor, height: int, width: int) -> Tensor:
    whole = Image.fromarray(image.cpu().numpy())
    resized = whole.resize((width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(resized)).to(image.device)


def stack(items: Sequence[Tensor]) -> Tensor | list[Tensor]:
    """Stack tensors of one shape, as vLLM does; return a list of several shapes."""
    same = all(item.shape == items[0].shape for item in items)
    return torch.stack(list(items)) if same else list(items)


@lru_cache(maxsize=16)
def _table(bits: bytes, dtype: torch.dtype, device: torch.device, cuda_stream: int) -> Tensor:
    """Return normalised values [3, 256] on a device; each CUDA stream has tables of its own."""
    table = torch.frombuffer(bytearray(bits), dtype=torch.float32).view(3, 256).to(dtype)
    if device.type == "cuda":  # a copy from pageable memory would wait for all work on the GPU
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def _cuda_stream(pixels: Tensor) -> int:
    return torch.cuda.current_stream(pixels.device).stream_id if pixels.is_cuda else 0


def check_resizing(device: torch.device) -> None:
    """Log one line if images are resized on the CPU because the kernel differs on ``device``."""
    if device.type != "cuda":
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_exact_on(device)
    for warning in caught:
        LOGGER.warning("vitgraph: %s", warning.message)
