"""Wall milliseconds of calls that take turns, the GPU waited for before and after each."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def milliseconds(
    calls: Mapping[str, Callable[[], object]], runs: int, fewer: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Time all calls in turn; return the wall-clock milliseconds of every run of each call.

    Each time ends when the GPU is done. The order is drawn anew for every turn, because the call
    before changes the clocks of a GPU and the caches of the host: always after the same one, a call
    took up to 6 % longer on an H200.

    Args:
        calls: the functions to time, by name.
        runs: how often each is timed, after one run that warms up.
        fewer: by name, the calls that are timed less often.
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
    """Time all calls in turn; return the median wall-clock milliseconds of each, GPU included."""
    times = milliseconds(calls, runs)
    return {name: statistics.median(values) for name, values in times.items()}


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
