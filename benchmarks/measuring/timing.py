"""Wall-clock milliseconds of functions that run in turn; each time ends when the GPU is done."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def milliseconds(
    calls: Mapping[str, Callable[[], object]], runs: int, fewer: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Time all functions in turn; return the wall-clock milliseconds of every run of each function.

    Each time ends when the GPU is done. The order is random in every turn, because the preceding
    function affects the clocks of the GPU and the caches of the host: always after the same one, a
    function took up to 6 % longer on an H200.

    Args:
        calls: the functions to time, by name.
        runs: number of timed runs of each function, after one untimed warm-up run.
        fewer: smaller numbers of runs for some functions, by name; None for none.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    dice = random.Random(0)
    for turn in range(runs + 1):
        for name in dice.sample(list(calls), len(calls)):
            if turn > (fewer or {}).get(name, runs):
                continue
            synchronize()
            began = time.perf_counter()
            calls[name]()
            synchronize()
            if turn:  # the first turn warms up
                times[name].append((time.perf_counter() - began) * 1e3)
    return times


def interleaved(calls: Mapping[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Time all functions in turn; return their median wall-clock milliseconds, GPU included."""
    times = milliseconds(calls, runs)
    return {name: statistics.median(values) for name, values in times.items()}


def synchronize() -> None:
    """Wait until the GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
