"""The rules by which each family's video processor samples frames from a video.

Source: ``sample_frames`` of the Qwen2-VL, Qwen3-VL, InternVL, GLM-4.1V, GLM-4.6V, GLM-5,
ERNIE-4.5-VL, Muse-Glimmer, SmolVLM, MiniCPM-V 4.6 and Molmo2 video processors, and
``default_sample_indices_fn`` (the "uniform" rule), of transformers 5.23.0.

Deliberate differences:

- The duration of a video is its number of frames over its frames per second, which is what the
  readers of transformers report.
- Where frames are not evenly spaced, ``fps`` samples the frames that are shown at the times that
  the rule takes, so that one frame may be taken several times. transformers samples by frame
  number, as if all frames were evenly spaced over the duration. With ``num_frames`` both go by
  frame number.
- At least one frame is sampled; the GLM-4.6V and GLM-5 rules of transformers take none of a clip
  that is shorter than the step between two frames.
- With ``num_frames``, which the rules of GLM and MiniCPM of transformers do not read, frames are
  evenly spaced. By the rule of SmolVLM they are as many as asked for; transformers takes fewer of a
  short video.
- The Molmo2 rule takes as many frames as ``num_frames`` says; transformers at most two per second.
- The MiniCPM rule of transformers takes one frame per second; here, as many as ``fps`` says.
- The ernie rule takes any ``num_frames``; transformers raises for fewer than ``min_frames`` and for
  more than ``max_frames``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, SupportsFloat, TypeAlias

import torch

SamplingRule: TypeAlias = Literal[
    "qwen2_vl",
    "qwen3_vl",
    "internvl",
    "glm4v",
    "glm46v",
    "glm5_next",
    "uniform",
    "ernie",
    "muse_glimmer",
    "smolvlm",
    "minicpm_v",
    "molmo2",
]

_TICKS = 1000
"""Ticks per second at which a film of unevenly spaced frames is sampled: a rule chooses ticks, as
frames of a film of this rate, and of each tick the frame is taken that is then shown."""


def sample_frames(
    total: int,
    rule: SamplingRule,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    source_fps: float | None = None,
    min_frames: int = 4,
    max_frames: int = 768,
    temporal_patch_size: int = 2,
    initial_shift: bool | float = True,
    max_duration: float = 0,
    times: Sequence[float] | None = None,
) -> list[int]:
    """Return the indices of the frames that a family's video processor samples.

    Args:
        total: number of frames of the video.
        rule: the family whose video processor's rule is used.
        fps: frames per second to sample; the Qwen rules keep the number of frames between
            ``min_frames`` and ``max_frames``. The glm46v rule does not read the number: it takes 6,
            2 or 1 per second, the fewer the longer the video is.
        num_frames: number of frames to sample. Without ``fps`` and ``num_frames``, all frames.
        source_fps: frames per second of the video, 24 if None; the GLM rules need it with ``fps``.
        min_frames, max_frames: smallest and largest number of frames with ``fps``.
        temporal_patch_size: by the qwen2_vl, GLM and ernie rules the number of frames is a multiple
            of it. The GLM and ernie rules repeat the last frame for that, ernie even without
            ``fps`` and ``num_frames``.
        initial_shift: where the internvl rule starts: True is half a step, a number is an index.
        max_duration: seconds beyond which the glm4v and glm5_next rules sample fewer frames per
            second; 0: no bound.
        times: seconds from the first frame to each, if frames are not evenly spaced; then
            ``source_fps`` is their number over the duration. Read with ``fps``.

    Returns:
        Indices in ascending order; the qwen3_vl rule may repeat some, the GLM rules the last one,
        and every rule those that are shown for long where frames are not evenly spaced.

    Raises:
        ValueError: both ``fps`` and ``num_frames``, more frames than the video has (except by the
            qwen3_vl rule), no frame at all, or a rate that is not a positive number.
    """
    if fps is None and num_frames is None:
        return _repeat_last(list(range(total)), temporal_patch_size if rule == "ernie" else 1)
    if fps is not None and num_frames is not None:
        raise ValueError(f"fps={fps} and num_frames={num_frames}: give one of them")
    if fps is not None and times is not None:
        rate = _source_rate(source_fps)
        ticks = sample_frames(
            max(round(total / rate * _TICKS), 1),
            rule,
            fps=fps,
            source_fps=_TICKS,
            min_frames=min_frames,
            max_frames=max_frames,
            temporal_patch_size=temporal_patch_size,
            initial_shift=initial_shift if initial_shift is True else initial_shift / rate * _TICKS,
            max_duration=max_duration,
        )
        return [max(bisect_right(times, (tick + 1) / _TICKS) - 1, 0) for tick in ticks]
    if rule in ("glm4v", "glm46v", "glm5_next"):
        return _sample_glm(
            total, rule, fps, num_frames, source_fps, max_frames, max_duration, temporal_patch_size
        )
    target_count = (
        float(num_frames or 0) if fps is None else total / _source_rate(source_fps) * _rate(fps)
    )
    if rule == "qwen3_vl":
        count = int(target_count)
        if fps is not None:
            count = min(max(count, min_frames), max_frames, total)
        return list(map(round, _evenly(0, total - 1, count)))
    if rule == "ernie":
        if fps is None:
            target_count = _check_count(num_frames or 0, total, None, 1)
        else:
            target_count = min(max(target_count, min_frames), max_frames, total)
        return _repeat_last(_steps(0, total, target_count), temporal_patch_size)
    if rule == "uniform":
        count = num_frames if num_frames is not None else max(int(target_count), 1)
        return [frame * total // count for frame in range(_check_count(count, total, fps, 1))]
    if rule == "muse_glimmer":
        count = _check_count(int(target_count), total, fps, 1) if fps is None else 0
        if fps is not None:
            pairs = min(int(target_count), max_frames, total) // temporal_patch_size
            count = min(max(pairs, 1) * temporal_patch_size, total)
        return torch.linspace(0, total - 1, count, device="cpu").long().tolist()
    if rule == "molmo2":
        count = _check_count(int(target_count), total, None, 1) if fps is None else 0
        return _steps(0, total, count or max(min(int(target_count), total), 1))
    if rule in ("smolvlm", "minicpm_v"):
        if fps is None:
            count = _check_count(num_frames or 0, total, None, 1)
            return list(map(int, _evenly(0, total - 1, count)))
        if rule == "minicpm_v":
            return _from_the_start(total, _source_rate(source_fps), _rate(fps), max_frames)
        return _between_ends(total, _source_rate(source_fps), _rate(fps), max_frames)
    if rule == "internvl":
        count = _check_count(int(target_count), total, fps, 1)
        start = total / count / 2 if initial_shift is True else float(initial_shift)
        return _steps(start, total, count)
    pair = temporal_patch_size
    if fps is None:
        return _steps(0, total, _check_count(round(target_count / pair) * pair, total, fps, pair))
    largest_count = min(max_frames, total) // pair * pair
    count = math.floor(min(max(target_count, min_frames), largest_count) / pair) * pair
    return _steps(0, total, count or total)  # a video shorter than a pair: all its frames


def read_rate(fps: object) -> float | None:
    """Return a rate as float if it is a positive finite number of any type but bool, such as a
    Fraction.

    Anything else returns None.
    """
    if isinstance(fps, bool):
        return None
    try:
        rate = float(fps) if isinstance(fps, SupportsFloat) else 0.0
    except (ArithmeticError, RuntimeError, TypeError, ValueError):  # a huge number, or an array
        return None
    return rate if 0 < rate < math.inf else None


def _source_rate(fps: float | None) -> float:
    rate = 24.0 if fps is None else read_rate(fps)
    if rate is None:
        raise ValueError(
            f"the video's own fps={fps}: must be a positive number of frames per second; leave it "
            "out where it is unknown"
        )
    return rate


def _rate(fps: float) -> float:
    rate = read_rate(fps)
    if rate is None:
        raise ValueError(f"fps={fps}: must be a positive number of frames per second")
    return rate


def _check_count(count: int, total: int, fps: float | None, multiple: int) -> int:
    setting = f"fps={fps}" if fps is not None else "num_frames"
    if count < 1:
        raise ValueError(f"{setting} makes none of {total} frames: ask for at least {multiple}")
    if count > total:
        frames = f"{count} frame{'s' * (count != 1)}"
        raise ValueError(f"{setting} asks for {frames}, the video has {total}: ask for fewer")
    return count


def _steps(start: float, total: int, count: float) -> list[int]:
    # Steps are float32, as in transformers. Their rounding may make one index too many, beyond the
    # last frame.
    indices: list[int] = (
        torch.arange(start, total, total / count, dtype=torch.float32, device="cpu").int().tolist()
    )
    return indices[: math.ceil(count)]


def _repeat_last(frames: list[int], multiple: int) -> list[int]:
    """Return the chosen frames, the last one repeated to fill a multiple of ``multiple``."""
    return frames + frames[-1:] * (-len(frames) % multiple)


def _evenly(first: float, last: float, count: int) -> list[float]:
    """Return ``count`` numbers from ``first`` to ``last``, as numpy.linspace does."""
    if count == 1:
        return [first]
    step = (last - first) / (count - 1)
    return [first + number * step for number in range(count - 1)] + [last]


def _between_ends(total: int, source_rate: float, target_rate: float, max_count: int) -> list[int]:
    """Return evenly spaced frame numbers by SmolVLM's rule: of a long video, without a second at
    both ends.
    """
    duration, first, last = total / source_rate, 0, total - 1
    if duration - 2 > max_count * target_rate:
        start, stop = int(source_rate), min(int(total - source_rate), last)
        first, last = (start, stop) if start < stop else (first, last)
    count = max(min(round(target_rate * duration), max_count), 1)
    return list(dict.fromkeys(map(int, _evenly(first, last, count))))


def _from_the_start(total: int, source_rate: float, target_rate: float, most: int) -> list[int]:
    """Return the frames at equally spaced times from 0, by MiniCPM-V's rule.

    Of a video with over ``most`` of them, ``most`` tenths of a second are taken, evenly spaced.
    """
    duration = total / source_rate
    if duration * target_rate <= most:
        count = math.ceil(duration * target_rate)
        return [min(int(n * source_rate / target_rate), total - 1) for n in range(count)]
    times = [round(tenth * 0.1, 1) for tenth in range(int(duration / 0.1))]
    frames = [min(int(time * source_rate), total - 1) for time in times] or [0]
    if len(frames) <= most:
        return frames
    return [frames[int(place)] for place in _evenly(0, len(frames) - 1, most)]


def _sample_glm(
    total: int,
    rule: str,
    fps: float | None,
    num_frames: int | None,
    source_fps: float | None,
    max_frames: int,
    max_duration: float,
    pair: int,
) -> list[int]:
    """Return frame numbers by a GLM rule; only the last one repeats, to fill a group of
    ``pair``.
    """
    if fps is None:
        frames = _steps(0, total, _check_count(num_frames or 0, total, None, 1))
    elif source_fps is None:
        raise ValueError(
            f"fps={fps}: this checkpoint samples by time, so the video needs its own frames per "
            "second: pass a file or Video(frames, fps), or num_frames instead of fps"
        )
    else:
        rate, target_rate = _source_rate(source_fps), _rate(fps)
        if rule == "glm4v":
            frames = _at_times(total, rate, target_rate, max_duration)
        elif rule == "glm46v":
            frames = _sample_in_order(total, rate, _rate_of_length(total / rate) * pair, 640, 2400)
        else:
            frames = _sample_in_order(total, rate, target_rate, max_frames, max_duration)
    return _repeat_last(list(dict.fromkeys(frames)), pair)


def _at_times(total: int, source_rate: float, target_rate: float, max_duration: float) -> list[int]:
    """Return the numbers of the first frames at or after equally spaced times."""
    duration, max_count = total / source_rate, int(max_duration * target_rate)
    if not max_duration or duration <= max_duration:
        count = max(math.floor(duration * target_rate), 1)
        return [min(total - 1, math.ceil(n * source_rate / target_rate)) for n in range(count)]
    if max_count >= total:
        return list(range(total))
    return [
        min(total - 1, math.ceil(second * source_rate))
        for second in _evenly(0, duration, max_count)
    ]


def _rate_of_length(duration: float) -> float:
    """Return the pairs of frames per second that GLM-4.6V samples from ``duration`` seconds."""
    return 3 if duration <= 30 else 1 if duration <= 300 else 0.5


def _sample_in_order(
    total: int, source_rate: float, target_rate: float, max_count: int, max_duration: float
) -> list[int]:
    """Return the numbers of the frames sampled at a rate by going through the video once.

    If this yields another number of frames than the rate and the bounds ask for, evenly spaced
    frames are returned instead.
    """
    duration = total / source_rate
    bounded_duration = min(duration, max_duration) if max_duration else duration
    count = max(min(int(bounded_duration * target_rate), max_count), 1)
    if total < count:
        return list(map(int, _evenly(0, total - 1, count)))
    frames, next_time, frame_seconds = [], 0.0, 1 / source_rate
    for number in range(total):
        if number * frame_seconds >= next_time:
            next_time += 1 / target_rate
            frames.append(number)
            if next_time >= int(duration):
                break
    if len(frames) < count:
        return list(map(int, _evenly(frames[0], frames[-1], count)))
    return frames if len(frames) == count else list(map(int, _evenly(0, total - 1, count)))
