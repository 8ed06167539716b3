"""Films that are damaged, of a variable rate, with cover art, or transparent."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import av
import numpy as np
import pytest
import torch
from PIL import Image

from encoders.inputs import Video, read_video, sample_frames, to_rgb
from encoders.inputs.patches import PatchPreprocessor
from encoders.inputs.sampling import SamplingRule
from tests.support.photographs import panning_clip

QWEN3 = PatchPreprocessor.published("qwen3_vl", patch_size=16, temporal_patch_size=2, merge_size=2)
FORMATS = {
    "mp4": ("mpeg4", {"movflags": "faststart"}),
    "avi": ("mpeg4", {}),
    "mkv": ("mpeg4", {}),
    "webm": ("libvpx", {}),
    "flv": ("flv", {}),
}
"""The codec and the options of the container for each suffix."""


def write_film(path: Path, times: Sequence[float], rate: int = 30, *, sound: bool = False) -> Path:
    """Write a film whose frames are shown at ``times``, in seconds; ``rate`` is what it states."""
    codec, options = FORMATS[path.suffix[1:]]
    tick = Fraction(1, rate if path.suffix == ".avi" else 1000)
    with av.open(str(path), mode="w", options=options) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.codec_context.time_base = tick
        hum: Any = container.add_stream("aac", rate=8000) if sound else None
        for time, picture in zip(times, panning_clip(len(times), 64, 96), strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = round(time / tick), tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if sound:
            write_silence(container, hum, round(8000 * (times[-1] + 2)))
    return path


def write_silence(container: Any, stream: Any, samples: int) -> None:
    for start in range(0, samples, 1024):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate, frame.pts = 8000, start
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def even(count: int, rate: float) -> list[float]:
    return [number / rate for number in range(count)]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_film_cut_in_half_is_an_error_or_a_warning(suffix: str, tmp_path: Path) -> None:
    path = write_film(tmp_path / f"film.{suffix}", even(60, 30))
    whole = list(read_video(path).frames)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"video 0: .*film\.{suffix}: is damaged: .*on_damage"):
        QWEN3(videos=[path])
    with pytest.warns(UserWarning, match=rf"film\.{suffix}: is damaged"):
        clip = read_video(path, on_damage="warn")
    assert 0 < len(clip.frames) < len(whole)
    assert to_rgb(clip.frames[0]).shape == to_rgb(whole[0]).shape


@pytest.mark.parametrize("suffix", ["mp4", "avi", "mkv"])
def test_zeros_in_a_film_are_an_error_or_a_warning(suffix: str, tmp_path: Path) -> None:
    path = write_film(tmp_path / f"film.{suffix}", even(60, 30))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"is damaged: corrupt packets: \d+; replace it"):
        read_video(path)
    with pytest.warns(UserWarning, match="is damaged: corrupt packets"):
        frames = read_video(path, on_damage="warn").frames
    assert len(list(frames)) == len(frames)


def test_damage_is_raised_or_warned_of() -> None:
    with pytest.raises(ValueError, match=r"on_damage='ignore': must be \"raise\" or \"warn\""):
        read_video(b"", on_damage="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("times", [even(20, 30), [0, 0.1, 0.2, 1.5, 1.6, 4, 7]], ids=len)
def test_a_sound_film_is_not_called_damaged(
    suffix: str, times: list[float], tmp_path: Path
) -> None:
    sound = suffix in ("mp4", "mkv")  # it lasts longer than the pictures
    frames = read_video(write_film(tmp_path / f"film.{suffix}", times, sound=sound)).frames
    assert len(frames) == len(times)


def test_frames_that_an_edit_list_leaves_out_are_not_missed(tmp_path: Path) -> None:
    path = write_film(tmp_path / "film.mp4", [time - 1 for time in even(60, 30)])
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 60
    assert len(read_video(path).frames) == 30


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm"])
def test_the_rate_is_that_of_the_timestamps(suffix: str, tmp_path: Path) -> None:
    path = write_film(tmp_path / f"film.{suffix}", even(27, 3))
    clip = read_video(path)
    assert (clip.fps, clip.times) == (3.0, None)
    assert QWEN3(videos=[path], fps=2).grid_thw[0, 0] == 9  # 18 frames of 9 seconds


@pytest.mark.parametrize("rate", [12.5, 24000 / 1001, 25, 30000 / 1001, 60])
def test_usual_rates_are_read_exactly(rate: float, tmp_path: Path) -> None:
    clip = read_video(write_film(tmp_path / "film.mkv", even(40, rate), 90))
    assert clip.times is None
    assert clip.fps == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm"])
def test_uneven_frames_are_sampled_by_time(suffix: str, tmp_path: Path) -> None:
    times = [0, 0.1, 0.2, 0.3, 0.4, 1.5, 4, 5, 6, 6.02]
    clip = read_video(write_film(tmp_path / f"film.{suffix}", times))
    assert clip.times == pytest.approx(times, abs=2e-3)
    rule = {"rule": "qwen3_vl", "fps": 2, "source_fps": clip.fps, "times": clip.times}
    numbers = sample_frames(10, **rule)
    assert len(numbers) > 10
    wanted = [clip.frames[number] for number in numbers]
    got = QWEN3(videos=[clip], fps=2).pixel_values
    assert torch.equal(got, QWEN3(videos=[wanted]).pixel_values)


def test_the_frame_that_is_shown_at_a_time_is_taken() -> None:
    times = [0, 0.1, 0.2, 0.3, 0.4, 1.5, 4, 5, 6, 6.02]
    numbers = sample_frames(10, "uniform", fps=2, source_fps=10 / 6.5, times=times)
    # At 0, 0.5, ..., 6 seconds.
    assert numbers == [0, 4, 4, 5, 5, 5, 5, 5, 6, 6, 7, 7, 8]


@pytest.mark.parametrize("rule", get_args(SamplingRule))
def test_times_of_even_frames_change_no_sample(rule: SamplingRule) -> None:
    for total, rate, fps in ((40, 10, 2), (90, 25, 5), (64, 8, 1)):
        by_number = sample_frames(total, rule, fps=fps, source_fps=rate)
        by_time = sample_frames(total, rule, fps=fps, source_fps=rate, times=even(total, rate))
        assert len(by_time) == len(by_number)
        assert max(abs(a - b) for a, b in zip(by_time, by_number, strict=True)) <= 1
        counted = sample_frames(total, rule, num_frames=8, times=even(total, rate))
        assert counted == sample_frames(total, rule, num_frames=8)


def test_one_time_is_needed_for_each_frame() -> None:
    clip = panning_clip(4)
    for times in ([0, 1], [0, 1, 3, 2]):
        with pytest.raises(ValueError, match=rf"video 0: has {len(times)} times for 4 frames: "):
            QWEN3(videos=[Video(clip, 1.0, times)], fps=1)


def write_cover(path: Path, film: bool) -> Path:
    """Write sound with a cover picture, and a film after it if asked to."""
    with av.open(str(path), mode="w") as container:
        cover: Any = container.add_stream("png", rate=1)
        cover.width, cover.height, cover.pix_fmt = 640, 480, "rgb24"
        cover.disposition = av.stream.Disposition.attached_pic
        hum: Any = container.add_stream("aac", rate=8000)
        moving: Any = container.add_stream("mpeg4", rate=10) if film else None
        if film:
            moving.width, moving.height, moving.pix_fmt = 96, 64, "yuv420p"
        picture = np.full((480, 640, 3), 255, np.uint8)
        container.mux(cover.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(cover.encode())
        if film:
            for frame in panning_clip(12, 64, 96):
                container.mux(moving.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(moving.encode())
        write_silence(container, hum, 8000)
    return path


def test_cover_art_is_not_taken_for_the_film(tmp_path: Path) -> None:
    clip = read_video(write_cover(tmp_path / "film.mp4", film=True))
    assert (len(clip.frames), clip.fps) == (12, 10)
    assert to_rgb(clip.frames[0]).shape == (3, 64, 96)


def test_sound_with_a_cover_has_no_video_stream(tmp_path: Path) -> None:
    path = write_cover(tmp_path / "song.mp4", film=False)
    with av.open(str(path)) as container:
        assert len(container.streams.video) == 1
    with pytest.raises(ValueError, match=r"song\.mp4: has no video stream"):
        read_video(path)


@pytest.mark.parametrize("suffix", ["png", "gif"])
def test_transparent_frames_lie_over_white_like_images(suffix: str, tmp_path: Path) -> None:
    pictures = []
    for number, picture in enumerate(panning_clip(3, 64, 96)):
        alpha = np.full((64, 96, 1), 255, np.uint8)
        alpha[:, : 20 + 10 * number] = 0
        if suffix != "gif":
            alpha[:10] = 128
        pictures.append(Image.fromarray(np.concatenate([picture, alpha], axis=2)))
    path = tmp_path / f"film.{suffix}"
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100, disposal=2)
    frames = read_video(path).frames
    assert len(frames) == 3
    with Image.open(path) as stored:
        for number, frame in enumerate(frames):
            stored.seek(number)
            shown = to_rgb(stored.convert("RGBA"))
            assert torch.equal(to_rgb(frame), shown)
            assert bool((to_rgb(frame)[:, 20:, : 20 + 10 * number] == 255).all())


def test_transparent_frames_of_any_width_are_converted_whole(tmp_path: Path) -> None:
    levels = range(20, 240, 20)
    with av.open(str(tmp_path / "film.mkv"), "w") as container:
        stream: Any = container.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = 130, 66, "yuva420p"
        for level in levels:
            grey = np.full((66, 130, 4), level, np.uint8)
            grey[..., 3] = 255
            frame = av.VideoFrame.from_ndarray(grey, format="rgba")
            container.mux(stream.encode(frame.reformat(format="yuva420p")))
        container.mux(stream.encode())
    for frame, level in zip(read_video(tmp_path / "film.mkv").frames, levels, strict=True):
        assert (to_rgb(frame).int() - level).abs().max() <= 1
