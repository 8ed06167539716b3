"""Times of graph replays, eager runs and transformers on a GPU, for vision towers of real size.

    python -m benchmarks.graphs --json benchmarks/results/graphs_h200.json

Figures are medians in bfloat16, with inputs on the GPU; all calls run in turn:

- ``hf_eager_ms``: transformers' tower (sdpa) in the same process.
- ``eager_ms``: our reference encoder, called with pixels and grids.
- ``accelerated_ms``: ``encoder.accelerated()``, called in the same way.
- ``graphed_ms``: :class:`GraphedEncoder`, which includes the choice of a graph, padding and copies.
- ``bare_replay_ms``: a CUDA graph of the accelerated encoder captured by hand for this very shape.
- ``host_us``: CPU microseconds from the call of the ``GraphedEncoder`` to the launch of the graph,
  for grids seen before, while the GPU is idle and the CPU core awake.
- ``launch_us``: CPU microseconds of the launch itself.
- ``host_after_wait_us``, ``launch_after_wait_us``: the same two after the core has slept while it
  waited for the GPU, when everything on the CPU is slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.towers import TOWERS, Tower
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import GridLike
from graphwrap import GraphedEncoder
from graphwrap.costs import Costs
from graphwrap.packing import Packer
from graphwrap.replay import Cache, Executor
from tests.oracles import BY_NAME, Grids
from vitgraph.timing import medians
from vitgraph.timing import random_pixels as draw

GRAPHED = ["Qwen3-VL-8B", "Qwen2.5-VL-7B", "Qwen2-VL-7B", "InternViT-300M"]
LATENCY_TOKENS = (64, 128, 196, 256, 400, 576, 784, 1024, 1568, 2048, 3136, 4096)


def hf_call(tower: Tower, reference: nn.Module, pixels: Tensor, grids: Grids) -> Any:
    """Return a function that calls transformers' tower (``reference``) as a user would."""
    grid = torch.tensor(grids, device=pixels.device)
    if BY_NAME[tower.family].tiled:
        return lambda: BY_NAME[tower.family].output(reference, pixels, grid.cpu())
    return lambda: reference(pixels, grid)


def bare_replay(encoder: VisionEncoder, pixels: Tensor, grids: GridLike) -> Callable[[], None]:
    """Capture a CUDA graph of an encoder for exactly these inputs; return a function to replay it.

    The function keeps the inputs alive.
    """
    metadata = encoder.prepare_encoder_metadata(grids)
    encoder(pixels, encoder_metadata=metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = encoder(pixels, encoder_metadata=metadata)
    held = (metadata, output)

    def replay(keep: object = held) -> None:
        graph.replay()

    return replay


def executor_of(graphed: GraphedEncoder) -> Executor:
    """Return the part of a captured ``GraphedEncoder`` that runs the input path "image"."""
    captured = graphed._captured
    assert captured is not None
    return captured.paths["image"]


def forget_plans(executor: Executor) -> None:
    """Clear the cache of graphs chosen for grids, so that they are chosen anew in the next call."""
    executor.schedules = Cache(executor.schedules.max_size)


def replay_what_fits(executor: Executor) -> Packer:
    """Return a packer that replays every image that fits a graph, without regard to run times."""
    measured = executor.graphs.packer
    costs = Costs.unmeasured(executor.graphs.by_budget)
    return Packer(costs, measured.max_batch_size, measured.eager_tokens)


HOST = ("host_us", "launch_us", "host_after_wait_us", "launch_after_wait_us")


def host_microseconds(
    graphed: GraphedEncoder, pixels: Tensor, grids: Grids
) -> dict[str, float | None]:
    """Return the median CPU microseconds from call to launch and of the launch, by names of HOST.

    All are None if these grids run eagerly.
    """
    executor = executor_of(graphed)
    budget = executor.schedule(grids).steps[0].budget
    if budget is None:
        return dict.fromkeys(HOST)
    runner = executor.graphs.by_budget[budget]
    stamps: list[float] = []
    graph = runner.captured
    assert graph is not None
    replay = graph.replay

    class Stamp:
        def replay(self) -> None:
            stamps.append(time.perf_counter())
            replay()
            stamps.append(time.perf_counter())

    def call() -> tuple[float, float]:
        stamps.clear()
        began = time.perf_counter()
        graphed(pixels, grids)
        return (stamps[0] - began) * 1e6, (stamps[1] - stamps[0]) * 1e6

    def awake() -> None:
        while not torch.cuda.current_stream().query():
            pass

    runner.captured = cast("torch.cuda.CUDAGraph", Stamp())
    times: list[list[float]] = []
    for _ in range(15):
        awake()
        busy = call()
        torch.cuda.synchronize()
        times.append([*busy, *call()])
    runner.captured = graph
    torch.cuda.synchronize()
    medians = [statistics.median(kind) for kind in zip(*times, strict=True)]
    return dict(zip(HOST, medians, strict=True))


def measure(tower: Tower, runs: int) -> dict[str, Any]:
    """Measure one tower: times of all workloads, latencies by tokens, memory, and cost table."""
    encoder = tower.build()
    reference, fast = tower.reference(encoder), encoder.accelerated()
    graphed = GraphedEncoder(encoder, table=None).capture(progress=False)
    stats = graphed.stats()
    rows = [
        workload(tower, encoder, fast, reference, graphed, *item, runs)
        for item in tower.workloads.items()
    ]
    latency = [] if BY_NAME[tower.family].tiled else latencies(fast, graphed, runs)
    return {
        "tower": tower.name,
        "capture_seconds": stats.capture_seconds,
        "budgets": len(stats.budgets),
        "arena_mib": stats.arena_bytes / 2**20,
        "pool_mib": stats.pool_bytes / 2**20,
        "derived_mib": stats.derived_bytes / 2**20,
        "workloads": rows,
        "latency": latency,
        "memory_by_budgets": memory(encoder),
        "prices": costs(graphed),
    }


def costs(graphed: GraphedEncoder) -> dict[str, Any]:
    """Return the measured times by which ``graphed`` chooses between replays and eager runs, in
    the form in which ``save_table`` writes them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        graphed.save_table(path)
        return dict(json.loads(path.read_text()))


def workload(
    tower: Tower,
    encoder: VisionEncoder,
    fast: VisionEncoder,
    reference: nn.Module,
    graphed: GraphedEncoder,
    name: str,
    grids: Grids,
    runs: int,
) -> dict[str, Any]:
    """Measure one workload; return its row of the table.

    Args:
        tower: the published tower, which says how transformers' tower is called.
        encoder: our reference encoder.
        fast: its accelerated form.
        reference: transformers' tower.
        graphed: CUDA graphs of ``encoder``.
        name: name of the workload.
        grids: the patch grids of its images.
        runs: number of timed runs.
    """
    pixels = draw(encoder, grids)
    calls = {
        "hf_eager_ms": hf_call(tower, reference, pixels, grids),
        "eager_ms": lambda: encoder(pixels, grids),
        "accelerated_ms": lambda: fast(pixels, grids),
        "graphed_ms": lambda: graphed(pixels, grids),
        "bare_replay_ms": bare_replay(fast, pixels, grids),
    }
    ms = medians(calls, runs)
    steps = executor_of(graphed).schedule(grids).steps
    tokens = sum(spec.output_tokens for spec in encoder.item_specs(grids))
    held = [step.budget.tokens if step.budget else step.counts["tokens"] for step in steps]
    paths = [step.budget.name if step.budget else "eager" for step in steps]
    row = {
        "workload": name,
        "rows": pixels.shape[0],
        "tokens": tokens,
        **ms,
        **host_microseconds(graphed, pixels, grids),
        "path": " + ".join(paths),
        "padding": sum(held) / tokens - 1,
    }
    host = "-" if row["host_us"] is None else f"{row['host_us']:.0f}"
    print(
        f"{tower.name:<15} {name:<9} {row['rows']:>6} {ms['hf_eager_ms']:>8.2f} "
        f"{ms['eager_ms']:>8.2f} {ms['accelerated_ms']:>8.2f} "
        f"{ms['graphed_ms']:>8.2f} {ms['bare_replay_ms']:>8.2f} "
        f"{ms['hf_eager_ms'] / ms['graphed_ms']:>6.2f} {host:>5}  {row['path']}",
        flush=True,
    )
    return row


def latencies(fast: VisionEncoder, graphed: GraphedEncoder, runs: int) -> list[dict[str, float]]:
    """Time one image of several sizes, run eagerly by the accelerated encoder and replayed."""
    executor = executor_of(graphed)
    chosen, forced = executor.graphs.packer, replay_what_fits(executor)
    rows = []
    for tokens in LATENCY_TOKENS:
        grids = [list(fast.grid_for(tokens))]
        pixels = draw(fast, grids)
        forget_plans(executor)
        executor.graphs.packer = forced
        calls = {
            "eager_ms": lambda: fast(pixels, grids),  # noqa: B023
            "replay_ms": lambda: graphed(pixels, grids),  # noqa: B023
        }
        rows.append({"tokens": tokens, **medians(calls, runs)})
    forget_plans(executor)
    executor.graphs.packer = chosen
    return rows


def memory(encoder: VisionEncoder) -> list[dict[str, float]]:
    """Return the MiB of the graphs' memory pool and of the arena (their shared input and output
    buffers), for several numbers of token budgets of up to 4096 tokens."""
    rows = []
    for count in (1, 2, 5, 10, 20):
        graphed = GraphedEncoder(encoder, max_graphs=count, max_budget=4096, table=None)
        stats = graphed.capture(progress=False).stats()
        rows.append(
            {
                "budgets": len(stats.budgets),
                "pool_mib": stats.pool_bytes / 2**20,
                "arena_mib": stats.arena_bytes / 2**20,
            }
        )
        graphed.release()
    return rows


def main() -> None:
    """Measure the towers; print the table of times, and write JSON if ``--json`` is given."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--towers", nargs="*", default=GRAPHED)
    options = parser.parse_args()
    print(
        f"{'tower':<15} {'workload':<9} {'rows':>6} {'HF':>8} {'eager':>8} {'accel.':>8} "
        f"{'graphed':>8} {'bare':>8} {'HF/gr':>6} {'us':>5}  path"
    )
    towers = []
    with torch.no_grad():
        for name in options.towers:
            towers.append(measure(TOWERS[name], options.runs))
            last = towers[-1]
            print(
                f"{name}: {last['budgets']} budgets captured in {last['capture_seconds']:.2f} s, "
                f"arena {last['arena_mib']:.0f} MiB, pool {last['pool_mib']:.0f} MiB; by budgets: "
                + ", ".join(
                    f"{row['budgets']}: {row['pool_mib']:.0f}+{row['arena_mib']:.0f}"
                    for row in last["memory_by_budgets"]
                ),
                flush=True,
            )
            torch.cuda.empty_cache()
    if options.json:
        body = {"about": about(options.runs), "towers": towers}
        write_results(options.json, body)


if __name__ == "__main__":
    main()
