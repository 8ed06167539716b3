"""The rate of a video, and the times of frames that are not evenly spaced.

The rate that a container states is a guess for films of a variable rate, as phones and screen
recorders write them, so it is compared with the timestamps of the decoded frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

UNKNOWN_RATE = 24.0
"""Frames per second of a video that states none, as in transformers."""


class Timing(NamedTuple):
    """When the frames of a video are shown."""

    fps: float
    """Frames per second; where they are not evenly spaced, their number over the duration."""
    times: tuple[float, ...] | None
    """Seconds from the first frame to each, where frames are not evenly spaced; None elsewhere."""


def read_timing(
    starts: Sequence[float | None], last_seconds: float, stated: float | None
) -> Timing:
    """Work out the rate of a video from the times of its frames.

    Frames are evenly spaced if each is shown within half a frame of its place. The stated rate is
    kept where frames are evenly spaced by it, because timestamps are rounded, often to
    milliseconds.

    Args:
        starts: seconds at which each frame is shown; None where the file has no timestamp.
        last_seconds: seconds for which the last frame is shown; 0 if unknown.
        stated: the container's frames per second, or None.
    """
    known = [start for start in starts if start is not None]
    in_order = len(known) == len(starts) and all(a < b for a, b in pairwise(known))
    if not in_order or len(known) < 2:
        return Timing(stated or UNKNOWN_RATE, None)
    times = tuple(start - known[0] for start in known)
    spacing = times[-1] / (len(times) - 1)
    for rate in (stated, _usual_rate(len(times) - 1, times[-1])):
        if rate and all(abs(time * rate - number) <= 0.5 for number, time in enumerate(times)):
            return Timing(rate, None)
    return Timing(len(times) / (times[-1] + (last_seconds or spacing)), times)


def _usual_rate(steps: int, seconds: float) -> float:
    """Return the rate of ``steps`` frames in ``seconds``, which may be rounded to a millisecond.

    Without this, 27 frames of a film of 3 frames per second could last just under 9 seconds, from
    which one frame less is sampled.
    """
    rate = steps / seconds
    usual = {round(2 * rate) / 2, round(rate * 1.001) / 1.001} - {0.0}
    errors = {abs(steps / candidate - seconds): candidate for candidate in usual}
    return errors[min(errors)] if errors and min(errors) < 0.002 else rate
