"""Normalising pixels and cutting them into the rows that towers take, on the pixels' device.

As in transformers 5.23.0's torchvision-backed processors, the rescale by 1/255 is folded into mean
and std, in float32. The result is the same on all devices: a difference and a quotient are rounded
in one way only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from .exact_resize import is_exact_on
from .processor_files import PerChannel
from .resizing import CPU
from .staging import StagedPath

_STRIP = 1 << 18
"""Numbers that are normalised at a time on a CPU: 1 MiB, which fits the second-level cache."""
_DEVICE_STRIP = 1 << 24
"""Numbers that are looked up at a time on a GPU: 64 MiB, whatever the batch."""


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
    for (mean, std, _), group in groupby(parts, lambda x: (x.mean, x.std, x.pixels.dtype)):
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
