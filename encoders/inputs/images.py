"""The steps that the preprocessing of all towers shares: resizing, normalising, and checks.

The pixels are those of transformers 5.23.0's torchvision-backed processors on the CPU: an image is
resized as uint8 (``F.interpolate``, bicubic, antialiased, which torchvision runs as well), then
normalised in float32 with the rescale by 1/255 folded into mean and std. Neither library is needed.
Where a checkpoint's own processor resizes by Pillow, as those of Kimi-VL, DeepSeek and timm do, the
filters "pillow_bicubic" and "pillow_bilinear" give Pillow's pixels.
On a GPU the same integers are computed (``exact_resize``), and the same float32: a difference and a
quotient are rounded in one way only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import index
from typing import NamedTuple, SupportsIndex

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import Grid, Limits, PathInputs, Tiling, VisionInputs
from .exact_resize import (
    is_exact_on,
    library_of,
    resize_exactly,
    resize_flat,
    resize_many,
    resize_on_cpu,
)
from .intake import AnyArray, ImagesLike, VideosLike, as_flat_tensor
from .processor_files import PerChannel, Resample
from .sampling import read_rate
from .sizes import MOST_PIXELS
from .torch_internals import copy_together

CPU = torch.device("cpu")
BLACK = (0.0, 0.0, 0.0)
"""The colour of the canvas around frames that do not fill it: black."""
_STRIP = 1 << 18
"""Numbers that are normalised at a time on a CPU: 1 MiB, which fits the second-level cache."""
_TOGETHER = 1 << 28
"""Bytes of images that are resized at a time."""
_DEVICE_STRIP = 1 << 24
"""Numbers that are looked up at a time on a GPU: 64 MiB, whatever the batch."""


class StagedPath(NamedTuple):
    """The pixels of one item for one input path, before they are normalised and cut."""

    pixels: Tensor
    """uint8 [n, H, W, 3], contiguous: n frames, tiles or views. Families that resize in floating
    point have float32."""
    grid: Grid
    """(t, h, w) of the item on this path, h and w in patches."""
    mean: PerChannel
    std: PerChannel


class StagedItem(NamedTuple):
    """One image or video after resizing, before it is normalised and cut into patches."""

    paths: Mapping[str, StagedPath]
    """The pixels for each input path by its name: "image", and for some families also "tiles"."""
    tiles: Tiling | None = None
    """The arrangement of an image's tiles, (columns, rows, whether a thumbnail follows); None for
    families without tiles."""
    image_size: tuple[int, int] | None = None
    """(height, width) in pixels of the image as decoded; None for families that do not need it."""

    def layout(self, names: Iterable[str]) -> VisionInputs:
        """Return the grids and tiles of the item without its pixels, for the input paths ``names``.

        The item need not have pixels for all of them.
        """
        empty, paths = torch.empty(0, device=CPU), {}
        for name in names:
            grids = [self.paths[name].grid] if name in self.paths else []
            paths[name] = PathInputs(empty, grid_tensor(grids), (0,) * len(grids))
        tiles = None if self.tiles is None else [self.tiles]
        sizes = None if self.image_size is None else [self.image_size]
        return VisionInputs(*paths.pop("image")[:2], tiles, paths, sizes)


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


class PlannedImage(NamedTuple):
    """How the images of one size become the pixels of a tower."""

    size: tuple[int, int]
    """Height and width of the images in pixels."""
    plan: ResizePlan
    grid: Grid
    mean: PerChannel
    std: PerChannel
    tiles: Tiling | None = None
    source: Callable[[Tensor], Tensor] | None = None
    """Makes the floats that are resized of an image, uint8 [3, H, W]; None resizes the image."""

    @property
    def nbytes(self) -> int:
        """The bytes of one image."""
        return 3 * self.size[0] * self.size[1]

    def layout(self) -> VisionInputs:
        """Return the grid and the tiles of the item without its pixels."""
        tiles = None if self.tiles is None else [self.tiles]
        return VisionInputs(torch.empty(0, device=CPU), grid_tensor([self.grid]), tiles)


class StagedPreprocessor(ABC):
    """A preprocessor in two steps: decoding and resizing, then normalising and cutting.

    Both steps run on any device, and their results are bitwise equal on all (families that resize
    in floating point agree within 1e-5). Between them the pixels are uint8, a quarter of the bytes
    of float32.
    """

    @abstractmethod
    def stage(
        self, images: ImagesLike, videos: VideosLike, limits: Limits, device: torch.device = CPU
    ) -> list[StagedItem]:
        """Decode and resize images, then videos; return one item for each.

        Args:
            images: images in any form that ``preprocess`` accepts.
            videos: videos in any form that ``preprocess`` accepts.
            limits: the keywords of ``preprocess``; None for each that the user did not pass.
            device: the device on which the pixels are to lie. On CUDA they are also resized there.

        Raises:
            ValueError: a bad image or video, or a keyword without meaning for this family.
        """

    def plan(self, image: Tensor, limits: Limits) -> PlannedImage | None:
        """Return how an image, uint8 [3, H, W], becomes one view, without resizing it yet.

        Returns:
            None for families that make several views of an image.

        Raises:
            ValueError: an image of a size that the family does not take.
        """
        return None

    @abstractmethod
    def finish(
        self, items: Sequence[StagedItem], dtype: torch.dtype = torch.float32
    ) -> VisionInputs:
        """Normalise items and cut them, on the device that their pixels are on.

        Args:
            items: what :meth:`stage` returned.
            dtype: the dtype to which the normalised pixels, float32, are rounded.
        """

    def __call__(
        self,
        images: ImagesLike = (),
        videos: VideosLike = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
        device: torch.device | str | None = None,
    ) -> VisionInputs:
        """Return the pixels and grids of images, then videos; see ``Encoder.preprocess``."""
        limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
        place = CPU if device is None else torch.device(device)
        return self.finish(self.stage(images, videos, limits, place))


def to_resize(image: Tensor, device: torch.device) -> Tensor:
    """Return a decoded image on the device where it is resized.

    Args:
        image: uint8 [3, H, W] on the CPU, or on a GPU that has decoded it.
        device: the device on which the pixels of the item are to lie in the end.

    Returns:
        The image on ``device`` where images are resized there, and else on the CPU.
    """
    if not is_exact_on(device):
        return image.cpu()
    if image.is_cuda:
        return image
    rows = image.permute(1, 2, 0)
    if rows.is_contiguous() and rows.is_pinned():  # decoded where the copy reads it
        return rows.to(device, non_blocking=True).permute(2, 0, 1)
    return stack_frames([image], device)[0].permute(2, 0, 1)


def hold_to_resize(images: Sequence[Tensor | AnyArray], device: torch.device) -> list[Tensor]:
    """Return the bytes of decoded images where a GPU copies them asynchronously.

    Their memory then does not change with an array of the caller.

    Args:
        images: uint8 [H, W, 3] each, tensors or arrays on the CPU, or all decoded by a GPU.
        device: the device on which the images are to lie in the end.

    Returns:
        Contiguous tensors of one image, or a flat one of several after each other.
    """
    tensors = [image for image in images if isinstance(image, Tensor)]
    if len(tensors) == len(images) and all(image.is_cuda for image in tensors):
        return tensors
    if len(images) == len(tensors) == 1:
        (rows,) = tensors
        if rows.is_contiguous() and (device.type != "cuda" or rows.is_pinned()):
            return [rows.view(-1)]
    arrays = [image.numpy() if isinstance(image, Tensor) else image for image in images]
    sizes = [array.size for array in arrays]
    out = torch.empty(sum(sizes), dtype=torch.uint8, device=CPU, pin_memory=device.type == "cuda")
    if len(arrays) == 1:  # by NumPy: see ``stack_frames``
        np.copyto(out.numpy().reshape(arrays[0].shape), arrays[0])
    else:
        copy_together(out.split(sizes), [as_flat_tensor(array) for array in arrays])
    return [out]


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
        for resized in _resize_rows(rows, [plan for _, plan in group]):
            yield resized.permute(2, 0, 1)


def stage_planned(
    images: Sequence[Tensor], planned: Sequence[PlannedImage], device: torch.device
) -> list[StagedItem]:
    """Resize images at once; their pixels lie on ``device`` then.

    Args:
        images: the bytes of the images, of one or of several after each other in a tensor.
        planned: how each image is resized, all by one family.
        device: the device of the results.
    """
    plans = [one.plan for one in planned]
    shapes = [(1, *one.size, 3) for one in planned]
    source = planned[0].source  # the images are of one family: none or all have one
    if is_exact_on(device):
        sent = _send(images, device)
        if source is None:
            sizes, mode = [(plan.height, plan.width) for plan in plans], plans[0].mode
            made = resize_flat(sent, shapes, sizes, mode, library_of(mode))
        else:
            made = _resize_floats(split_planned(sent, planned), planned)
        made = [
            pixels if plan.keeps_all else _place(pixels[0], plan)[None].contiguous()
            for pixels, plan in zip(made, plans, strict=True)
        ]
    else:
        parts = split_planned([one.cpu() for one in images], planned)
        rows = [x.view(shape[1:]) for x, shape in zip(parts, shapes, strict=True)]
        if source is not None:
            rows = [source(x.permute(2, 0, 1)).permute(1, 2, 0) for x in rows]
        views = _resize_rows(rows, plans)
        made = [stack_frames([view.permute(2, 0, 1)], device) for view in views]
    return [
        StagedItem({"image": StagedPath(pixels, one.grid, one.mean, one.std)}, one.tiles)
        for pixels, one in zip(made, planned, strict=True)
    ]


def _resize_floats(images: Sequence[Tensor], planned: Sequence[PlannedImage]) -> list[Tensor]:
    """Resize what is made of images on a device, given as their bytes, to [1, h, w, 3] each."""
    made = []
    for image, one in zip(images, planned, strict=True):
        assert one.source is not None
        floats = one.source(image.view(*one.size, 3).permute(2, 0, 1))
        resized = resize(floats, one.plan.height, one.plan.width, one.plan.mode)
        made.append(resized.permute(1, 2, 0)[None].contiguous())
    return made


def _send(images: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the bytes of images on a device; those that lie on the CPU are copied to one place."""
    sizes = [0 if image.device == device else image.numel() for image in images]
    copies = torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
    return [
        copy.copy_(image, non_blocking=True) if size else image
        for image, copy, size in zip(images, copies, sizes, strict=True)
    ]


def split_planned(images: Sequence[Tensor], planned: Sequence[PlannedImage]) -> list[Tensor]:
    """Return the bytes of each image, of tensors with one or several of them.

    Args:
        images: contiguous uint8 tensors of one image, or flat ones of several after each other.
        planned: how each image is resized, which says its size.
    """
    sizes = iter([one.nbytes for one in planned])
    parts: list[Tensor] = []
    for pixels in images:
        left, own = pixels.numel(), list[int]()
        while left:
            own.append(next(sizes))
            left -= own[-1]
        parts += pixels.split(own) if len(own) > 1 else [pixels]
    return parts


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


def _resize_rows(images: Sequence[Tensor], plans: Sequence[ResizePlan]) -> list[Tensor]:
    """Resize images [H, W, 3] of one dtype on one device, and place them, by their plans."""
    sizes, mode = [(plan.height, plan.width) for plan in plans], plans[0].mode
    if images[0].dtype == torch.uint8 and is_exact_on(images[0].device):
        made = resize_many(images, sizes, mode, library_of(mode))
    else:
        made = [
            resize(image.permute(2, 0, 1), *size, mode).permute(1, 2, 0)
            for image, size in zip(images, sizes, strict=True)
        ]
    return [_place(image, plan) for image, plan in zip(made, plans, strict=True)]


def _place(image: Tensor, plan: ResizePlan) -> Tensor:
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


def stack_frames(frames: Sequence[Tensor], device: torch.device) -> Tensor:
    """Copy frames into one tensor on a device, without waiting for it.

    NumPy copies in the calling thread. ``torch.stack`` starts a team of OpenMP threads in each
    thread that decodes: with four such threads on two CPU cores, a frame of 1280x720 laid out as
    [H, W, C] took 0.5 ms, and 0.2 ms with NumPy. A GPU copies from page-locked memory.

    Args:
        frames: [3, H, W] each, uint8 or float32, of one size, laid out in any way; all on the CPU
            or all on ``device``.
        device: the device of the result.

    Returns:
        [frames, H, W, 3] of the dtype of the frames, contiguous.
    """
    rows = [frame.permute(1, 2, 0) for frame in frames]
    if frames[0].device != CPU:
        return rows[0][None].contiguous() if len(rows) == 1 else torch.stack(rows).contiguous()
    shape, pinned = (len(rows), *rows[0].shape), device.type == "cuda"
    out = torch.empty(shape, dtype=rows[0].dtype, device=CPU, pin_memory=pinned)
    np.stack([row.numpy() for row in rows], out=out.numpy())
    return out.to(device, non_blocking=True)


def fold_mean_std(mean: PerChannel, std: PerChannel) -> tuple[Tensor, Tensor]:
    """Convert mean and std from the scale 0 to 1 to the scale 0 to 255, float32 [3] each."""
    mean_std = torch.tensor((mean, std), dtype=torch.float32, device=CPU) * 255.0
    return mean_std[0], mean_std[1]


def normalize(
    pixels: Tensor,
    mean: PerChannel,
    std: PerChannel,
    axis: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Normalise pixels on their device, in float32; the result is the same on all devices.

    Args:
        pixels: uint8 or float32 from 0 to 255, with the three channels on ``axis``.
        mean: mean of each channel, of pixels from 0 to 1.
        std: standard deviation of each channel, of pixels from 0 to 1.
        axis: the axis of the channels.
        dtype: the dtype to which the result is rounded.

    Returns:
        A tensor of ``dtype``, shaped as ``pixels``, contiguous.
    """
    if type(pixels) is Tensor and is_exact_on(pixels.device):
        from .normalize_kernel import normalize_rows

        out = torch.empty(pixels.shape, dtype=dtype, device=pixels.device)
        with torch.cuda.device_of(pixels):  # Triton launches on the current device
            normalize_rows(pixels, out, *_folded(mean, std), axis)
        return out
    out = torch.empty(pixels.shape, dtype=torch.float32, device=pixels.device)
    shape = [3 if n == axis else 1 for n in range(pixels.ndim)]
    low, scale = (one.view(shape).to(pixels.device) for one in fold_mean_std(mean, std))
    for source, target in _strips(pixels, out, _STRIP):
        target.copy_(source).sub_(low).div_(scale)
    return out.to(dtype)


@lru_cache(maxsize=64)
def _folded(mean: PerChannel, std: PerChannel) -> tuple[Sequence[float], Sequence[float]]:
    """Return what :func:`fold_mean_std` does as numbers."""
    low, scale = fold_mean_std(mean, std)
    return low.tolist(), scale.tolist()


def look_up(pixels: Tensor, levels: Tensor, axis: int) -> Tensor:
    """Replace each level of uint8 pixels by a value, on the device of both.

    Args:
        pixels: uint8, with the three channels on ``axis``.
        levels: the values of the levels of each channel, [3, 256].
        axis: the axis of the channels.

    Returns:
        A tensor of the dtype of ``levels``, shaped as ``pixels``, contiguous.
    """
    shape = [3 if n == axis else 1 for n in range(pixels.ndim)]
    offsets = torch.arange(0, 768, 256, dtype=torch.int32, device=pixels.device).view(shape)
    out = torch.empty(pixels.shape, dtype=levels.dtype, device=pixels.device)
    for source, target in _strips(pixels.contiguous(), out, _DEVICE_STRIP):
        torch.index_select(levels.flatten(), 0, (source + offsets).flatten(), out=target.view(-1))
    return out


def _strips(pixels: Tensor, out: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a few rows of both tensors at a time: ``size`` numbers, or one row if it has more."""
    rows = max(size // max(pixels[:1].numel(), 1), 1)
    return zip(pixels.split(rows), out.split(rows), strict=True)


def finish_path(
    parts: Sequence[StagedPath],
    cut: Callable[[Tensor], Tensor],
    axis: int,
    row: Sequence[int],
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> Tensor:
    """Normalise the pixels of several items for one input path, and cut them into rows.

    Args:
        parts: the pixels of the items.
        cut: cuts the pixels of items of one shape, [items, n, H, W, 3], into rows, which have their
            three channels on ``axis``.
        axis: the axis of the channels.
        row: the shape of a row. A row of one axis is flattened after it is normalised.
        dtype: the dtype of the result.
        device: the device of the result if there are no items.

    Returns:
        [rows, *row].
    """
    made = [torch.empty(0, *row, dtype=dtype, device=device)] if not parts else []
    for (mean, std, _), group in groupby(parts, lambda part: (*part[2:], part.pixels.dtype)):
        rows = _cut_all([part.pixels for part in group], cut)
        normal = normalize(rows, mean, std, axis, dtype)
        made.append(normal.flatten(1) if len(row) == 1 else normal)
    return made[0] if len(made) == 1 else torch.cat(made)


def _cut_all(pixels: Sequence[Tensor], cut: Callable[[Tensor], Tensor]) -> Tensor:
    """Cut the pixels of items, [n, H, W, 3] each, into rows; those of one shape at once."""
    shapes = [one.shape for one in pixels]
    numbers: dict[torch.Size, list[int]] = {}
    for number, shape in enumerate(shapes):
        numbers.setdefault(shape, []).append(number)
    cuts = {
        shape: cut(_stack([pixels[number] for number in same])) for shape, same in numbers.items()
    }
    if len(cuts) == 1:
        return cuts[shapes[0]]
    left = {shape: iter(rows.chunk(len(numbers[shape]))) for shape, rows in cuts.items()}
    return torch.cat([next(left[shape]) for shape in shapes])


def channels_first(views: Tensor) -> Tensor:
    """Return the views of items, [items, n, H, W, 3], as [items*n, 3, H, W]."""
    return views.flatten(0, 1).permute(0, 3, 1, 2)


def _stack(pixels: Sequence[Tensor]) -> Tensor:
    return pixels[0][None] if len(pixels) == 1 else torch.stack(list(pixels))


def grid_tensor(grids: Sequence[Grid]) -> Tensor:
    """Return the grids (t, h, w) of items as ``grid_thw``, int64 [items, 3] on the CPU."""
    return torch.tensor(grids, dtype=torch.int64, device=CPU).view(-1, 3)


def check_limits(limits: Limits) -> None:
    """Check the values of the keywords of ``preprocess`` that are not None.

    Raises:
        ValueError: an ``fps`` that is not a positive number, another keyword that is not a positive
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
