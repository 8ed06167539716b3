"""Resizing of uint8 images on a GPU, equal to the bit to what torch or Pillow does on the CPU.

Both libraries resize one axis after the other, each with integer weights and with rounding to uint8
in between. The weights are computed here in float64, as the libraries do:

- torch 2.11 to 2.15 (``_compute_index_ranges_int16_weights``): as many bits after the point as
  let the largest weight fit in int16; the width first.
- Pillow 10 to 13 (``precompute_coeffs`` and ``normalize_coeffs_8bpc`` of ``Resample.c``): 22 bits;
  the width first, but until Pillow 12 the height first if it shrinks and is over 100 widths, and
  from Pillow 13 on if it shrinks by more than twice the pixels by which the width does.

The kernel lies in ``resize_kernel``, which is imported when an image is resized on a GPU for the
first time, because it imports Triton.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import PIL
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from .processor_files import Resample

Library: TypeAlias = Literal["torch", "pillow"]
"""The library whose integer arithmetic is followed."""
Floats: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"
_PILLOW_BITS, _MOST_BITS = 22, 22
"""The bits after the point in Pillow's weights, and the most in torch's."""
_FIRST_PILLOW_WITH_ORDER = 13
"""The first version of Pillow that chooses the order of the axes by both sizes."""
_LOCK = threading.Lock()


def _triangle(x: Floats) -> Floats:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: Floats) -> Floats:
    """Return Keys' cubic with a = -0.5."""
    x = np.abs(x)
    inner = (1.5 * x - 2.5) * x * x + 1
    outer = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, inner, np.where(x < 2, outer, 0))


def _lanczos3(x: Floats) -> Floats:
    return np.where((x >= -3) & (x < 3), _sinc(x) * _sinc(x / 3), 0)


def _sinc(x: Floats) -> Floats:
    angle = x * math.pi
    return np.where(x == 0, 1, np.sin(angle) / np.where(x == 0, 1, angle))


_FILTERS: Mapping[Resample, tuple[Callable[[Floats], Floats], int]] = {
    "bilinear": (_triangle, 1),
    "bicubic": (_cubic, 2),
    "lanczos": (_lanczos3, 3),
    "pillow_bicubic": (_cubic, 2),
    "pillow_bilinear": (_triangle, 1),
}
"""The function of each filter, and the distance at which it becomes zero."""
_PILLOW_FILTERS: Mapping[Resample, Image.Resampling] = {
    "pillow_bicubic": Image.Resampling.BICUBIC,
    "pillow_bilinear": Image.Resampling.BILINEAR,
}
"""The filters that stand for Pillow's, whatever torch has."""


class Weights(NamedTuple):
    """The integer weights by which one axis is resized."""

    table: Tensor
    """int32 [1 + taps, size]: per output row, a column here, the number of the first input row that
    it is made of, and the weights of that and the next ones; those after the last one are zero."""
    shift: int
    """The number of bits after the point in the weights."""


def make_weights(length: int, size: int, mode: Resample, library: Library) -> Weights:
    """Compute the weights by which an axis of ``length`` pixels is resized to ``size`` pixels.

    Args:
        length: pixels of the axis before, at least 1.
        size: pixels of the axis after, at least 1.
        mode: the filter.
        library: the library whose weights these are, to the bit.
    """
    function, radius = _FILTERS[mode]
    scale = length / size
    stretch = max(scale, 1.0)
    centre = scale * (np.arange(size) + 0.5)
    first = np.maximum((centre - radius * stretch + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + radius * stretch + 0.5).astype(np.int64), length)
    counts = last - first
    tap = np.arange(counts.max())
    values = function((tap + first[:, None] - centre[:, None] + 0.5) * (1.0 / stretch))
    values[tap >= counts[:, None]] = 0
    # Weights are added one by one as in both libraries: a sum in pairs may differ in its last bit.
    values /= np.add.accumulate(values, axis=1)[:, -1:]
    shift = _PILLOW_BITS if library == "pillow" else _bits_for_int16(float(values.max()))
    rounded = np.trunc(values * (1 << shift) + np.where(values < 0, -0.5, 0.5))
    table = np.concatenate((first[None], rounded.T)).astype(np.int32, order="C")
    return Weights(torch.from_numpy(table), shift)


def _bits_for_int16(largest: float) -> int:
    """Return the number of bits after the point with which torch stores weights up to ``largest``.

    It stops one bit before the largest weight would no longer fit in int16.
    """
    bits = 0
    while bits < _MOST_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return bits


@lru_cache(maxsize=256)
def _weights_on(
    length: int, size: int, mode: Resample, library: Library, device: torch.device, cuda_stream: int
) -> Weights:
    """Return weights on a device.

    Each CUDA stream has tables of its own, so that none is read before it is copied, and none is
    freed while another CUDA stream reads it. A table has 100 KB at most for published sizes.
    """
    weights = make_weights(length, size, mode, library)
    if device.type == "cpu":
        return weights
    table = weights.table.pin_memory().to(device, non_blocking=True)
    return weights._replace(table=table)


def axes_in_order(
    image_size: tuple[int, int], new_size: tuple[int, int], library: Library
) -> list[int]:
    """Return the axes that a library resizes, in its order: 0 for the height, 1 for the width.

    Args:
        image_size: height and width of the image in pixels.
        new_size: height and width in pixels that it is resized to.
        library: the library whose order it is.
    """
    less_height, less_width = (old - new for old, new in zip(image_size, new_size, strict=True))
    order = [1, 0]
    if library == "pillow" and less_height > 0:
        is_tall = image_size[0] > 100 * image_size[1]  # the rule until Pillow 12
        if less_height > 2 * less_width if _pillow_chooses_order() else is_tall:
            order = [0, 1]
    return [axis for axis in order if image_size[axis] != new_size[axis]]


@cache
def _pillow_chooses_order() -> bool:
    return int(PIL.__version__.partition(".")[0]) >= _FIRST_PILLOW_WITH_ORDER


def resize_exactly(
    pixels: Tensor, height: int, width: int, mode: Resample, library: Library = "torch"
) -> Tensor:
    """Resize uint8 images by the Triton kernel, to the bit as a library does on the CPU.

    Args:
        pixels: uint8 [N, H, W, C] on a CUDA device, or on the CPU in Triton's interpreter.
        height: height of the result in pixels.
        width: width of the result in pixels.
        mode: the filter.
        library: the library whose result it is.

    Returns:
        uint8 [N, height, width, C], contiguous; ``pixels`` itself if it has that size already.
    """
    return resize_many([pixels], [(height, width)], mode, library)[0]


def resize_many(
    images: Sequence[Tensor],
    sizes: Sequence[tuple[int, int]],
    mode: Resample,
    library: Library = "torch",
) -> list[Tensor]:
    """Resize images of several sizes as :func:`resize_exactly` does, in one launch per axis.

    Args:
        images: uint8 [H, W, C] or [N, H, W, C] each, all on one CUDA device, or on the CPU in
            Triton's interpreter.
        sizes: the height and width in pixels to which each is resized.
        mode: the filter.
        library: the library whose result it is.

    Returns:
        uint8 [height, width, C] or [N, height, width, C] for each, contiguous, in the memory of the
        image if it has that size.
    """
    shapes = [tuple(image.shape) for image in images]
    if all(shape[-3:-1] == size for shape, size in zip(shapes, sizes, strict=True)):
        return [image.contiguous() for image in images]
    return resize_flat([image.contiguous() for image in images], shapes, sizes, mode, library)


class _Step(NamedTuple):
    """How one axis of the images of one shape is resized."""

    nbytes: int
    """The bytes of the result."""
    table: Tensor
    """The table of the weights, which the kernel reads by its address."""
    sizes: tuple[int, int, int, int, int, int]
    """The sizes of an :class:`AxisJob` after its addresses."""


class _Steps(NamedTuple):
    """How images of one shape are resized."""

    steps: tuple[_Step | None, _Step | None, _Step | None]
    """Of the height, the width and the height: most images have their width resized first."""
    nbytes: int
    """The bytes of an image before."""
    shape: tuple[int, ...]
    """The shape of the result."""
    strides: tuple[int, ...]


@lru_cache(maxsize=256)
def _steps_of(
    shape: tuple[int, ...],
    size: tuple[int, int],
    mode: Resample,
    library: Library,
    device: torch.device,
    cuda_stream: int,
) -> _Steps:
    """Return how images [H, W, C] or [N, H, W, C] are resized on a device and a CUDA stream."""
    order = axes_in_order((shape[-3], shape[-2]), size, library)
    made, steps = [*shape], list[_Step | None]()
    for axis, is_taken in ((0, order == [0, 1]), (1, 1 in order), (0, order in ([0], [1, 0]))):
        if not is_taken:
            steps.append(None)
            continue
        *n, h, w, c = made
        count, length = math.prod(n), size[axis]
        outer, old, inner = (count, h, w * c) if axis == 0 else (count * h, w, c)
        table, shift = _weights_on(old, length, mode, library, device, cuda_stream)
        sizes = outer, old, length, inner, len(table) - 1, shift
        made[axis - 3] = length
        steps.append(_Step(math.prod(made), table, sizes))
    strides = tuple(math.prod(made[place + 1 :]) for place in range(len(made)))
    return _Steps((steps[0], steps[1], steps[2]), math.prod(shape), tuple(made), strides)


def resize_flat(
    images: Sequence[Tensor],
    image_shapes: Sequence[tuple[int, ...]],
    sizes: Sequence[tuple[int, int]],
    mode: Resample,
    library: Library,
) -> list[Tensor]:
    """Resize images as :func:`resize_many` does, which may lie in their tensors in any way.

    No tensor is made per image and step: that takes longer than what is computed here for it.

    Args:
        images: contiguous tensors that have the numbers of one image or of several after each
            other, of any shape.
        image_shapes: the shape of each image, [H, W, C] or [N, H, W, C].
        sizes: the height and width in pixels to which each is resized.
        mode: the filter.
        library: the library whose result it is.
    """
    if not images:
        return []
    device = images[0].device
    cuda_stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    plans = [
        _steps_of(shape, size, mode, library, device, cuda_stream)
        for shape, size in zip(image_shapes, sizes, strict=True)
    ]
    places, left = list[tuple[Tensor, int]](), iter(plans)
    """The tensor that has each image, and the byte where it begins there."""
    for pixels in images:
        start = 0
        while start < pixels.numel():
            places.append((pixels, start))
            start += next(left).nbytes
    with torch.cuda.device_of(images[0]):
        for number, axis in enumerate((1, 2, 1)):
            places = _resize_axis(places, [plan.steps[number] for plan in plans], axis)
    whole = places[0][0]
    if len({plan.shape for plan in plans}) == 1 and all(one is whole for one, _ in places):
        return list(whole.view(len(plans), *plans[0].shape).unbind())  # all views in one call
    return [
        tensor.as_strided(plan.shape, plan.strides, tensor.storage_offset() + start)
        for (tensor, start), plan in zip(places, plans, strict=True)
    ]


def _resize_axis(
    places: Sequence[tuple[Tensor, int]], steps: Sequence[_Step | None], axis: int
) -> list[tuple[Tensor, int]]:
    """Resize the height (``axis`` 1) or the width (2) of the images that have a step, at once.

    The ``places`` say where the images lie; returns where they lie then.
    """
    from .resize_kernel import AxisJob, resize_axis

    device = places[0][0].device
    size = sum(step.nbytes for step in steps if step is not None)
    if not size:
        return [*places]
    out = torch.empty(size, dtype=torch.uint8, device=device)
    jobs, made, start, address = [], [*places], 0, out.data_ptr()
    for number, step in enumerate(steps):
        if step is not None:
            pixels, begin = places[number]
            source, table = pixels.data_ptr() + begin, step.table.data_ptr()
            jobs.append(AxisJob(source, address + start, table, *step.sizes))
            made[number] = out, start
            start += step.nbytes
    resize_axis(jobs, axis, device)
    return made


def library_of(mode: Resample) -> Library:
    """Return the library that resizes on the CPU: torch, but Pillow for a filter that it lacks, and
    for families whose own processor takes Pillow."""
    if mode in _PILLOW_FILTERS:
        return "pillow"
    return "torch" if mode != "lanczos" or torch_has_lanczos() else "pillow"


@cache
def torch_has_lanczos() -> bool:
    """Return whether torch resizes uint8 images with the Lanczos filter on the CPU."""
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.uint8, device="cpu")
    try:
        F.interpolate(pixels, size=(4, 4), mode="lanczos", antialias=True)
    except (NotImplementedError, ValueError):
        return False
    return True


def resize_on_cpu(batch: Tensor, height: int, width: int, mode: Resample) -> Tensor:
    """Resize uint8 [N, 3, H, W] on the CPU, antialiased, by the library that has the filter.

    With the Lanczos filter, 0.6 % of Pillow's values differ from torch's by one of 255 levels, and
    1 in 100,000 by two.
    """
    if library_of(mode) == "torch":
        if height == width == 1:  # torch 2.11 takes its own result for channels-last and fails
            batch = batch.contiguous(memory_format=torch.channels_last)
        return F.interpolate(batch, size=(height, width), mode=mode, antialias=True)
    size = width, height
    sampling = _PILLOW_FILTERS.get(mode, Image.Resampling.LANCZOS)
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in batch]
    resized = [np.array(image.resize(size, sampling)) for image in images]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)


def is_exact_on(device: torch.device) -> bool:
    """Return whether uint8 images are resized on a device: the kernel runs and agrees with the CPU.

    The kernel is compared with the CPU once per device, on a few images. If it fails or differs,
    one warning says so, and images are resized on the CPU.
    """
    if device.type != "cuda":
        return False
    if device == torch.device("cuda"):  # without a number
        device = torch.device("cuda", torch.cuda.current_device())
    with _LOCK:
        return _compare(device)


@cache
def _compare(device: torch.device) -> bool:
    """Compare the kernel with the CPU on a device, and warn if it fails or differs."""
    if find_spec("triton") is None:
        because = "Triton is not installed (it comes with torch on Linux)"
    else:
        because = _difference(device)
    if because:
        warnings.warn(f"images are resized on the CPU, not on {device}: {because}", stacklevel=3)
    return not because


def _difference(device: torch.device) -> str:
    """Return how the kernel's pixels differ from the CPU's on a device; "" if they are equal."""
    from .resize_kernel import KERNEL_ERRORS

    noise = np.random.default_rng(0).integers(0, 256, (1, 61, 47, 3), dtype=np.uint8)
    stripes = np.zeros_like(noise)
    stripes[:, :, ::2] = 255
    pixels = torch.from_numpy(np.concatenate((noise, stripes)))
    sizes = ((14, 40), (90, 112), (61, 13), (1, 1))
    for mode in _FILTERS:
        try:
            images = [pixels.to(device)] * len(sizes)
            made = [image.cpu() for image in resize_many(images, sizes, mode, library_of(mode))]
        except KERNEL_ERRORS as error:
            return f"the kernel failed ({type(error).__name__}: {error})"
        for (height, width), image in zip(sizes, made, strict=True):
            wanted = resize_on_cpu(pixels.permute(0, 3, 1, 2), height, width, mode)
            if not torch.equal(image, wanted.permute(0, 2, 3, 1)):
                return f"its pixels differ from the CPU's ({mode}, 61x47 to {height}x{width})"
    return ""
