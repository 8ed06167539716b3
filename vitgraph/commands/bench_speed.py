"""``vitgraph bench speed``: the speed of a checkpoint here, with and without CUDA graphs.

Three forms of the encoder run in turn on random pixels of a few sizes: the reference encoder that
``load_encoder`` returns, its accelerated form run eagerly, and CUDA graphs of the accelerated form.
A graph is captured for a token budget, the most output tokens of one replay; a second table lists
the attention kernel of each budget. On a CPU the reference runs in float32 and in bfloat16 instead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, TypedDict

from ..terminal import counted, format_table, is_terminal
from ..timing import Times, milliseconds, random_pixels, spread
from .arguments import DTYPE_HELP, check_checkpoint, check_names, check_source, read_source

if TYPE_CHECKING:
    import torch
    from typing_extensions import NotRequired

    from encoders import Encoder, VisionEncoder
    from encoders.contract import Kernels
    from graphwrap import GraphedEncoder, GraphStats


class SizeTimes(TypedDict):
    """The milliseconds per call of each form of an encoder for one input size.

    ``images`` and ``tokens`` count the images and output tokens of a call. Only on CUDA is there
    ``graph_ms``.
    """

    images: int
    tokens: int
    reference_ms: Times
    accelerated_ms: Times
    graph_ms: NotRequired[Times]


class DtypeTimes(TypedDict):
    """The milliseconds per call of the reference encoder in two dtypes, for one input size."""

    images: int
    tokens: int
    float32_ms: Times
    bfloat16_ms: Times


class BudgetFacts(TypedDict):
    """A captured CUDA graph: its capacity, its attention kernel and the milliseconds per replay.

    The capacity is the most output tokens, the most attention segments, and the longest segment.
    """

    tokens: int
    segments: int
    longest_segment: int
    kernel: str
    replay_ms: float | None


class GraphFacts(TypedDict):
    """The seconds and bytes that capturing CUDA graphs took, and a description of each graph."""

    capture_seconds: float
    arena_bytes: int
    pool_bytes: int
    derived_bytes: int
    budgets: list[BudgetFacts]


class KernelTimes(TypedDict):
    """The measurements of an encoder with one value of ``--kernels``."""

    kernels: Kernels
    note: str
    """The reason why there is no accelerated form and the reference encoder was timed instead; else
    empty."""
    sizes: list[SizeTimes]
    graphs: GraphFacts | None
    """The captured graphs; None without CUDA."""


class About(TypedDict):
    """The checkpoint and the machine that were measured."""

    checkpoint: str
    encoder: str
    device: str
    dtype: str
    torch: str
    runs: int


class Figures(TypedDict):
    """All measurements that ``bench speed`` prints."""

    about: About
    kernels: list[KernelTimes]
    dtypes: list[DtypeTimes]
    """The reference in float32 and in bfloat16 on a CPU; empty on a GPU."""


WORKLOADS = ((1, 1), (1, 4), (1, 16), (8, 4))
"""The input sizes that are timed on a GPU: (images per batch, output tokens per image divided by
the smallest token budget of the encoder)."""
WORKLOADS_WITHOUT_GPU = ((1, 1), (2, 1))
"""The input sizes that are timed on the CPU, in the form of :data:`WORKLOADS`."""
RUNS, RUNS_WITHOUT_GPU = 15, 3
"""The number of timed runs of each form, with a GPU and without one."""
KERNEL_NAMES: tuple[Kernels, ...] = ("auto", "torch", "triton", "flash2", "cudnn", "flash4", "tma")
"""The attention kernels that ``encoder.accelerated(kernels=...)`` accepts by name."""


def add_speed(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench speed`` that ``bench accuracy`` does not have to its parser."""
    parser.add_argument("--dtype", help=DTYPE_HELP)
    parser.add_argument("--runs", type=int, metavar="N", help="timed runs of each call")
    parser.set_defaults(command=print_speed)


def print_speed(options: argparse.Namespace) -> None:
    """Run ``bench speed``: load the encoder, time it, and print a table per value of ``--kernels``.

    Raises:
        ValueError: an option has an invalid value, or a checkpoint cannot be loaded.
    """
    if options.runs is not None and options.runs < 1:
        raise ValueError(f"--runs {options.runs}: must be a positive integer")
    encoder = load_checked(options)
    body = measure(options.repo, encoder.paths["image"], options.kernels, options.runs)
    print(json.dumps(body, indent=2) if options.json else table(body))


def load_checked(options: argparse.Namespace) -> Encoder:
    """Check the options of ``vitgraph bench`` before torch is imported, then load the encoder.

    Without ``--device``, the encoder is loaded on a GPU if there is one.

    Raises:
        ValueError: an option has an invalid value, or a checkpoint cannot be loaded.
    """
    for name in options.kernels:
        if name not in KERNEL_NAMES:
            raise ValueError(f"--kernels {name}: must be one of {', '.join(KERNEL_NAMES)}")
    check_names(options.dtype, options.device)
    check_checkpoint(options.repo, f"{options.parser.prog} REPO_OR_FOLDER")
    check_source(options)
    import torch

    from weights import load_encoder

    from ..devices import enough_memory, read_device

    device = read_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with enough_memory(options.repo, "give --dtype bfloat16 or another --device"):
        return load_encoder(
            options.repo, **read_source(options), dtype=options.dtype, device=device
        )


def measure(
    repo: str, encoder: VisionEncoder, kernels: Sequence[Kernels], runs: int | None = None
) -> Figures:
    """Time an encoder on random images, and return all measurements that ``bench speed`` prints.

    Args:
        repo: name of the checkpoint, which is only repeated in the result.
        encoder: the encoder of the checkpoint, on the device to measure on.
        kernels: attention kernels, as in ``encoder.accelerated(kernels=...)``.
        runs: number of timed runs of each form; None takes 15 on a GPU and 3 without one.

    Returns:
        The checkpoint and the machine, and the measurements with each of the ``kernels``.
    """
    import torch

    weight = next(encoder.parameters())
    gpu = weight.device.type == "cuda"
    runs = runs or (RUNS if gpu else RUNS_WITHOUT_GPU)
    with torch.no_grad():
        figures = [measure_kernels(encoder, name, gpu, runs) for name in dict.fromkeys(kernels)]
        dtypes = measure_dtypes(encoder, runs) if weight.device.type == "cpu" else []
    return {
        "about": {
            "checkpoint": repo,
            "encoder": type(encoder).__name__,
            "device": torch.cuda.get_device_name(weight.device) if gpu else weight.device.type,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "runs": runs,
        },
        "kernels": figures,
        "dtypes": dtypes,
    }


def measure_kernels(encoder: VisionEncoder, kernels: Kernels, gpu: bool, runs: int) -> KernelTimes:
    """Time an encoder with one attention kernel on all input sizes.

    Args:
        encoder: the reference encoder, as ``load_encoder`` returns it.
        kernels: the attention kernel, as in ``encoder.accelerated(kernels=...)``.
        gpu: whether the encoder is on CUDA; if so, CUDA graphs are captured and timed as well.
        runs: number of timed runs of each form.
    """
    from graphwrap import GraphedEncoder

    fast, graphed = encoder.accelerated(kernels), None
    if gpu:
        graphed = GraphedEncoder(encoder, kernels=kernels)
        graphed.capture(progress=is_terminal())
    sizes = WORKLOADS if gpu else WORKLOADS_WITHOUT_GPU
    rows = [measure_size(encoder, fast, graphed, size, runs) for size in sizes]
    graphs = None if graphed is None else describe(graphed.stats())
    if graphed is not None:
        graphed.release()
    note = str(fast.kernel_choices()["reference_because"] or "")
    return {"kernels": kernels, "note": note, "sizes": rows, "graphs": graphs}


def describe(stats: GraphStats) -> GraphFacts:
    """Return the statistics of captured graphs as plain data: seconds, bytes, and a dict per graph.

    Each graph was captured for a token budget, the most output tokens of one replay.
    """
    return {
        "capture_seconds": stats.capture_seconds,
        "arena_bytes": stats.arena_bytes,
        "pool_bytes": stats.pool_bytes,
        "derived_bytes": stats.derived_bytes,
        "budgets": [
            {
                "tokens": budget.tokens,
                "segments": budget.segments,
                "longest_segment": budget.longest_segment,
                "kernel": budget.kernel,
                "replay_ms": budget.replay_ms,
            }
            for budget in stats.budgets
        ],
    }


def measure_size(
    encoder: VisionEncoder,
    fast: VisionEncoder,
    graphed: GraphedEncoder | None,
    size: tuple[int, int],
    runs: int,
) -> SizeTimes:
    """Time the forms of an encoder in turn on the same random pixels of one size.

    Args:
        encoder: the reference encoder, as ``load_encoder`` returns it.
        fast: its accelerated form.
        graphed: the encoder with CUDA graphs; None without a GPU.
        size: images per batch, and output tokens per image divided by the smallest token budget.
        runs: number of timed runs of each form.

    Returns:
        ``images`` and ``tokens`` of the batch, and per form the minimum, median and maximum of the
        milliseconds.
    """
    grids, tokens = _grids(encoder, size)
    pixels = random_pixels(encoder, grids)
    calls: dict[str, Callable[[], object]] = {
        "reference_ms": lambda: encoder(pixels, grids),
        "accelerated_ms": lambda: fast(pixels, grids),
    }
    if graphed is not None:
        calls["graph_ms"] = lambda: graphed(pixels, grids)
    times = _times(calls, pixels.device, runs)
    row: SizeTimes = {
        "images": size[0],
        "tokens": tokens,
        "reference_ms": times["reference_ms"],
        "accelerated_ms": times["accelerated_ms"],
    }
    if graphed is not None:
        row["graph_ms"] = times["graph_ms"]
    return row


def measure_dtypes(encoder: VisionEncoder, runs: int) -> list[DtypeTimes]:
    """Time an encoder on the CPU in float32 and in bfloat16, which only some CPUs multiply fast.

    Args:
        encoder: the reference encoder, as ``load_encoder`` returns it.
        runs: number of timed runs of each dtype.
    """
    import torch

    full, half = (
        encoder if encoder.dtype == dtype else deepcopy(encoder).to(dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    return [_dtype_times(full, half, size, runs) for size in WORKLOADS_WITHOUT_GPU]


def _dtype_times(
    full: VisionEncoder, half: VisionEncoder, size: tuple[int, int], runs: int
) -> DtypeTimes:
    grids, tokens = _grids(full, size)
    pixels = random_pixels(full, grids)
    halved = pixels.to(half.dtype)
    calls: dict[str, Callable[[], object]] = {
        "float32": lambda: full(pixels, grids),
        "bfloat16": lambda: half(halved, grids),
    }
    times = _times(calls, pixels.device, runs)
    return {
        "images": size[0],
        "tokens": tokens,
        "float32_ms": times["float32"],
        "bfloat16_ms": times["bfloat16"],
    }


def _grids(encoder: VisionEncoder, size: tuple[int, int]) -> tuple[list[list[int]], int]:
    """Return the grids of images of one size, and their output tokens.

    ``size`` is the images, and the output tokens per image over the smallest token budget.
    """
    images, times = size
    grids = [list(encoder.grid_for(times * encoder.budget_range[0]))] * images
    return grids, sum(spec.output_tokens for spec in encoder.item_specs(grids))


def _times(
    calls: Mapping[str, Callable[[], object]], device: torch.device, runs: int
) -> dict[str, Times]:
    """Return the minimum, median and maximum milliseconds of each function, by its name."""
    times = milliseconds(calls, runs, device=device)
    return {name: spread(values) for name, values in times.items()}


def table(body: Figures) -> str:
    """Return the result of :func:`measure` as text: a line about the machine, and a table per
    attention kernel.
    """
    about = body["about"]
    head = (
        f"{about['checkpoint']}: {about['encoder']} on {about['device']}, {about['dtype']}, "
        f"torch {about['torch']}; milliseconds per call, medians of {about['runs']}"
    )
    parts = [head, *map(_section, body["kernels"])]
    return "\n\n".join([*parts, _dtype_table(body["dtypes"])] if body["dtypes"] else parts)


def _dtype_table(sizes: list[DtypeTimes]) -> str:
    rows = []
    for size in sizes:
        full, half = size["float32_ms"]["median"], size["bfloat16_ms"]["median"]
        gain = f"{full / half:.2f}" if half else "-"
        rows.append([str(size["images"]), str(size["tokens"]), f"{full:.3f}", f"{half:.3f}", gain])
    return "the reference in two dtypes\n" + format_table(
        ["images", "tokens", "float32", "bfloat16", "speed of bfloat16"], rows
    )


def _section(entry: KernelTimes) -> str:
    header = ["images", "tokens", "reference", "accelerated", "graph", "gain"]
    rows = [_row(row) for row in entry["sizes"]]
    if entry["note"] and entry["graphs"] is None:  # both columns are the reference: no gain to show
        header, rows = header[:-1], [row[:-1] for row in rows]
    parts = [f"kernels: {entry['kernels']}"]
    if entry["note"]:
        parts.append(f"the reference runs in place of the accelerated encoder: {entry['note']}")
    if entry["graphs"] is None:
        parts.append("there are no graphs without CUDA")
    parts.append(format_table(header, rows))
    if entry["graphs"] is not None:
        parts.append(_graphs(entry["graphs"]))
    return "\n".join(parts)


def _row(row: SizeTimes) -> list[str]:
    reference, fast = row["reference_ms"]["median"], row["accelerated_ms"]["median"]
    graph = row["graph_ms"]["median"] if "graph_ms" in row else None
    medians, best = (reference, fast, graph), graph or fast
    gain = f"{reference / best:.2f}" if reference and best else "-"
    cells = ["-" if value is None else f"{value:.3f}" for value in medians]
    return [str(row["images"]), str(row["tokens"]), *cells, gain]


def _graphs(graphs: GraphFacts) -> str:
    """Return the text about captured graphs: a line with the seconds and MiB of their capture, and
    a table with a row per token budget, the most output tokens that one graph takes.
    """
    byte_counts = (graphs["arena_bytes"], graphs["pool_bytes"], graphs["derived_bytes"])
    arena, pool, derived = (count / 2**20 for count in byte_counts)
    header = ("budget", "segments", "replay ms", "attention kernel")
    rows = [
        (
            str(budget["tokens"]),
            f"{budget['segments']}x{budget['longest_segment']}",
            "-" if budget["replay_ms"] is None else f"{budget['replay_ms']:.3f}",
            budget["kernel"],
        )
        for budget in graphs["budgets"]
    ]
    return (
        f"{counted(len(rows), 'budget')} captured in {graphs['capture_seconds']:.1f} s; MiB: arena "
        f"{arena:.0f}, pool {pool:.0f}, derived weights {derived:.0f}\n"
        + format_table(header, rows)
    )
