"""One budget, ready to run: its views into the arena, and its graph where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from encoders.contract import GraphableEncoder, Metadata
from encoders.contract import Grid

from .buffers import PADDING, Arena, Layout, output_fields
from .budgets import Budget
from .forward import Forward
from .pool import Pool

SLOW_MS = 8.0
"""A replay of more milliseconds is timed once: its first run costs no more than the next."""


@dataclass
class Runner:
    """Runs one budget on what lies in the arena; results lie in the arena afterwards."""

    budget: Budget
    layout: Layout
    pixels: Tensor
    block: Tensor
    body: Callable[[], None]
    outputs: dict[str, Tensor]
    """Output buffers of this budget by field name, filled by the first run of the body."""
    graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Replay the graph, or run the body where there is none."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()


def capacity_metadata(encoder: GraphableEncoder, budget: Budget, grids: list[Grid]) -> Metadata:
    """A call's metadata on the host, padded to the budget's capacities."""
    return encoder.prepare_encoder_metadata(
        grids,
        max_batch_size=budget.segments,
        max_frames_per_batch=budget.segments,
        max_seqlen_override=budget.longest_segment,
        max_input_size=budget.rows,
        max_windows_per_batch=budget.windows or None,
        device="cpu",
    )


@dataclass(frozen=True)
class Body:
    """What a graph captures: clear the padding, run the encoder, put results into the arena.

    It knows nothing of its runner: a cycle would outlive ``release()`` until garbage is collected,
    and the arena and the graph's pool with it. Nor is it a closure: an error that somebody holds
    keeps the closures of its frames.
    """

    forward: Forward
    arena: Arena
    wanted: tuple[str, ...]
    pixels: Tensor
    padding: Tensor
    metadata: Metadata
    outputs: dict[str, Tensor]

    def __call__(self) -> None:
        padding = self.padding.view(-1, *[1] * (self.pixels.ndim - 1))
        self.pixels.masked_fill_(padding, 0.0)  # stale rows of an earlier call, whatever they held
        output = self.forward(self.pixels, encoder_metadata=self.metadata)
        for name, field in output_fields(output, self.wanted).items():
            self.outputs[name] = self.arena.output(name, field)
            self.outputs[name].copy_(field)


def make_runner(
    forward: Forward, budget: Budget, layout: Layout, arena: Arena, wanted: tuple[str, ...]
) -> Runner:
    """Views of the arena for one budget, and the body that a graph captures."""
    block = arena.block[: layout.nbytes]
    views = layout.views(block)
    padding = views.pop(PADDING)
    metadata = {**views, **layout.constants}
    pixels = arena.pixels[: budget.rows]
    body = Body(forward, arena, wanted, pixels, padding, metadata, {})
    return Runner(budget, layout, pixels, block, body, body.outputs)


def capture(runner: Runner, pool: Pool, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Warm the body up, then capture it into ``pool``.

    Not ``torch.cuda.graph``: that one collects garbage and empties the cache for every graph. Here
    the cache is emptied once, after the largest graph's warm-up: a capture cannot take from it.

    torch keeps a cuBLAS workspace (32 MiB on Hopper) for every stream that ever multiplied. It is
    forgotten before capture, so that the graph's lies in its pool and nobody else's work does, and
    after, so that the next graph reuses it and ``release()`` returns it.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            runner.body()
            torch._C._cuda_clearCublasWorkspaces()
            if pool.empty:
                torch.cuda.empty_cache()
            pool.record(graph, runner.body)
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    return graph


def time_replays(runner: Runner, stream: torch.cuda.Stream) -> float:
    """Milliseconds of a replay on the device: one run of a slow graph, the median of six else."""
    times: list[float] = []
    with torch.cuda.stream(stream):
        while len(times) < 7 and (not times or times[0] < SLOW_MS):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            runner.run()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times[1:])[len(times) // 2 - 1] if len(times) > 1 else times[0]
