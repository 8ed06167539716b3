"""Video files: reading, rotating, sampling, threads, and what is refused."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import struct
import weakref
from concurrent.futures import ThreadPoolExecutor
from operator import getitem
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import encoders.inputs.video_files
from encoders.inputs import read_video
from encoders.inputs.patches import PatchPreprocessor
from tests.support.comparisons import assert_all_equal
from vitgraph.video import write_video

QWEN3 = PatchPreprocessor.published("qwen3_vl", patch_size=16, temporal_patch_size=2, merge_size=2)


def moving_square(frames: int) -> Tensor:
    clip = torch.zeros(frames, 3, 64, 96, dtype=torch.uint8)
    for number, frame in enumerate(clip):
        frame[:, 16:48, 8 * number : 8 * number + 32] = 200
    return clip


def test_video_file_is_read_back_frame_by_frame(tmp_path: Path) -> None:
    frames = moving_square(7)
    write_video(tmp_path / "clip.mp4", frames, 12)
    clip = read_video(tmp_path / "clip.mp4")
    assert clip.fps == 12
    read = torch.stack(list(clip.frames))
    assert read.shape == frames.shape
    assert read.dtype == torch.uint8
    assert (read.float() - frames.float()).abs().mean() < 4  # lossy, but the same pictures


def test_frames_do_not_depend_on_the_order_of_reading(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", moving_square(7), 12)
    frames = read_video(tmp_path / "clip.mp4").frames
    forward = list(frames)
    for index in (6, 2, 2, -1, 0, 3, -7):
        assert torch.equal(frames[index], forward[index])
    assert_all_equal(frames[1:6:2], forward[1:6:2])
    with pytest.raises(IndexError, match="has 7 frames"):
        frames[7]


def test_a_video_that_is_dropped_closes_its_file_at_once(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", moving_square(7), 12)
    gc.disable()
    try:
        frames = read_video(tmp_path / "clip.mp4").frames
        frames[2]
        dropped = weakref.ref(frames)
        del frames
        assert dropped() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts Linux' open files")
def test_videos_that_were_preprocessed_hold_no_open_files(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", moving_square(7), 12)
    clips = [read_video(tmp_path / "clip.mp4") for _ in range(3)]
    before = set(os.listdir("/proc/self/fd"))
    first, again = (QWEN3(videos=clips).pixel_values for _ in range(2))
    assert set(os.listdir("/proc/self/fd")) <= before
    assert torch.equal(first, again)


def test_sampling_a_file_keeps_only_the_sampled_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_video(tmp_path / "clip.mp4", moving_square(30), 12)
    converted = []
    to_rgb = encoders.inputs.video_files._turn_upright
    monkeypatch.setattr(
        "encoders.inputs.video_files._turn_upright",
        lambda frame, *how: converted.append(frame) or to_rgb(frame, *how),
    )
    inputs = QWEN3(videos=[read_video(tmp_path / "clip.mp4")], num_frames=4)
    assert inputs.grid_thw[0, 0] == 2
    assert len(converted) == 4


@pytest.mark.parametrize("codec", ["libx264", "png"])
def test_frames_are_laid_out_as_resizing_takes_them_in_memory_of_their_own(
    tmp_path: Path, codec: str
) -> None:
    pixel_format = "yuv420p" if codec == "libx264" else "rgb24"
    with av.open(str(tmp_path / "clip.mov"), "w") as container:
        stream = container.add_stream(codec, rate=12)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixel_format
        for shade in range(3):
            image = Image.new("RGB", (64, 48), (90 * shade, 40, 200))
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    clip = read_video(tmp_path / "clip.mov").frames
    for number in range(3):
        frame = clip[number]
        assert frame.permute(1, 2, 0).is_contiguous()
        before = frame.clone()
        frame.zero_()
        assert torch.equal(clip[number], before)


@pytest.mark.slow
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_an_open_video_can_be_copied_and_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    write_video(tmp_path / "clip.mp4", moving_square(7), 12)
    monkeypatch.chdir(tmp_path)
    clip = read_video("clip.mp4")
    if used:
        assert len(list(clip.frames)) == 7
    monkeypatch.chdir("/")
    for copied in (copy.deepcopy(clip), copy.copy(clip), pickle.loads(pickle.dumps(clip))):
        assert copied.fps == 12
        assert_all_equal(copied.frames, clip.frames)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert torch.equal(pool.apply(getitem, (clip.frames, 3)), clip.frames[3])


def test_a_video_replaced_by_a_shorter_one_is_refused(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", moving_square(7), 12)
    clip = read_video(tmp_path / "clip.mp4")
    write_video(tmp_path / "clip.mp4", moving_square(4), 12)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"clip\.mp4: ends after 4 frames and had 7"):
            clip.frames[6]
    assert clip.frames[3].shape == (3, 64, 96)


def test_threads_that_share_a_video_read_the_right_frames(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", moving_square(30), 12)
    clip = read_video(tmp_path / "clip.mp4")
    wanted = QWEN3(videos=[clip]).pixel_values
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: QWEN3(videos=[clip]).pixel_values, range(24)))
    assert all(torch.equal(result, wanted) for result in results)


def with_matrix(path: Path, a: int, b: int, c: int, d: int) -> Path:
    """Write the display matrix (a b, c d) into the track header of an MP4 file."""
    raw = bytearray(path.read_bytes())
    start = raw.index(b"tkhd") + 4 + 40  # ISO/IEC 14496-12, 8.3.2, version 0
    one = 1 << 16
    identity = struct.pack(">9i", one, 0, 0, 0, one, 0, 0, 0, 1 << 30)
    assert raw[start : start + 36] == identity
    raw[start : start + 36] = struct.pack(
        ">9i", a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30
    )
    path.write_bytes(raw)
    return path


TURNS = {
    (1, 0, 0, 1): None,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,  # clockwise by 90 degrees: a phone held upright
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}


@pytest.mark.parametrize("matrix", TURNS)
def test_frames_are_turned_and_mirrored_by_the_display_matrix(
    matrix: tuple[int, int, int, int], tmp_path: Path
) -> None:
    frames = moving_square(2)
    frames[:, 0, :16] = 200  # a red bar at the top
    write_video(tmp_path / "clip.mp4", frames, 12)
    stored = read_video(tmp_path / "clip.mp4").frames[0]
    shown = read_video(with_matrix(tmp_path / "clip.mp4", *matrix)).frames[0]
    image = Image.fromarray(stored.permute(1, 2, 0).numpy())
    turn = TURNS[matrix]
    expected = np.array(image if turn is None else image.transpose(turn))
    assert np.array_equal(shown.permute(1, 2, 0).numpy(), expected)


def write_segment(path: Path) -> None:
    with av.open(str(path), mode="w") as container:
        stream: Any = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        picture = np.zeros((64, 64, 3), np.uint8)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


LISTS = {
    "list.ffconcat": "ffconcat version 1.0\nfile private/clip.ts\n",
    "list.mp4": "ffconcat version 1.0\nfile private/clip.ts\n",
    "list.m3u8": (
        "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:2\n#EXTINF:1.0,\nprivate/clip.ts\n"
        "#EXT-X-ENDLIST\n"
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_playlist_opens_no_other_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    write_segment(tmp_path / "private" / "clip.ts")
    assert len(read_video(tmp_path / "private" / "clip.ts").frames) == 1
    (tmp_path / name).write_text(LISTS[name])
    with av.open(str(tmp_path / name)) as opened:  # FFmpeg by itself follows the list
        assert next(opened.decode(video=0)).width == 64
    with pytest.raises(ValueError, match=r"list\.\w+: cannot be read as a video .*playlist"):
        read_video(tmp_path / name)


def test_a_file_named_like_a_pattern_opens_no_other_file(tmp_path: Path) -> None:
    for name in ("%d.png", "1.png", "2.png"):
        Image.new("RGB", (32, 32), (0, 0, 255 if name == "%d.png" else 0)).save(tmp_path / name)
    (frame,) = read_video(tmp_path / "%d.png").frames
    assert frame[2].min() == 255


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "mov", "ts", "webm", "flv", "gif"])
def test_the_usual_formats_are_read(suffix: str, tmp_path: Path) -> None:
    codec = {"webm": "libvpx", "flv": "flv", "gif": "gif", "ts": "mpeg2video"}.get(suffix, "mpeg4")
    with av.open(str(tmp_path / f"clip.{suffix}"), mode="w") as container:
        stream: Any = container.add_stream(codec, rate=25)
        stream.width, stream.height = 96, 64
        stream.pix_fmt = "rgb8" if suffix == "gif" else "yuv420p"
        for picture in moving_square(12).permute(0, 2, 3, 1).numpy():
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(stream.encode(frame.reformat(format=stream.pix_fmt)))
        container.mux(stream.encode())
    assert len(read_video(tmp_path / f"clip.{suffix}").frames) == 12


def test_truncated_video_is_refused(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", moving_square(30), 12)
    whole = (tmp_path / "clip.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.mp4: cannot be read as a video"):
        read_video(tmp_path / "cut.mp4")


def test_text_file_is_not_a_video(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_text("not a film")
    with pytest.raises(ValueError, match="cannot be read as a video"):
        read_video(tmp_path / "clip.mp4")


def test_writing_frames_of_odd_size_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="even H and W"):
        write_video(tmp_path / "clip.mp4", moving_square(2)[:, :, :63], 8)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 1, 8, 8), (0, 3, 8, 8)])
def test_writing_frames_of_another_layout_leaves_no_file(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"\[F, 3, H, W\]") as caught:
        write_video(tmp_path / "clip.mp4", torch.zeros(shape, dtype=torch.uint8), 8)
    assert str(shape) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_path_of_a_video_is_taken_as_the_video(tmp_path: Path) -> None:
    write_video(path := tmp_path / "clip.mp4", moving_square(6), 12)
    wanted = QWEN3(videos=[read_video(path)]).pixel_values
    for form in (path, str(path), [path], [str(path)]):
        assert torch.equal(QWEN3(videos=form).pixel_values, wanted)
