"""Times functions that run in turn, GPU included: for ``vitgraph bench speed`` and benchmarks."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch

    from encoders import VisionEncoder
    from encoders.contract import GridLike


class Times(TypedDict):
    """The minimum, median and maximum of the wall-clock milliseconds of repeated runs."""

    min: float
    median: float
    max: float


def milliseconds(
    calls: Mapping[str, Callable[[], object]],
    runs: int,
    fewer: Mapping[str, int] | None = None,
    device: torch.device | None = None,
) -> dict[str, list[float]]:
    """Time all functions in turn; return the wall-clock milliseconds of every run of each function.

    Each time ends when the GPU is done. The order is random in every turn, because the preceding
    function affects the clocks of the GPU and the caches of the host: always after the same one, a
    function took up to 6 % longer on an H200.

    Args:
        calls: the functions to time, by name.
        runs: number of timed runs of each function, after one untimed warm-up run.
        fewer: smaller numbers of runs for some functions, by name; None for none.
        device: the device that the functions use; None for the current GPU, if there is one.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    dice = random.Random(0)
    for turn in range(runs + 1):
        for name in dice.sample(list(calls), len(calls)):
            if turn > (fewer or {}).get(name, runs):
                continue
            synchronize(device)
            start_time = time.perf_counter()
            calls[name]()
            synchronize(device)
            if turn:  # the first turn warms up
                times[name].append((time.perf_counter() - start_time) * 1e3)
    return times


def medians(calls: Mapping[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Time all functions in turn; return their median wall-clock milliseconds, GPU included."""
    return {name: statistics.median(values) for name, values in milliseconds(calls, runs).items()}


def spread(values: Sequence[float]) -> Times:
    """Return the minimum, median and maximum of milliseconds."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def synchronize(device: torch.device | None = None) -> None:
    """Wait until a GPU, by default the current one, has finished its work; do nothing on a CPU."""
    import torch  # not above: the command line reads its options without torch

    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        torch.cuda.synchronize(device)


def random_pixels(encoder: VisionEncoder, grids: GridLike) -> torch.Tensor:
    """Return random pixels for these grids, on the encoder's device and in its dtype."""
    import torch

    rows = sum(spec.input_size for spec in encoder.item_specs(grids))
    weight = next(encoder.parameters())
    return torch.randn(rows, *encoder.row_shape, device=weight.device, dtype=weight.dtype)
