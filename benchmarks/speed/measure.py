"""Measures one vision tower: the capture of its CUDA graphs, and the times of all variants.

``python -m benchmarks`` uses this module; its ``--help`` explains the figures.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from benchmarks.graphs import bare_replay
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import Kernels
from graphwrap import GraphedEncoder
from graphwrap.settings import Backend
from tests.oracles import Grids
from vitgraph.timing import milliseconds, random_pixels, spread, synchronize

SLOW_TOKENS, SLOW_RUNS = 3500, 5
"""In workloads of more than SLOW_TOKENS tokens, transformers' tower runs only SLOW_RUNS times."""
FEW_TOKENS, MORE_RUNS = 256, 3
"""Workloads of at most FEW_TOKENS tokens have MORE_RUNS times as many runs, because noise of the
host affects their medians most."""
MIB = 2**20
KernelsOrFp8: TypeAlias = Kernels | Literal["fp8"]
TheirCall: TypeAlias = Callable[[Tensor, Grids], Callable[[], object]]


class Case(NamedTuple):
    """A workload to measure: its name, its grids, and whether it was drawn at random."""

    name: str
    grids: Grids
    drawn: bool = False
    """Whether it was drawn at random in this run."""


@dataclass(frozen=True)
class Setup:
    """The settings of a measurement: kernels, runs, captures, graph backend and token budgets."""

    kernels: tuple[KernelsOrFp8, ...] = ("torch", "auto")
    """Values of ``GraphedEncoder(kernels=...)``, or "fp8" for "auto" with products in fp8."""
    runs: int = 15
    stages: tuple[str, ...] = ("cold", "warm", "saved")
    """The captures with kernels "auto" that are timed; with other kernels there is one capture."""
    backend: Backend = "auto"
    max_budget: int | None = None
    max_graphs: int = 48

    @property
    def shown(self) -> str:
        """The kernels whose token budgets are also used for the reference encoder's graphs: "auto"
        if it is among :attr:`kernels`."""
        return "auto" if "auto" in self.kernels else self.kernels[-1]

    def graph(self, encoder: VisionEncoder, kernels: KernelsOrFp8) -> GraphedEncoder:
        """Wrap an encoder in graphs of the default token budgets, which are not captured yet."""
        return GraphedEncoder(
            encoder,
            kernels="auto" if kernels == "fp8" else kernels,
            precision="fp8" if kernels == "fp8" else "bf16",
            backend=self.backend,
            table=None,
            max_budget=self.max_budget,
            max_graphs=self.max_graphs,
        )


def measure_tower(
    name: str,
    encoder: VisionEncoder,
    cases: Sequence[Case],
    setup: Setup,
    their_calls: Mapping[str, TheirCall] = MappingProxyType({}),
) -> dict[str, Any]:
    """Measure one tower in every workload; return the results as plain data.

    Args:
        name: name of the tower in printed lines.
        encoder: the reference encoder of this library.
        cases: the workloads.
        setup: the settings of the measurement.
        their_calls: by the name of a figure, a function that takes pixels and grids and returns a
            function without arguments, which runs transformers' tower on them.
    """
    graphs, captures = capture_all(encoder, setup)
    reference = reference_graphs(encoder, graphs[setup.shown], cases, setup)
    captures["reference"] = describe_graphs(reference)
    fast = encoder.accelerated()
    rows = []
    for case in cases:
        rows.append(measure_case(case, encoder, fast, graphs, reference, their_calls, setup.runs))
        print(row_line(name, rows[-1], setup.kernels), flush=True)
    row = {
        "tower": name,
        "tower_mib": sum(weight.nbytes for weight in encoder.parameters()) / MIB,
        "captures": captures,
        "kernel_choices": fast.kernel_choices(),
        "workloads": rows,
    }
    for graphed in (*graphs.values(), reference):
        graphed.release()
    return row


def capture_all(
    encoder: VisionEncoder, setup: Setup
) -> tuple[dict[str, GraphedEncoder], dict[str, Any]]:
    """Capture graphs with each of the kernels in ``setup``.

    Returns:
        The graphs, and the seconds and memory of their capture, by the kernels.
    """
    graphs: dict[str, GraphedEncoder] = {}
    captures: dict[str, Any] = {}
    for kernels in setup.kernels:
        graphed = setup.graph(encoder, kernels)
        seconds = {}
        for stage in setup.stages if kernels == "auto" else ("cold",):
            prepare_capture(graphed, stage)
            synchronize()
            began = time.perf_counter()
            graphed.capture(progress=False)
            synchronize()
            seconds[stage] = time.perf_counter() - began
        graphs[kernels] = graphed
        captures[kernels] = {"capture_seconds": seconds, **describe_graphs(graphed)}
        print(f"  captured kernels={kernels!r}: {seconds}", flush=True)
    return graphs, captures


def prepare_capture(graphed: GraphedEncoder, stage: str) -> None:
    """Release the graphs of the previous capture; for "saved", first save its table and load it."""
    if stage == "cold":
        return
    if stage == "saved":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "table.json"
            graphed.save_table(path)
            graphed.release()
            graphed.load_table(path)
    else:
        graphed.release()


def describe_graphs(graphed: GraphedEncoder) -> dict[str, Any]:
    """Return the memory of captured graphs in MiB, and how many there are."""
    stats = graphed.stats()
    return {
        "arena_mib": stats.arena_bytes / MIB,
        "pool_mib": stats.pool_bytes / MIB,
        "derived_mib": stats.derived_bytes / MIB,
        "note": stats.note,
        "dropped": stats.dropped,
        "budgets": len(stats.budgets),
    }


def reference_graphs(
    encoder: VisionEncoder, graphed: GraphedEncoder, cases: Sequence[Case], setup: Setup
) -> GraphedEncoder:
    """Capture graphs of the reference encoder, for the token budgets that ``graphed`` uses.

    So both have the same padding in every workload.
    """
    taken = {
        step["tokens"]
        for case in cases
        for step in path_of(graphed, random_pixels(encoder, case.grids), case.grids)[0]
        if step["tokens"] is not None
    }
    budgets = sorted(taken) or [encoder.budget_range[0]]
    reference = GraphedEncoder(encoder, budgets, kernels="reference", backend=setup.backend)
    return reference.capture(progress=False)


def path_of(
    graphed: GraphedEncoder, pixels: Tensor, grids: Grids
) -> tuple[list[dict[str, Any]], float]:
    """Return the replays and eager runs of one call, and the padding tokens per real token."""
    graphed.reset_stats()
    graphed(pixels, grids)
    stats = graphed.stats()
    steps: list[dict[str, Any]] = [
        {
            "tokens": budget.tokens,
            "shape": f"{budget.segments}x{budget.longest_segment}",
            "kernel": budget.kernel,
            "replays": budget.hits,
        }
        for budget in stats.budgets
        if budget.hits
    ]
    if stats.eager_calls:
        steps.append({"tokens": None, "kernel": "eager", "replays": stats.eager_calls})
    return steps, stats.padding


def measure_case(
    case: Case,
    encoder: VisionEncoder,
    fast: VisionEncoder,
    graphs: Mapping[str, GraphedEncoder],
    reference: GraphedEncoder,
    their_calls: Mapping[str, TheirCall],
    runs: int,
) -> dict[str, Any]:
    """Time all variants of a tower on one workload, in turn; return its row of the table.

    Args:
        case: the workload.
        encoder: the reference encoder.
        fast: its accelerated form.
        graphs: CUDA graphs of the accelerated form, by their kernels.
        reference: CUDA graphs of the reference encoder.
        their_calls: the functions that run transformers' tower, as in :func:`measure_tower`.
        runs: number of timed runs.
    """
    pixels, grids = random_pixels(encoder, case.grids), case.grids
    paths = {name: path_of(graphed, pixels, grids) for name, graphed in graphs.items()}
    calls: dict[str, Callable[[], object]] = {
        f"graphed {name}": partial(graphed, pixels, grids) for name, graphed in graphs.items()
    }
    calls["reference_graph_ms"] = lambda: reference(pixels, grids)
    tokens = sum(spec.output_tokens for spec in encoder.item_specs(grids))
    if not case.drawn:
        calls["accelerated_ms"] = lambda: fast(pixels, grids)
        if pixels.is_cuda:
            calls["bare_ms"] = bare_replay(fast, pixels, grids)
        calls |= {figure: call(pixels, grids) for figure, call in their_calls.items()}
    fewer = dict.fromkeys(their_calls, min(runs, SLOW_RUNS)) if tokens > SLOW_TOKENS else None
    times = milliseconds(calls, runs * MORE_RUNS if tokens <= FEW_TOKENS else runs, fewer)
    figures: dict[str, Any] = {
        name: {**spread(values), "runs": len(values)} for name, values in times.items()
    }
    graphed_ms = {name: figures.pop(f"graphed {name}") for name in graphs}
    calls.clear()  # frees the memory of the hand-captured graph before the next workload
    empty_cache()
    return {
        "workload": case.name,
        "drawn": case.drawn,
        "grids": grids,
        "tokens": tokens,
        "rows": len(pixels),
        "graphed_ms": graphed_ms,
        **figures,
        "paths": {name: steps for name, (steps, _) in paths.items()},
        "padding": {name: padding for name, (_, padding) in paths.items()},
    }


def empty_cache() -> None:
    """Collect garbage, and return the unused memory of torch's allocator to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def row_line(name: str, row: Mapping[str, Any], kernels: Sequence[str]) -> str:
    """Return a line about one workload to print during the measurement: medians in milliseconds."""
    figures = [row.get(key) for key in ("hf_ms", "reference_graph_ms")]
    figures += [row["graphed_ms"][key] for key in kernels]
    figures += [row.get(key) for key in ("bare_ms", "accelerated_ms")]
    cells = [f"{figure['median']:>9.3f}" if figure else f"{'-':>9}" for figure in figures]
    shown = "auto" if "auto" in kernels else kernels[-1]
    taken = " + ".join(f"{step['tokens']}: {step['kernel']}" for step in row["paths"][shown])
    return f"{name:<15} {row['workload']:<20} {row['tokens']:>6} {' '.join(cells)}  {taken}"


def head_line(kernels: Sequence[str]) -> str:
    """Return the line of column titles for the lines of :func:`row_line`."""
    titles = ("transf.", "reference", *kernels, "bare", "accel.")
    cells = " ".join(f"{title:>9}" for title in titles)
    return f"{'tower':<15} {'workload':<20} {'tokens':>6} {cells}  budget: attention kernel"
