"""Timing replays and eager runs once at capture, on a CUDA device.

Attention takes as long in a replay as in an eager run of the same items, so the choice between them
does not depend on it: a replay is timed with only padding as input, and the time of attention is
subtracted from eager runs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from encoders.contract import GraphableEncoder, Grid

from .budgets import LONG_SEGMENTS, Batch, Budget, read_specs
from .buffers import BudgetGraph
from .costs import Costs
from .encoder_forms import EncoderForm, capacity_metadata

ROW_DIVISORS = (8, 4, 2, 1)
"""Eager runs are timed with the rows of the largest budget divided by each of these numbers, and
once with the smallest item. With costs between these five sizes, 226 of 229 choices between replay
and eager run were the faster one on an H200."""
ENOUGH_MS = 60.0
"""A call is timed at least twice, and again until the times sum to so many milliseconds or there
are seven of them: from two times alone, an eager run of 13 ms was priced at 23.5 ms on an H200."""
SETTLING = 2
"""The number of untimed warm-up calls before an eager run and a replay are compared: after a pause,
a replay took 67.1, 70.9, 72.4 and 72.8 ms on an H200."""
CLOSE = 0.98
"""Factor on the time of an eager run. Times are accurate to 2 %, so an eager run is preferred to a
replay that is as fast within that. Of 229 choices on an H200, one was then 4 to 7 % slower than its
alternative; with a factor of 1.0 one or two were, and with 0.96 up to seven."""
OFF, TRIES = 1.2, 3
"""A kept table is measured anew if a time differs from the table's by more than this factor, in so
many measurements: one measurement was off at the start of a process on an H100 that was idle."""


def measure(
    encoder: GraphableEncoder, graphs: Mapping[Budget, BudgetGraph], device: torch.device
) -> Costs:
    """Return the measured costs of replaying each budget of ``graphs`` and of five eager runs.

    An eager run is timed back to back with the replay of the same rows, because the clocks of a GPU
    vary by several per cent with its work before. The ``device`` is a CUDA device.
    """
    large = max(graphs, key=lambda budget: (budget.rows, budget.longest_segment))
    pixels = _random_rows(graphs[large])
    by_rows = {budget.rows: graph for budget, graph in graphs.items()}
    times = {rows: _replay_ms(encoder, graph, [], pixels) for rows, graph in by_rows.items()}
    small_grids = _smallest_grids(encoder, graphs)
    points = [(_rows(encoder, small_grids), CLOSE * _eager_ms(encoder, small_grids, pixels))]
    for divisor in ROW_DIVISORS:
        distances = {
            abs(candidate.rows - large.rows / divisor): candidate
            for candidate in sorted(graphs)[::-1]
        }
        budget = distances[min(distances)]
        grids = full_grids(encoder, budget)
        if (rows := _rows(encoder, grids)) > points[-1][0]:
            full = _replay_ms(encoder, graphs[budget], grids, pixels, SETTLING)
            ms = _eager_ms(encoder, grids, pixels, SETTLING)
            padding = _replay_ms(encoder, graphs[budget], [], pixels, SETTLING)
            ms = times[budget.rows] * (ms - full + padding) / padding
            points.append((rows, max(CLOSE * ms, points[-1][1])))  # more rows never cost less
    return Costs({budget: times[budget.rows] for budget in graphs}, points)


def still_hold(
    encoder: GraphableEncoder,
    graphs: Mapping[Budget, BudgetGraph],
    costs: Costs,
    device: torch.device,
) -> bool:
    """Return whether three calls take as long as ``costs`` say, within 20 %.

    They are a replay of the largest budget and one of a middle budget, and the smallest eager run.
    A table may have been measured on a GPU, or beside a host, that was busy with other work.
    """
    pixels = _random_rows(graphs[_by_size(graphs)[0]])
    for budget in checked_budgets(graphs):
        graph = graphs[budget]
        replay = partial(_replay_ms, encoder, graph, [], pixels, SETTLING)
        if not _takes(costs.replays[budget], replay):
            return False
    grids = _smallest_grids(encoder, costs.replays)
    kept_ms = costs.eager(_rows(encoder, grids)) / CLOSE
    return _takes(kept_ms, partial(_eager_ms, encoder, grids, pixels, SETTLING))


def checked_budgets(budgets: Iterable[Budget]) -> list[Budget]:
    """Return the budgets whose replays are timed again for a kept table: the largest, a middle."""
    by_size = _by_size(budgets)
    return [by_size[0], by_size[len(by_size) // 2]]


def _by_size(budgets: Iterable[Budget]) -> list[Budget]:
    return sorted(budgets, key=lambda budget: (-budget.rows, -budget.segments))


def _takes(kept_ms: float, measured_ms: Callable[[], float]) -> bool:
    """Return whether one of three measurements is within 20 % of a kept time."""
    return any(kept_ms / OFF <= measured_ms() <= kept_ms * OFF for _ in range(TRIES))


def _smallest_grids(encoder: GraphableEncoder, budgets: Iterable[Budget]) -> list[Grid]:
    return [encoder.grid_for(min(encoder.budget_range[0], min(budgets).tokens))]


def _random_rows(graph: BudgetGraph) -> Tensor:
    """Return normalised rows for a replay of ``graph``; a GPU computes with zeros faster."""
    generator = torch.Generator(graph.pixels.device).manual_seed(0)  # the global one is not touched
    return torch.empty_like(graph.pixels).normal_(generator=generator)


def full_grids(encoder: GraphableEncoder, budget: Budget) -> list[Grid]:
    """Return the grids of about eight equal items that together fill most of a budget.

    For an encoder that splits images into tiles it is one item; the list is empty if none fits.
    """
    largest_grid = encoder.grid_for(budget.tokens)
    spec = read_specs(encoder, [largest_grid])[0]
    if spec.segments > 1 or budget.tokens < LONG_SEGMENTS:
        return [largest_grid] if budget.fits(Batch.of([spec])) else []
    for tokens in range(budget.tokens // min(LONG_SEGMENTS, budget.segments), 0, -1):
        grid = encoder.grid_for(tokens)
        spec = read_specs(encoder, [grid])[0]
        count = min(budget.segments, budget.tokens // spec.output_tokens)
        if count and budget.fits(Batch.of([spec] * count)):
            return [grid] * count
    return []


def _rows(encoder: GraphableEncoder, grids: Sequence[Grid]) -> int:
    return Batch.of(read_specs(encoder, grids)).rows


def _replay_ms(
    encoder: GraphableEncoder,
    graph: BudgetGraph,
    grids: Sequence[Grid],
    pixels: Tensor,
    skip_count: int = 0,
) -> float:
    """Return the milliseconds of one replay, with the copies of inputs and outputs."""
    metadata = capacity_metadata(encoder, graph.budget, grids)
    metadata_bytes = graph.format.to_bytes(metadata, _rows(encoder, grids))
    graph.metadata_bytes.copy_(metadata_bytes)

    def call() -> None:
        if graph.writes_metadata:
            graph.metadata_bytes.copy_(metadata_bytes)
        graph.pixels.copy_(pixels[: graph.budget.rows])
        graph.replay()
        for output in graph.outputs.values():
            output.clone()

    return _milliseconds(call, pixels.device, skip_count)


def _eager_ms(
    encoder: GraphableEncoder, grids: Sequence[Grid], pixels: Tensor, skip_count: int = 0
) -> float:
    """Return the milliseconds of an eager run of items with these grids, metadata included."""
    rows = pixels[: _rows(encoder, grids)]
    encoder(rows, list(grids))  # untimed: an accelerated encoder chooses kernels in its first run
    return _milliseconds(lambda: encoder(rows, list(grids)), pixels.device, skip_count)


def _milliseconds(call: Callable[[], object], device: torch.device, skip_count: int = 0) -> float:
    """Return the least milliseconds of a few calls of ``call``: disturbances only make it slower.

    Each is timed between two synchronisations of ``device``; the first ``skip_count`` do not count.
    """
    times: list[float] = []
    max_calls = skip_count + 7
    while len(times) < skip_count + 2 or (
        len(times) < max_calls and sum(times[skip_count:]) < ENOUGH_MS
    ):
        torch.cuda.synchronize(device)
        start_time = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start_time) * 1e3)
    return min(times[skip_count:])


def fingerprint(encoder: nn.Module, form: EncoderForm) -> dict[str, str]:
    """Return by name, as text, the properties on which the times of an encoder's graphs depend.

    They are properties of the module (class, shapes of weights), of the captured ``form`` of it
    (such as the kernels), of the device, and of torch.
    """
    weights = [*encoder.named_parameters(), *encoder.named_buffers()]
    shapes = "\n".join(f"{name} {tuple(weight.shape)}" for name, weight in weights)
    device = form.device
    return {
        "encoder": type(encoder).__name__,
        "weights": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        "rows": "x".join(map(str, form.encoder.row_shape)),
        "dtype": str(form.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "outputs": " ".join(sorted(form.outputs)),
        **{name: str(value) for name, value in form.settings._asdict().items()},
    }
