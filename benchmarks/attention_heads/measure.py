"""Times attention kernels, and compares their results with attention in float64.

Every kernel of the library that supports a cell (an attention call of one size) is measured, and
these candidates to replace it:

- flash-attn-4 with every tiling of :data:`FLASH4_TILES`. With its default tiles of 192 x 144, only
  74 % of the 5 x 6 tiles for a segment of 784 rows is used, and 79 % of the 6 x 8 for 1,024 rows.
- the library's kernel ``tma_attention`` with every tiling of :data:`TMA_TILES`.
- both of them with heads of size 72 padded to 80 columns, so that each head is aligned to the
  GPU memory's sectors of 32 bytes. The qkv product pads if its weight gets rows of zeros.

cuDNN attention with segment offsets is left out: torch 2.11 cannot capture it in a CUDA graph.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from encoders.accelerated.attention.candidates import KERNELS, Attend, is_installed
from encoders.accelerated.attention.flash_attn_4 import flash4_forward
from encoders.accelerated.shapes import AttentionShape

FLASH4_TILES = (
    (192, 144, False),
    (192, 128, False),
    (192, 112, True),
    (128, 112, True),
    (128, 128, True),
    (128, 160, True),
    (128, 176, True),
)
"""Tilings: query rows, keys, and whether probabilities stay in registers for the second product.
They spill no register for head sizes 72, 80 and 96, and ptxas does not serialize their products, as
it does for 192 x 128 with probabilities in registers (flash-attn-4 4.0.0b36, for sm_90a)."""
TMA_TILES = ((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (256, 64, 16, 3))
"""Tilings (the fields of ``tma_attention.Tile``) for which Triton 3.6 spills no register on Hopper.
``triton.compile`` shows this without a GPU, for ``GPUTarget("cuda", 90, 32)``; 256 x 128 spills."""
FAMILIES = {"flash4": 200, "tma": 90}
"""The families of candidates, and the seconds after which a family's process is killed."""
PADDING, SAMPLED = 40, 64
"""The number of rows of zeros after the last segment, and the number of rows whose result is
compared with float64."""
CORRECT = 1e-2
"""The largest error that the library allows in bfloat16."""


class Cell(NamedTuple):
    """An attention call to measure: the head size, and the rows of each segment."""

    name: str
    size: int
    lengths: list[int]
    heads: int = 16
    tiles: bool = False
    """Whether the encoder takes tiles of one size, so that all segments have the same length."""

    @property
    def shape(self) -> AttentionShape:
        """The shape of the attention call, in the form that the library's kernels accept."""
        rows = sum(self.lengths) + (0 if self.tiles else PADDING)
        shape = (self.heads, self.size, rows, len(self.lengths), max(self.lengths), self.tiles)
        return AttentionShape(*shape, dtype="torch.bfloat16")


class Candidate(NamedTuple):
    """A kernel to time, with the distance of heads in memory."""

    name: str
    attend: Attend
    apart: int
    """The number of columns from the beginning of one head to the beginning of the next."""


def cells() -> Iterator[Cell]:
    """Yield attention calls of Qwen3-VL-8B, SigLIP so400m, and Qwen2.5-VL-7B with its windows."""
    from benchmarks.towers import TOWERS  # only here, because it imports transformers

    for name, size in (("Qwen3-VL-8B", 72), ("Qwen2.5-VL-7B", 80)):
        grids = {key: [grid[1:] for grid in load] for key, load in TOWERS[name].workloads.items()}
        rows = {key: [h * w for h, w in grids[key]] for key in grids}
        for key in ("mix8", "1x1024", "32x448", "8x448", "1x448"):
            yield Cell(key, size, rows[key])
        yield Cell("mix8, longest first", size, sorted(rows["mix8"], reverse=True))
        if size == 72:
            yield Cell("video 32x640x360", size, [22 * 40] * 32)
            yield Cell("SigLIP 8x384", size, [27 * 27] * 8, tiles=True)
        else:
            for key in ("mix8", "8x448"):
                yield Cell(
                    f"windows of {key}", size, [n for grid in grids[key] for n in windows(*grid)]
                )


def windows(h: int, w: int, side: int = 8) -> list[int]:
    """Return the rows of each attention window of a grid of h x w patches."""
    down, across = ([min(side, length - at) for at in range(0, length, side)] for length in (h, w))
    return [a * b for a in down for b in across]


def candidates(family: str, cell: Cell, capability: tuple[int, int]) -> Iterator[Candidate]:
    """Yield the library's kernels for a cell, then the candidates of a family.

    For the family "tma", the library's flash-attn-4 kernel is left out, so that the package is not
    needed.
    """
    size = cell.size
    for name, kernel in KERNELS.items():
        asked = is_installed(kernel.package) and (name != "flash4" or family == "flash4")
        if asked and kernel.takes(cell.shape, torch.bfloat16, capability):
            yield Candidate(f"library, {name}", kernel.attend, size)
    if family == "flash4":
        if is_installed("flash_attn.cute") and cell.shape.longest > 64:  # windows are too short
            for apart in sorted({size, 80}):
                yield from (flash4(cell, apart, *tile) for tile in FLASH4_TILES)
        return
    for apart in sorted({size, 80}) if cell.shape.longest > 64 else ():
        for tile in TMA_TILES:
            yield tma(cell, apart, tile)


def tma(cell: Cell, apart: int, tile: tuple[int, int, int, int]) -> Candidate:
    """Return the library's kernel for the tensor memory accelerator (TMA), with this tiling.

    ``apart`` is the number of columns from one head to the next, ``tile`` an element of TMA_TILES.
    """
    from encoders.accelerated.triton_kernels.tma_attention import Tile, attend  # needs Triton

    def attend_with(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, offsets: Tensor, shape: AttentionShape
    ) -> Tensor:
        attend(q, k, v, out, offsets, Tile(*tile))
        return out

    return Candidate(f"tma {'x'.join(map(str, tile))}, {apart} apart", attend_with, apart)


def flash4(cell: Cell, apart: int, queries: int, keys: int, kept: bool) -> Candidate:
    """Return flash-attn-4 with a tile of ``queries`` x ``keys``.

    ``apart`` is the number of columns from one head to the next; ``kept`` keeps probabilities in
    registers for the second product.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, offsets: Tensor, shape: AttentionShape
    ) -> Tensor:
        flash4_forward()(
            *(q, k, v),
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=shape.longest,
            max_seqlen_k=shape.longest,
            softmax_scale=cell.size**-0.5,
            tile_mn=(queries, keys),
            mma_pv_is_rs=kept,
            out=out,
        )
        return out

    return Candidate(f"flash4 {queries}x{keys}, {apart} apart", attend, apart)


def draw(cell: Cell, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return random queries, keys and values [T, 3, H, K], with zeros after the last segment."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (cell.shape.rows, 3, cell.heads, cell.size)
    values = torch.randn(sizes, generator=generator, device=device).to(dtype)
    values[sum(cell.lengths) :] = 0.0
    return values


def sampled_truth(cell: Cell, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of some rows, and the attention of these rows in float64.

    The rows are evenly spaced over all segments, and the last rows of 16 segments are added.
    """
    ends = [0, *accumulate(cell.lengths)]
    rows = sorted({*range(0, ends[-1], -(-ends[-1] // SAMPLED)), *(end - 1 for end in ends[1:17])})
    found = []
    for begin, end in pairwise(ends):
        mine = [row for row in rows if begin <= row < end]
        if mine:
            _, k, v = values[begin:end].double().permute(1, 2, 0, 3)
            q = values[mine, 0].double().transpose(0, 1)
            scores = q @ k.transpose(1, 2) * cell.size**-0.5
            found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.tensor(rows, device=values.device), torch.cat(found)


def prepare(
    cell: Cell, candidate: Candidate, values: Tensor, truth: tuple[Tensor, Tensor]
) -> tuple[Callable[[], Tensor], float]:
    """Return a function that runs a candidate on a cell, and the candidate's relative L2 error.

    Columns that the kernel must not read are NaN, as is the output buffer before the call, so that
    a wrong access shows in the result.
    """
    ends = [0, *accumulate(cell.lengths)]
    buffer = values.new_full((*values.shape[:3], candidate.apart), float("nan"))
    buffer[..., : cell.size] = values
    q, k, v = buffer[..., : cell.size].unbind(1)
    out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    offsets = torch.tensor(ends, dtype=torch.int32, device=values.device)
    call = partial(candidate.attend, q, k, v, out, offsets, cell.shape)
    got, (rows, exact) = call(), truth
    if not got[: ends[-1]].isfinite().all():
        raise ValueError("the result is not finite, or not all of it was written")
    if got is out and not got[ends[-1] :].isnan().all():
        raise ValueError("rows beyond the last offset were written")
    got = got[rows].double()
    return call, float((got - exact).norm() / exact.norm())


def products(cell: Cell, candidate: Candidate, like: Tensor) -> Callable[[], object]:
    """Return a function that runs the matrix products before and after attention (qkv and output),
    with heads padded for a candidate.
    """
    side = cell.heads * cell.size
    sizes = ((len(like), side), (3 * cell.heads * candidate.apart, side), (len(like), side))
    hidden, qkv, result, out = (like.new_empty(x).normal_() for x in (*sizes, (side, side)))
    return lambda: (F.linear(hidden, qkv), F.linear(result, out))


def microseconds(calls: Mapping[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Time all functions in turn, in random order; return the microseconds per call of each run.

    On a GPU a run is the replay of a CUDA graph that repeats the call for about two milliseconds; a
    function that cannot be captured gets no times.
    """
    if not torch.cuda.is_available():
        return {name: [seconds(call) * 1e6] for name, call in calls.items()}
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, call in calls.items():
        repeats = max(4, min(40, int(2e-3 / seconds(call))))
        graph = torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            with torch.cuda.graph(graph):
                for _ in range(repeats):
                    call()
            graphs[name] = graph, repeats
    times: dict[str, list[float]] = {name: [] for name in graphs}
    dice = random.Random(0)
    for turn in range(runs + 1):
        for name in dice.sample(list(graphs), len(graphs)):
            graph, repeats = graphs[name]
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            if turn:  # the first turn warms up
                times[name].append(began.elapsed_time(ended) * 1e3 / repeats)
    return times


def seconds(call: Callable[[], object]) -> float:
    """Return the wall-clock seconds of one call, until the GPU has finished its work."""
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(cell: Cell, family: str, device: torch.device, runs: int) -> list[dict[str, Any]]:
    """Return a result per kernel for one cell; a kernel that fails has an error and no time."""
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability() if on_gpu else (9, 0)
    values = draw(cell, device, torch.bfloat16 if on_gpu else torch.float16)
    truth, calls = sampled_truth(cell, values), dict[str, Callable[[], object]]()
    rows: dict[str, dict[str, Any]] = {}
    for one in candidates(family, cell, capability):
        row: dict[str, Any] = {"cell": cell.name, "size": cell.size, "family": family}
        row |= {"candidate": one.name, "layout": f"{one.apart} apart"}
        rows[one.name] = row
        try:
            calls[one.name], row["relative_l2"] = prepare(cell, one, values, truth)
            if row["layout"] not in calls:
                calls[row["layout"]] = products(cell, one, values)
        except Exception as error:  # noqa: BLE001 (the compilers have many errors of their own)
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    times = microseconds(calls, runs)
    operations = 4 * cell.heads * cell.size * sum(length**2 for length in cell.lengths)
    for name, row in rows.items():
        if "error" not in row and not times.get(name):
            row["error"] = "it cannot be captured"
        elif "error" not in row:
            us = statistics.median(times[name])
            row |= {"us": us, "spread": (max(times[name]) - min(times[name])) / us}
            row["tflops"] = operations / us / 1e6
            row["products_us"] = statistics.median(times[row["layout"]])
    return list(rows.values())


def measure_family(family: str, todo: Sequence[Cell], device: str, runs: int, path: Path) -> None:
    """Measure a family of candidates in the given cells; write all results after each cell."""
    rows = []
    with torch.no_grad():
        for cell in todo:
            rows += measure(cell, family, torch.device(device), runs)
            path.write_text(json.dumps(rows))
