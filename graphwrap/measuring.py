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
from itertools import pairwise

import torch
from torch import Tensor, nn

from encoders.contract import GraphableEncoder, Grid

from .budgets import LONG_SEGMENTS, Batch, Budget, largest_first, read_specs
from .buffers import BudgetGraph
from .costs import Costs, interpolated
from .encoder_forms import EncoderForm, capacity_metadata

ROW_DIVISORS = (8, 4, 2, 1)
"""Eager runs have a cost for the rows of the largest budget divided by each of these numbers, and
for the smallest item. With costs between these five sizes, 226 of 229 choices between replay and
eager run were the faster one on an H200."""
DEVICE_BOUND = 1.5
"""An eager run that costs this many times as much as the smallest, which takes as long as the host
needs to launch it, waits for the GPU. A larger one takes longer than its replay by as many
milliseconds, and is not timed: on an H200 these were 1 to 4 from 4,096 to 32,768 patches."""
STEP = 1.2
"""A size between two others of which the larger has at most so many times the rows of the smaller
is not timed, but interpolated between them."""
ENOUGH_MS, MOST_CALLS = 15.0, 5
"""A replay is timed until its times sum to so many milliseconds, at most so many times. A replay of
68 ms that was timed twice in a row took up to 7 % longer a minute later on an H200: a second time
makes the first no better."""
ROUNDS, ENOUGH_ROUNDS_MS, MOST_ROUNDS = 2, 120.0, 7
"""An eager run and a replay are compared in at least so many rounds, and again until these took so
many milliseconds: from two times alone, an eager run of 13 ms was priced at 23.5 ms on an H200. One
more round before is not counted: after a pause, a replay took 67.1, 70.9, 72.4 and 72.8 ms."""
CLOSE = 0.98
"""Factor on the time of an eager run. Times are accurate to 2 %, so an eager run is preferred to a
replay that is as fast within that. Of 229 choices on an H200, one was then 4 to 7 % slower than its
alternative; with a factor of 1.0 one or two were, and with 0.96 up to seven."""
OFF, TRIES = 1.2, 3
"""A kept table is measured anew if a replay's time differs from the table's by more than this
factor, in so many measurements. No eager run is timed again: a small one takes as long as Python
does, from 15 to 20 ms within one process on an H200."""


def measure(
    encoder: GraphableEncoder, graphs: Mapping[Budget, BudgetGraph], device: torch.device
) -> Costs:
    """Return the measured costs of replaying each budget of ``graphs`` and of five eager runs.

    An eager run is timed in turn with the replay of the same rows, because the clocks of a GPU vary
    by several per cent with its work before. The ``device`` is a CUDA device.
    """
    large = max(graphs, key=lambda budget: (budget.rows, budget.longest_segment))
    pixels = _random_rows(graphs[large])
    by_rows = {budget.rows: graph for budget, graph in graphs.items()}
    timed = {rows: _replay_ms(encoder, by_rows[rows], pixels) for rows in spread_sizes(by_rows)}
    times = {rows: interpolated([*timed.items()], rows) for rows in by_rows}
    small_grids = _smallest_grids(encoder, graphs)
    (host_ms,) = _in_turn([_eager(encoder, small_grids, pixels)], device)
    points, longer_ms, waits = [(_rows(encoder, small_grids), CLOSE * host_ms)], 0.0, False
    for divisor in ROW_DIVISORS:
        distances = {
            abs(candidate.rows - large.rows / divisor): candidate
            for candidate in sorted(graphs)[::-1]
        }
        budget = distances[min(distances)]
        grids = full_grids(encoder, budget)
        if (rows := _rows(encoder, grids)) > points[-1][0]:
            if not waits:
                calls = [
                    _eager(encoder, grids, pixels),
                    _replay(encoder, graphs[budget], grids, pixels),
                ]
                eager_ms, replay_ms = _in_turn(calls, device)
                longer_ms = eager_ms - replay_ms
            ms = times[budget.rows] + longer_ms
            waits |= ms >= DEVICE_BOUND * host_ms
            points.append((rows, max(CLOSE * ms, points[-1][1])))  # more rows never cost less
    return Costs({budget: times[budget.rows] for budget in graphs}, points)


def spread_sizes(sizes: Iterable[int]) -> list[int]:
    """Return the sizes that are timed, ascending: the smallest, the largest, and some between.

    Each size that is not timed lies between two that are, of which the larger is at most ``STEP``
    times the smaller.
    """
    ascending = sorted(sizes)
    spread = ascending[:1]
    for size, following in pairwise([*ascending[1:], ascending[-1] * 2]):
        if following > STEP * spread[-1]:
            spread.append(size)
    return spread


def still_hold(
    encoder: GraphableEncoder,
    graphs: Mapping[Budget, BudgetGraph],
    costs: Costs,
    device: torch.device,
) -> bool:
    """Return whether three replays take as long as ``costs`` say, within 20 %.

    A table may have been measured on a GPU that was busy with other work.
    """
    pixels = _random_rows(graphs[largest_first(graphs)[0]])
    return all(
        _takes(costs.replays[budget], partial(_replay_ms, encoder, graphs[budget], pixels))
        for budget in checked_budgets(graphs)
    )


def checked_budgets(budgets: Iterable[Budget]) -> list[Budget]:
    """Return the budgets whose replays are timed again for a kept table.

    They are the largest, a middle and the smallest one.
    """
    by_size = largest_first(budgets)
    return list(dict.fromkeys([by_size[0], by_size[len(by_size) // 2], by_size[-1]]))


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


def _replay_ms(encoder: GraphableEncoder, graph: BudgetGraph, pixels: Tensor) -> float:
    """Return the milliseconds of one replay of padding, with the copies of inputs and outputs.

    It is the least of a few times: disturbances only make a call slower.
    """
    call, times = _replay(encoder, graph, [], pixels), list[float]()
    while len(times) < MOST_CALLS and sum(times) < ENOUGH_MS:
        times.append(_milliseconds(call, pixels.device))
    return min(times)


def _replay(
    encoder: GraphableEncoder, graph: BudgetGraph, grids: Sequence[Grid], pixels: Tensor
) -> Callable[[], None]:
    metadata = capacity_metadata(encoder, graph.budget, grids)
    # On the device, where the metadata of grids that were seen before are kept, too.
    metadata_bytes = graph.format.to_bytes(metadata, _rows(encoder, grids)).to(pixels.device)

    def call() -> None:
        graph.metadata_bytes.copy_(metadata_bytes)
        graph.pixels.copy_(pixels[: graph.budget.rows])
        graph.replay()
        for output in graph.outputs.values():
            output.clone()

    return call


def _eager(
    encoder: GraphableEncoder, grids: Sequence[Grid], pixels: Tensor
) -> Callable[[], object]:
    """Return a call that runs items with these grids eagerly, and prepares their metadata."""
    rows = pixels[: _rows(encoder, grids)]
    return lambda: encoder(rows, list(grids))


def _in_turn(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the least milliseconds of each call, timed in turn after an untimed round.

    An accelerated encoder chooses kernels in its first run.
    """
    rounds, total = list[list[float]](), 0.0
    for call in calls:
        call()
    while len(rounds) < ROUNDS or (len(rounds) < MOST_ROUNDS and total < ENOUGH_ROUNDS_MS):
        rounds.append([_milliseconds(call, device) for call in calls])
        total += sum(rounds[-1])
    return [min(times) for times in zip(*rounds, strict=True)]


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of a call, between two synchronisations of ``device``."""
    torch.cuda.synchronize(device)
    start_time = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start_time) * 1e3


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
