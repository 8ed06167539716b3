"""Items between the two steps of preprocessing: decoded and resized, but not normalised yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data import Grid, Limits, PathInputs, Tiling, VisionInputs
from .exact_resize import is_exact_on, library_of, resize_flat
from .intake import AnyArray, ImagesLike, VideosLike, as_flat_tensor
from .processor_files import PerChannel
from .resizing import CPU, ResizePlan, place_resized, resize, resize_rows
from .torch_internals import copy_together


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
            pixels if plan.keeps_all else place_resized(pixels[0], plan)[None].contiguous()
            for pixels, plan in zip(made, plans, strict=True)
        ]
    else:
        parts = split_planned([one.cpu() for one in images], planned)
        rows = [x.view(shape[1:]) for x, shape in zip(parts, shapes, strict=True)]
        if source is not None:
            rows = [source(x.permute(2, 0, 1)).permute(1, 2, 0) for x in rows]
        views = resize_rows(rows, plans)
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


def grid_tensor(grids: Sequence[Grid]) -> Tensor:
    """Return the grids (t, h, w) of items as ``grid_thw``, int64 [items, 3] on the CPU."""
    return torch.tensor(grids, dtype=torch.int64, device=CPU).view(-1, 3)
