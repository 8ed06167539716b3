"""Resizing an image and placing it on a canvas, for all towers, to the bit on every device.

The pixels are those of transformers 5.23.0's torchvision-backed processors on the CPU: an image is
resized as uint8 (``F.interpolate``, bicubic, antialiased, which torchvision runs as well). Neither
library is needed. Where a checkpoint's own processor resizes by Pillow, as those of Kimi-VL,
DeepSeek and timm do, the filters "pillow_bicubic" and "pillow_bilinear" give Pillow's pixels. On a
GPU the same integers are computed (``exact_resize``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .exact_resize import is_exact_on, library_of, resize_exactly, resize_many, resize_on_cpu
from .processor_files import PerChannel, Resample

CPU = torch.device("cpu")
BLACK = (0.0, 0.0, 0.0)
"""The colour of the canvas around frames that do not fill it: black."""
_TOGETHER = 1 << 28
"""Bytes of images that are resized at a time."""


class ResizePlan(NamedTuple):
    """How an image becomes one view: it is resized, then cut or laid over a canvas."""

    height: int
    """The height in pixels to which the image is resized."""
    width: int
    mode: Resample = "bicubic"
    window: tuple[int, int, int, int] | None = None
    """Top, left, height and width of the part that is kept; None keeps everything."""
    canvas: tuple[int, int] | None = None
    """Height and width of a canvas of one colour, over which the image is laid; or None."""
    corner: tuple[int, int] = (0, 0)
    """Row and column of the canvas where the image begins."""
    colour: PerChannel = BLACK
    """Red, green and blue of the canvas, from 0 to 1."""

    @property
    def keeps_all(self) -> bool:
        """Whether the resized image is the view, neither cut nor laid over a larger canvas."""
        size = self.height, self.width
        return self.window in (None, (0, 0, *size)) and self.canvas in (None, size)


def resize(image: Tensor, height: int, width: int, mode: Resample = "bicubic") -> Tensor:
    """Resize an image as torchvision does, antialiased, on the image's device.

    Args:
        image: uint8 or floating point [C, H, W]. The result of uint8 is the same on all devices.
        height: height of the result in pixels.
        width: width of the result in pixels.
        mode: "bicubic", "bilinear" or, for uint8, "lanczos", "pillow_bicubic" or "pillow_bilinear".

    Returns:
        [C, height, width] of the dtype of ``image``; ``image`` itself if it has that size already.
    """
    if image.shape[1:] == (height, width):
        return image
    if image.is_floating_point():
        return F.interpolate(image[None], (height, width), mode=mode, antialias=True)[0]
    if is_exact_on(image.device):
        pixels = image.permute(1, 2, 0)[None]
        resized = resize_exactly(pixels, height, width, mode, library_of(mode))
        return resized[0].permute(2, 0, 1)
    if image.device != CPU:
        return resize(image.cpu(), height, width, mode).to(image.device)
    # interpolate has a fast path for memory laid out as [H, W, C], which it recognises by the batch
    # stride. On a CPU core 640x427 to 640x416 takes 0.16 ms that way, 0.44 ms if [C, H, W] is
    # copied to that layout here, and 0.65 ms on [C, H, W] itself.
    if image.stride(0) != 1:
        image = torch.stack(image.unbind(), dim=-1).permute(2, 0, 1)
    batch = image.as_strided((1, *image.shape), (image.numel(), *image.stride()))
    return resize_on_cpu(batch, height, width, mode)[0]


def resize_planned(
    plans: Sequence[tuple[Tensor, ResizePlan]], source: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Resize images by their plans; on a GPU, several at once.

    Args:
        plans: images, uint8 [3, H, W], and the plan of each.
        source: makes of an image what is resized, uint8 or floating point, on its device.

    Returns:
        [3, h, w] per image, in order. About 256 MiB of sources are on the device at a time.
    """
    for start, stop in _groups([(image.nbytes, plan) for image, plan in plans]):
        group = plans[start:stop]
        rows = [source(image).permute(1, 2, 0) for image, _ in group]
        for resized in resize_rows(rows, [plan for _, plan in group]):
            yield resized.permute(2, 0, 1)


def _groups(plans: Sequence[tuple[int, ResizePlan]]) -> Iterator[tuple[int, int]]:
    """Yield start and stop of consecutive images with one filter that have ``_TOGETHER`` bytes.

    ``plans`` has the number of bytes and the plan of each image.
    """
    start = size = 0
    for stop, (nbytes, plan) in enumerate(plans):
        if stop > start and (size + nbytes > _TOGETHER or plan.mode != plans[start][1].mode):
            yield start, stop
            start, size = stop, 0
        size += nbytes
    if plans:
        yield start, len(plans)


def resize_rows(images: Sequence[Tensor], plans: Sequence[ResizePlan]) -> list[Tensor]:
    """Resize images [H, W, 3] of one dtype on one device, and place them, by their plans."""
    sizes, mode = [(plan.height, plan.width) for plan in plans], plans[0].mode
    if images[0].dtype == torch.uint8 and is_exact_on(images[0].device):
        made = resize_many(images, sizes, mode, library_of(mode))
    else:
        made = [
            resize(image.permute(2, 0, 1), *size, mode).permute(1, 2, 0)
            for image, size in zip(images, sizes, strict=True)
        ]
    return [place_resized(image, plan) for image, plan in zip(made, plans, strict=True)]


def place_resized(image: Tensor, plan: ResizePlan) -> Tensor:
    """Cut a resized image [h, w, 3], or lay it over the canvas of its plan."""
    if plan.keeps_all:
        return image
    if plan.window is not None:
        top, left, height, width = plan.window
        return image[top : top + height, left : left + width]
    if plan.canvas is not None:
        placed = lay_over(image.permute(2, 0, 1), *plan.canvas, *plan.corner, plan.colour)
        return placed.permute(1, 2, 0)
    return image


def lay_over(
    image: Tensor, height: int, width: int, top: int, left: int, colour: PerChannel
) -> Tensor:
    """Lay an image over a canvas of one colour.

    Args:
        image: uint8 [3, h, w], not larger than the canvas.
        height: height of the canvas in pixels.
        width: width of the canvas in pixels.
        top: row of the canvas where the image begins.
        left: column of the canvas where the image begins.
        colour: red, green and blue from 0 to 1, which are multiplied by 255 and rounded down.

    Returns:
        uint8 [3, height, width].
    """
    canvas = image.new_empty(height, width, 3).permute(2, 0, 1)
    for plane, part in zip(canvas, colour, strict=True):
        plane.fill_(int(part * 255))
    canvas[:, top : top + image.shape[1], left : left + image.shape[2]] = image
    return canvas


def pad_to_canvas(
    image: Tensor, height: int, width: int, colour: PerChannel, mode: Resample = "bicubic"
) -> Tensor:
    """Resize an image, keeping its aspect ratio, and centre it on a canvas that it just fits.

    Args:
        image: uint8 [3, h, w].
        height: height of the canvas in pixels.
        width: width of the canvas in pixels.
        colour: red, green and blue around the image, from 0 to 1, rounded as in :func:`lay_over`.
        mode: the filter, as in :func:`resize`.

    Returns:
        uint8 [3, height, width].
    """
    plan = plan_on_canvas(image, height, width, colour)
    small = resize(image, plan.height, plan.width, mode)
    return lay_over(small, height, width, *plan.corner, colour)


def plan_on_canvas(image: Tensor, height: int, width: int, colour: PerChannel) -> ResizePlan:
    """Return how :func:`pad_to_canvas` resizes and places an image.

    This is PIL's ``ImageOps.pad``, with Python's ``round`` (half to even). A side that is rounded
    to 0, where PIL leaves the image out, has one pixel here.
    """
    shape, canvas = image.shape[2] / image.shape[1], width / height
    image_height, image_width = height, width
    if shape > canvas:
        image_height = max(round(image.shape[1] / image.shape[2] * width), 1)
    elif shape < canvas:
        image_width = max(round(image.shape[2] / image.shape[1] * height), 1)
    corner = round((height - image_height) * 0.5), round((width - image_width) * 0.5)
    return ResizePlan(
        image_height, image_width, canvas=(height, width), corner=corner, colour=colour
    )
