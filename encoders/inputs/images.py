"""The steps that the preprocessing of all towers shares: resizing, normalising, and checks.

The pixels are those of transformers 5.23.0's torchvision-backed processors on the CPU: an image is
resized as uint8 (``F.interpolate``, bicubic, antialiased, which torchvision runs as well), then
normalised in float32 with the rescale by 1/255 folded into mean and std. Neither library is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import index
from typing import NamedTuple, Protocol, SupportsIndex, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..data import Grid, Limits, Tiling, VisionInputs
from .intake import ImagesLike, VideosLike
from .processor_files import PerChannel, Resample
from .sampling import read_rate
from .sizes import MOST_PIXELS


class StagedItem(NamedTuple):
    """One image or video after resizing, before it is normalised and cut into patches."""

    pixels: Tensor
    """uint8 [frames, H, W, 3], contiguous; for tiled families [tiles, S, S, 3], S the side of a
    tile in pixels. DINOv3's are float32 from 0 to 255, because its images are resized as floats."""
    grid: Grid
    """(t, h, w) of the item, h and w in patches."""
    mean: PerChannel
    std: PerChannel
    tiles: Tiling | None = None
    """The arrangement of an image's tiles, (columns, rows, whether a thumbnail follows); None for
    families without tiles."""


@runtime_checkable
class StagedPreprocessor(Protocol):
    """A preprocessor that can normalise pixels and cut them into patches on another device.

    ``finish(stage(images, videos, limits))`` is bitwise equal to what calling the preprocessor with
    the same arguments returns. The pixels in between are uint8, a quarter of the bytes of float32.
    """

    def stage(
        self,
        images: ImagesLike,
        videos: VideosLike,
        limits: Limits,
        pinned: bool = False,
    ) -> list[StagedItem]:
        """Decode and resize images, then videos; return one item for each.

        Args:
            images: images in any form that ``preprocess`` accepts.
            videos: videos in any form that ``preprocess`` accepts.
            limits: the keywords of ``preprocess``; None for each that the user did not pass.
            pinned: whether the pixels are to lie in page-locked memory, from which a GPU copies
                asynchronously.
        """
        ...

    def finish(self, items: Sequence[StagedItem]) -> VisionInputs:
        """Normalise items and cut them into patches on the device that their pixels are on."""
        ...


def resize(image: Tensor, height: int, width: int, mode: Resample = "bicubic") -> Tensor:
    """Resize an image as torchvision does, antialiased.

    Args:
        image: uint8 [C, H, W], or float32 of the same values.
        height: height of the result in pixels.
        width: width of the result in pixels.
        mode: "bicubic", "bilinear" or, for uint8, "lanczos".

    Returns:
        [C, height, width] in the dtype of ``image``; ``image`` itself if it has that size already.
    """
    if image.shape[1:] == (height, width):
        return image
    # interpolate has a fast path for memory laid out as [H, W, C], which it recognises by the batch
    # stride. On a CPU core 640x427 to 640x416 takes 0.16 ms that way, 0.44 ms if [C, H, W] is
    # copied to that layout here, and 0.65 ms on [C, H, W] itself.
    if image.stride(0) != 1:
        image = torch.stack(image.unbind(), dim=-1).permute(2, 0, 1)
    batch = image.as_strided((1, *image.shape), (image.numel(), *image.stride()))
    if mode == "lanczos":
        return _lanczos(batch, height, width)[0]
    return F.interpolate(
        batch, size=(height, width), mode=mode, antialias=True, align_corners=False
    )[0]


def _lanczos(batch: Tensor, height: int, width: int) -> Tensor:
    """Resize uint8 [1, 3, H, W] to ``height`` x ``width`` pixels with the Lanczos filter.

    PIL resizes if torch has no Lanczos kernel, as torch 2.11. Of PIL's values, 0.6 % differ from
    torch's by one of 255 levels, and 1 in 100,000 by two.
    """
    if torch_has_lanczos(batch.device.type):
        return F.interpolate(batch, size=(height, width), mode="lanczos", antialias=True)
    image = Image.fromarray(batch[0].permute(1, 2, 0).cpu().numpy())
    resized = np.array(image.resize((width, height), Image.Resampling.LANCZOS))
    return torch.from_numpy(resized).permute(2, 0, 1)[None].to(batch.device)


@cache
def torch_has_lanczos(device_type: str) -> bool:
    """Return whether torch resizes uint8 images with the Lanczos filter on a kind of device."""
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.uint8, device=device_type)
    try:
        F.interpolate(pixels, size=(4, 4), mode="lanczos", antialias=True)
    except (NotImplementedError, ValueError):
        return False
    return True


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
    levels = torch.tensor([int(part * 255) for part in colour], dtype=torch.uint8, device="cpu")
    canvas = levels[:, None, None].repeat(1, height, width)
    canvas[:, top : top + image.shape[1], left : left + image.shape[2]] = image
    return canvas


def pad_to_canvas(image: Tensor, height: int, width: int, colour: PerChannel) -> Tensor:
    """Resize an image, keeping its aspect ratio, and centre it on a canvas that it just fits.

    This is PIL's ``ImageOps.pad``, with Python's ``round`` (half to even). A side that is rounded
    to 0, where PIL leaves the image out, has one pixel here.

    Args:
        image: uint8 [3, h, w].
        height: height of the canvas in pixels.
        width: width of the canvas in pixels.
        colour: red, green and blue around the image, from 0 to 1, rounded as in :func:`lay_over`.

    Returns:
        uint8 [3, height, width].
    """
    shape, canvas = image.shape[2] / image.shape[1], width / height
    image_height, image_width = height, width
    if shape > canvas:
        image_height = max(round(image.shape[1] / image.shape[2] * width), 1)
    elif shape < canvas:
        image_width = max(round(image.shape[2] / image.shape[1] * height), 1)
    top, left = round((height - image_height) * 0.5), round((width - image_width) * 0.5)
    return lay_over(resize(image, image_height, image_width), height, width, top, left, colour)


def stack_frames(frames: Sequence[Tensor], pinned: bool) -> Tensor:
    """Copy frames into one tensor.

    NumPy copies in the calling thread. ``torch.stack`` starts a team of OpenMP threads in each
    thread of a stream that decodes: with four such threads on two CPU cores, a frame of 1280x720
    laid out as [H, W, C] took 0.5 ms, and 0.2 ms with NumPy.

    Args:
        frames: [3, H, W] each, of one size and dtype, laid out in any way.
        pinned: whether the tensor is to lie in page-locked memory.

    Returns:
        [frames, H, W, 3] in the dtype of the frames, contiguous.
    """
    count, (channels, height, width) = len(frames), frames[0].shape
    shape = (count, height, width, channels)
    out = torch.empty(shape, dtype=frames[0].dtype, device="cpu", pin_memory=pinned)
    np.stack([frame.permute(1, 2, 0).numpy() for frame in frames], out=out.numpy())
    return out


def fold_mean_std(mean: PerChannel, std: PerChannel) -> tuple[Tensor, Tensor]:
    """Convert mean and std from the scale 0 to 1 to the scale 0 to 255, float32 [3, 1, 1] each."""
    mean_std = torch.tensor((mean, std), dtype=torch.float32, device="cpu") * 255.0
    return mean_std[0].view(3, 1, 1), mean_std[1].view(3, 1, 1)


def normalize(pixels: Tensor, mean: PerChannel, std: PerChannel) -> Tensor:
    """Normalise uint8 pixels on their device, bitwise equal to the preprocessing on the CPU.

    Args:
        pixels: uint8 [N, 3, ...].
        mean: mean of each channel, of pixels from 0 to 1.
        std: standard deviation of each channel, of pixels from 0 to 1.

    Returns:
        float32 [N, 3, ...].
    """
    mean_std = torch.stack(fold_mean_std(mean, std))
    if pixels.is_cuda:  # a copy from pageable memory would wait for all work queued on the GPU
        mean_std = mean_std.pin_memory()
    low, scale = mean_std.to(pixels.device, non_blocking=True).view(2, 3, *[1] * (pixels.ndim - 2))
    return pixels.to(torch.float32).sub_(low).div_(scale)


def grid_tensor(grids: Sequence[Grid]) -> Tensor:
    """Return the grids (t, h, w) of items as ``grid_thw``, int64 [items, 3] on the CPU."""
    return torch.tensor(grids, dtype=torch.int64, device="cpu").view(-1, 3)


def check_limits(limits: Limits) -> None:
    """Check the values of the keywords of ``preprocess`` that are not None.

    Raises:
        ValueError: an ``fps`` that is no positive number, another keyword that is no positive
            integer, or ``min_pixels`` over ``MOST_PIXELS``, the largest area of an image.
    """
    for name, value in limits._asdict().items():
        if name == "fps":
            if value is not None and read_rate(value) is None:
                raise ValueError(f"fps={value!r}: must be a positive number of frames per second")
            continue
        number = 1 if value is None else _as_integer(value)
        if number < 1:
            raise ValueError(f"{name}={value!r}: must be a positive integer")
        if name == "min_pixels" and number > MOST_PIXELS:
            raise ValueError(f"min_pixels={value}: must be at most {MOST_PIXELS}, an area")


def _as_integer(value: object) -> int:
    """Return ``value`` as int if it is an integer of any type but bool, and 0 otherwise."""
    if isinstance(value, bool):
        return 0
    try:
        return index(value) if isinstance(value, SupportsIndex) else 0
    except TypeError:  # an array of several numbers, or of floats
        return 0
