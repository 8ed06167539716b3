"""The rules by which each family's video processor samples frames from a video.

Source: ``sample_frames`` of the Qwen2-VL, Qwen3-VL, InternVL, GLM-4.1V, GLM-4.6V, GLM-5,
ERNIE-4.5-VL, Muse-Glimmer, SmolVLM, MiniCPM-V 4.6 and Molmo2 video processors, and
``default_sample_indices_fn`` (the "uniform" rule, and Nemotron's), of transformers 5.23.0.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, SupportsFloat, TypeAlias

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
    "nemotron",
]

_FILLED = ("ernie", "nemotron")
"""The rules that repeat the last frame of an odd clip even if all frames are taken."""
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
        temporal_patch_size: by the qwen2_vl, GLM, ernie and nemotron rules the number of frames is
            a multiple of it. All but the first repeat the last frame for that, ernie and nemotron
            even without ``fps`` and ``num_frames``.
        initial_shift: where the internvl rule starts: True is half a step, a number is an index.
        max_duration: seconds beyond which the glm4v and glm5_next rules sample fewer frames per
            second; 0: no bound.
        times: seconds from the first frame to each, if frames are not evenly spaced; then
            ``source_fps`` is their number over the duration. Read with ``fps``.

    Returns:
        Indices in ascending order; the qwen3_vl rule may repeat some, the GLM, ernie and nemotron
        rules the last one, and every rule those that are shown for long where frames are not evenly
        spaced.

    Raises:
        ValueError: both ``fps`` and ``num_frames``, more frames than the video has (except by the
            qwen3_vl rule), no frame at all, or a rate that is not a positive number.
    """
    if fps is None and num_frames is None:
        return _repeat_last(list(range(total)), temporal_patch_size if rule in _FILLED else 1)
    if fps is not None and num_frames is not None:
        raise ValueError(f"fps={fps} and num_frames={num_frames}: give one of them")
    bounds = min_frames, max_frames, temporal_patch_size, initial_shift, max_duration
    if fps is None or times is None:
        return _RULES[rule](_Request(total, fps, num_frames, source_fps, *bounds))
    rate = _source_rate(source_fps)
    film = _Request(max(round(total / rate * _TICKS), 1), fps, None, _TICKS, *bounds)
    if initial_shift is not True:
        film = film._replace(initial_shift=initial_shift / rate * _TICKS)
    ticks = _RULES[rule](film)
    return [max(bisect_right(times, (tick + 1) / _TICKS) - 1, 0) for tick in ticks]


class _Request(NamedTuple):
    """The arguments of :func:`sample_frames`, of which one of ``fps`` and ``num_frames`` is given.

    ``source_fps`` is None if it is not known.
    """

    total: int
    fps: float | None
    num_frames: int | None
    source_fps: float | None
    min_frames: int
    max_frames: int
    temporal_patch_size: int
    initial_shift: bool | float
    max_duration: float

    @property
    def target(self) -> float:
        """The number of frames asked for, before any bound; with ``fps`` it may be a fraction."""
        if self.fps is None:
            return float(self.num_frames or 0)
        return self.total / _source_rate(self.source_fps) * _rate(self.fps)

    def count(self, count: int, multiple: int = 1) -> int:
        """Return ``count``; raise a ValueError if it is none, or more frames than there are."""
        setting = f"fps={self.fps}" if self.fps is not None else "num_frames"
        if count < 1:
            raise ValueError(
                f"{setting} makes none of {self.total} frames: ask for at least {multiple}"
            )
        if count > self.total:
            frames = "1 frame" if count == 1 else f"{count} frames"
            raise ValueError(
                f"{setting} asks for {frames}, and the video has {self.total}: ask for fewer"
            )
        return count


def _qwen2_vl(asked: _Request) -> list[int]:
    total, pair = asked.total, asked.temporal_patch_size
    if asked.fps is None:
        return _steps(0, total, asked.count(round(asked.target / pair) * pair, pair))
    largest_count = min(asked.max_frames, total) // pair * pair
    count = math.floor(min(max(asked.target, asked.min_frames), largest_count) / pair) * pair
    return _steps(0, total, count or total)  # a video shorter than a pair: all its frames


def _qwen3_vl(asked: _Request) -> list[int]:
    count = int(asked.target)
    if asked.fps is not None:
        count = min(max(count, asked.min_frames), asked.max_frames, asked.total)
    return list(map(round, _evenly(0, asked.total - 1, count)))


def _internvl(asked: _Request) -> list[int]:
    count, shift = asked.count(int(asked.target)), asked.initial_shift
    start = asked.total / count / 2 if shift is True else float(shift)
    return _steps(start, asked.total, count)


def _uniform(asked: _Request) -> list[int]:
    count = asked.count(int(asked.target) if asked.fps is None else max(int(asked.target), 1))
    return [frame * asked.total // count for frame in range(count)]


def _nemotron(asked: _Request) -> list[int]:
    return _repeat_last(_uniform(asked), asked.temporal_patch_size)


def _ernie(asked: _Request) -> list[int]:
    if asked.fps is None:
        count: float = asked.count(int(asked.target))
    else:
        count = min(max(asked.target, asked.min_frames), asked.max_frames, asked.total)
    return _repeat_last(_steps(0, asked.total, count), asked.temporal_patch_size)


def _muse_glimmer(asked: _Request) -> list[int]:
    if asked.fps is None:
        count = asked.count(int(asked.target))
    else:
        pair = asked.temporal_patch_size
        pairs = min(int(asked.target), asked.max_frames, asked.total) // pair
        count = min(max(pairs, 1) * pair, asked.total)
    return torch.linspace(0, asked.total - 1, count, device="cpu").long().tolist()


def _molmo2(asked: _Request) -> list[int]:
    target = int(asked.target)
    count = asked.count(target) if asked.fps is None else max(min(target, asked.total), 1)
    return _steps(0, asked.total, count)


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


def _truncated(first: int, last: int, count: int) -> list[int]:
    """Return ``count`` evenly spaced numbers from ``first`` to ``last``, rounded down."""
    return list(map(int, _evenly(first, last, count)))


def _smolvlm(asked: _Request) -> list[int]:
    """Return evenly spaced frame numbers: of a long video, without a second at both ends."""
    if asked.fps is None:
        return _truncated(0, asked.total - 1, asked.count(int(asked.target)))
    total, source_rate, rate = asked.total, _source_rate(asked.source_fps), _rate(asked.fps)
    duration, first, last = total / source_rate, 0, total - 1
    if duration - 2 > asked.max_frames * rate:
        start, stop = int(source_rate), min(int(total - source_rate), last)
        first, last = (start, stop) if start < stop else (first, last)
    count = max(min(round(rate * duration), asked.max_frames), 1)
    return list(dict.fromkeys(_truncated(first, last, count)))


def _minicpm_v(asked: _Request) -> list[int]:
    """Return the frames at equally spaced times from 0.

    Of a video with over ``max_frames`` of them, so many tenths of a second are taken, evenly
    spaced.
    """
    if asked.fps is None:
        return _truncated(0, asked.total - 1, asked.count(int(asked.target)))
    total, source_rate, rate = asked.total, _source_rate(asked.source_fps), _rate(asked.fps)
    most, duration = asked.max_frames, total / source_rate
    if duration * rate <= most:
        count = math.ceil(duration * rate)
        return [min(int(n * source_rate / rate), total - 1) for n in range(count)]
    times = [round(tenth * 0.1, 1) for tenth in range(int(duration / 0.1))]
    frames = [min(int(time * source_rate), total - 1) for time in times] or [0]
    if len(frames) <= most:
        return frames
    return [frames[place] for place in _truncated(0, len(frames) - 1, most)]


def _glm4v(asked: _Request) -> list[int]:
    def sample(total: int, source_rate: float, rate: float) -> list[int]:
        return _at_times(total, source_rate, rate, asked.max_duration)

    return _glm(asked, sample)


def _glm46v(asked: _Request) -> list[int]:
    def sample(total: int, source_rate: float, _: float) -> list[int]:
        duration = total / source_rate
        pairs = 3 if duration <= 30 else 1 if duration <= 300 else 0.5  # per second
        return _in_order(total, source_rate, pairs * asked.temporal_patch_size, 640, 2400)

    return _glm(asked, sample)


def _glm5_next(asked: _Request) -> list[int]:
    def sample(total: int, source_rate: float, rate: float) -> list[int]:
        return _in_order(total, source_rate, rate, asked.max_frames, asked.max_duration)

    return _glm(asked, sample)


def _glm(asked: _Request, sample: Callable[[int, float, float], list[int]]) -> list[int]:
    """Return frame numbers by a GLM rule; only the last one repeats, to fill a group of frames.

    ``sample`` is the rule for a number of frames, their rate, and the rate asked for.
    """
    if asked.fps is None:
        frames = _steps(0, asked.total, asked.count(int(asked.target)))
    elif asked.source_fps is None:
        raise ValueError(
            f"fps={asked.fps}: this checkpoint samples by time, so the video needs its own frames "
            "per second: pass a file or Video(frames, fps), or num_frames instead of fps"
        )
    else:
        frames = sample(asked.total, _source_rate(asked.source_fps), _rate(asked.fps))
    return _repeat_last(list(dict.fromkeys(frames)), asked.temporal_patch_size)


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


def _in_order(
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
        return _truncated(0, total - 1, count)
    frames, next_time, frame_seconds = [], 0.0, 1 / source_rate
    for number in range(total):
        if number * frame_seconds >= next_time:
            next_time += 1 / target_rate
            frames.append(number)
            if next_time >= int(duration):
                break
    if len(frames) < count:
        return _truncated(frames[0], frames[-1], count)
    return frames if len(frames) == count else _truncated(0, total - 1, count)


_RULES: Mapping[SamplingRule, Callable[[_Request], list[int]]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "internvl": _internvl,
    "glm4v": _glm4v,
    "glm46v": _glm46v,
    "glm5_next": _glm5_next,
    "uniform": _uniform,
    "ernie": _ernie,
    "muse_glimmer": _muse_glimmer,
    "smolvlm": _smolvlm,
    "minicpm_v": _minicpm_v,
    "molmo2": _molmo2,
    "nemotron": _nemotron,
}
