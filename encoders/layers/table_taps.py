"""Indices and weights that interpolate tables of positions and average the frames of a clip.

A square table of position embeddings fits one image size. For another grid, the host computes the
numbers and weights of the table rows to add up for each patch, so that CUDA graphs of any grid read
the same table. In the same way, it computes which rows to average over the frames of a clip.

Shapes: n patches of one frame, P patches of all items, F frames of a segment at most, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import Grid


def grid_taps(
    positions: Tensor, grids: Sequence[Grid], side: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sixteen rows of a table around each patch of all items, and their weights.

    Args:
        positions: row and column of each patch, int64 [P, 2], the same in all frames of an item; P
            is at least the number of patches.
        grids: ``(t, h, w)`` per item, in patches.
        side: rows and columns of the table.
        dtype: dtype of the weights.

    Returns:
        Row numbers int64 [P, 16] and bicubic weights [P, 16] in ``dtype``; both are 0 beyond the
        patches.
    """
    index = torch.zeros(len(positions), 16, dtype=torch.int64, device="cpu")
    weight = torch.zeros(len(positions), 16, dtype=dtype, device="cpu")
    start = 0
    for t, h, w in grids:
        taps, tap_weights = bicubic_taps(positions[start : start + h * w], h, w, side)
        stop = start + t * h * w
        index[start:stop], weight[start:stop] = taps.repeat(t, 1), tap_weights.repeat(t, 1)
        start = stop
    return index, weight


def bilinear_taps(
    positions: Tensor, grids: Sequence[Grid], side: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the four rows of a table around each patch of all items, and their bilinear weights.

    The outer edges of the grid map to the outer edges of the table; there is no antialiasing.

    Args:
        positions: row and column of each patch, int64 [P, 2]; padding may follow.
        grids: ``(t, h, w)`` per item, in patches.
        side: rows and columns of the table.
        dtype: dtype of the weights.

    Returns:
        Row numbers int64 [P, 4] in the order (r, c), (r, c+1), (r+1, c), (r+1, c+1), and weights
        [P, 4] in ``dtype``; both are 0 beyond the patches.
    """
    patches = [t * h * w for t, h, w in grids]
    counts = torch.tensor(patches, dtype=torch.int64, device="cpu")
    sizes = torch.tensor([(h, w) for _, h, w in grids], dtype=dtype, device="cpu").view(-1, 2)
    sizes = sizes.repeat_interleave(counts, 0, output_size=sum(patches))
    coordinates = (positions[: len(sizes)].to(dtype) + 0.5) * side / sizes - 0.5
    coordinates = coordinates.clamp(0, side - 1)
    low = coordinates.to(torch.int64)
    high, fraction = (low + 1).clamp(max=side - 1), coordinates - low
    (r0, c0), (r1, c1), (fr, fc) = (pair.unbind(1) for pair in (low, high, fraction))
    taps = [r0 * side + c0, r0 * side + c1, r1 * side + c0, r1 * side + c1]
    weights = [(1 - fr) * (1 - fc), (1 - fr) * fc, fr * (1 - fc), fr * fc]
    padding = (0, 0, 0, len(positions) - len(sizes))
    return F.pad(torch.stack(taps, 1), padding), F.pad(torch.stack(weights, 1), padding)


def bicubic_taps(positions: Tensor, height: int, width: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the sixteen rows of a table around each patch, and their bicubic weights.

    The outer edges of the grid map to those of the table (``align_corners=False``). Rows beyond the
    table are replaced by those at its edge; a table larger than the grid is not antialiased.

    Args:
        positions: row and column of each patch, int64 [n, 2].
        height: rows of the grid.
        width: columns of the grid.
        side: rows and columns of the table.

    Returns:
        Row numbers int64 [n, 16], four rows of four columns each, and weights, float64 [n, 16].
    """
    sides = torch.tensor([height, width], dtype=torch.float64, device="cpu")
    coordinates = (positions.to(torch.float64) + 0.5) * side / sides - 0.5
    entries = coordinates.floor()[:, :, None] + torch.arange(-1, 3, device="cpu")
    r, c = entries.clamp(0, side - 1).to(torch.int64).unbind(1)
    row_weights, column_weights = _cubic((coordinates[:, :, None] - entries).abs()).unbind(1)
    index = (r * side)[:, :, None] + c[:, None]
    weight = row_weights[:, :, None] * column_weights[:, None]
    return index.flatten(1), weight.flatten(1)


def axis_weights(entries: int, size: int, *, cubic: bool = False) -> Tensor:
    """Return the weights that resize one axis of the table of positions, with antialiasing.

    Each of ``size`` positions is a weighted mean of the table's ``entries`` around its centre. The
    weights fall to 0 within one entry or, if ``size`` is smaller, one step between positions; those
    of a cubic filter within two (``F.interpolate(mode="bilinear" or "bicubic", antialias=True,
    align_corners=False)``).

    Returns:
        float64 [size, entries], rows that sum to 1.
    """
    step = entries / size
    centres = (torch.arange(size, dtype=torch.float64, device="cpu") + 0.5) * step
    entry_centres = torch.arange(entries, dtype=torch.float64, device="cpu") + 0.5
    distance = (entry_centres - centres[:, None]).abs() / max(step, 1.0)
    if cubic:
        weights = torch.where(distance < 2, _cubic(distance, -0.5), 0)
    else:
        weights = (1 - distance).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def frame_table(frames: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return sinusoidal embeddings of frame numbers, [frames+1, width].

    Row n + 1 is added to the patches of frame n of a clip; row 0, zeros, to patches of an image.
    """
    exponents = torch.arange(0, width, 2, dtype=dtype, device="cpu")
    numbers = torch.arange(frames, dtype=dtype, device="cpu")
    angles = numbers[:, None] / 10000.0 ** (exponents / width)
    return F.pad(torch.cat((angles.sin(), angles.cos()), 1), (0, 0, 1, 0))


def frame_rows(segments: Sequence[Grid], rows: int) -> Tensor:
    """Return for each patch the number of its row in :func:`frame_table`, int64 [rows].

    Args:
        segments: ``(frames, h, w)`` per segment, h and w in patches.
        rows: length of the result, at least the number of patches; entries beyond the patches are
            0.
    """
    index = torch.zeros(rows, dtype=torch.int64, device="cpu")
    start = 0
    for frames, h, w in segments:
        numbers = torch.arange(frames, device="cpu") + int(frames > 1)
        index[start : start + frames * h * w] = numbers.repeat_interleave(h * w)
        start += frames * h * w
    return index


def pooled_rows(
    segments: Sequence[Grid], merge: int, max_frames: int, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return row numbers and weights whose weighted sums are means over the frames of a segment.

    The results are ordered by token: the ``merge`` x ``merge`` patches of one follow each other.

    Args:
        segments: ``(frames, h, w)`` per segment, in patches.
        merge: side of a token in patches.
        max_frames: columns of the result, at least the number of frames of every segment.
        rows: rows of the result, at least the sum over the segments of the patches of one frame.
        dtype: dtype of the weights.

    Returns:
        Row numbers int64 [rows, max_frames], and weights of that shape, which sum to 1 in each row.
        Columns beyond the frames of a segment have weight 0 and some row of it; rows beyond the
        patches have zeros.
    """
    index = torch.zeros(rows, max_frames, dtype=torch.int64, device="cpu")
    weight = torch.zeros(rows, max_frames, dtype=dtype, device="cpu")
    row = target_row = 0
    for frames, h, w in segments:
        cells = torch.arange(row, row + frames * h * w, device="cpu")
        cells = cells.view(frames, h // merge, merge, w // merge, merge).permute(1, 3, 2, 4, 0)
        stop = target_row + h * w
        index[target_row:stop] = row
        index[target_row:stop, :frames] = cells.reshape(h * w, frames)
        weight[target_row:stop, :frames] = 1 / frames
        row, target_row = row + frames * h * w, stop
    return index, weight


def _cubic(distance: Tensor, a: float = -0.75) -> Tensor:
    """Return the weights of cubic convolution at distances from 0 to 2.

    ``a`` is the slope at 1: torch's is -0.75, and -0.5 where it antialiases.
    """
    inner = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    outer = a * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance <= 1, inner, outer)
