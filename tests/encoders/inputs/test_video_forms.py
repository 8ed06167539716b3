"""Clips as bytes, open files, rows of a table, and the decoders of torchcodec and decord."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from encoders.inputs import Video, read_video
from encoders.inputs.clips import read_item
from encoders.inputs.patches import PatchPreprocessor
from tests.support.photographs import panning_clip
from vitgraph.video import write_video

QWEN3 = PatchPreprocessor.published("qwen3_vl", patch_size=16, temporal_patch_size=2, merge_size=2)


class ThreeMethods:
    """An open file with the methods of ``Readable`` and ``tell`` only."""

    def __init__(self, data: bytes) -> None:
        self.read, self.seek, self.tell = (file := io.BytesIO(data)).read, file.seek, file.tell


@pytest.fixture
def film(tmp_path: Path) -> Path:
    frames = torch.from_numpy(panning_clip(8, 64, 96)).permute(0, 3, 1, 2)
    write_video(tmp_path / "clip.mp4", frames, 4)
    return tmp_path / "clip.mp4"


def test_clips_are_read_from_memory_and_files_as_images_are(film: Path) -> None:
    data, wanted = film.read_bytes(), QWEN3(videos=[read_video(film)], fps=2).pixel_values
    with film.open("rb") as file:
        file.seek(10)
        forms = [data, bytearray(data), memoryview(data), io.BytesIO(data), ThreeMethods(data)]
        forms += [file, {"bytes": data, "path": None}, {"bytes": None, "path": str(film)}]
        for form in forms:
            assert torch.equal(QWEN3(videos=form, fps=2).pixel_values, wanted)
            assert torch.equal(QWEN3(videos=[form], fps=2).pixel_values, wanted)


def test_a_clip_of_bytes_can_be_pickled(film: Path) -> None:
    clip = read_video(film.read_bytes())
    copied = pickle.loads(pickle.dumps(clip))
    for ours, theirs in zip(copied.frames, clip.frames, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (b"", "video 0: the bytes of a video: cannot be read as a video"),
        (b"not a film", "video 0: the bytes of a video: cannot be read as a video"),
        ({"pixels": 1}, r"video 0: is a dict of \['pixels'\]: a video of the datasets package"),
        ({"bytes": None, "path": "gone.mp4"}, r"video 0: gone\.mp4: there is no such file"),
    ],
)
def test_bytes_and_rows_that_are_no_clip_are_named(clip: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        QWEN3(videos=[clip])


def test_an_object_that_is_no_file_is_refused() -> None:
    with pytest.raises(ValueError, match="is of type int: pass the path of a video file, its"):
        read_video(3)  # type: ignore[arg-type]


@dataclass
class Torchcodec:
    """What is public of torchcodec's VideoDecoder, as far as clips need it."""

    clip: np.ndarray[Any, Any]
    order: str = "NCHW"

    @property
    def metadata(self) -> SimpleNamespace:
        return SimpleNamespace(average_fps=4.0, num_frames=len(self.clip))

    def __len__(self) -> int:
        return len(self.clip)

    def get_frame_at(self, index: int) -> SimpleNamespace:
        frame = torch.from_numpy(self.clip[index])
        return SimpleNamespace(data=frame.permute(2, 0, 1) if self.order == "NCHW" else frame)


@dataclass
class Decord:
    """What is public of decord's VideoReader; ``bridge`` converts a frame as its bridges do."""

    clip: np.ndarray[Any, Any]
    bridge: Any

    def __len__(self) -> int:
        return len(self.clip)

    def __getitem__(self, index: int) -> Any:
        return self.bridge(self.clip[index])

    def get_avg_fps(self) -> float:
        return 4.0


CLIP = panning_clip(8, 64, 96)
DECODERS = {
    "torchcodec": Torchcodec(CLIP),
    "torchcodec, channels last": Torchcodec(CLIP, "NHWC"),
    "decord": Decord(CLIP, lambda frame: SimpleNamespace(asnumpy=lambda: frame)),
    "decord with torch": Decord(CLIP, torch.from_numpy),
    "decord with numpy": Decord(CLIP, np.asarray),
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_a_clip_of_its_own_rate(name: str) -> None:
    decoder: Any = DECODERS[name]
    wanted = QWEN3(videos=[Video(CLIP, 4.0)], fps=2)
    assert wanted.grid_thw[0, 0] == 2
    for form in (decoder, [decoder]):
        assert torch.equal(QWEN3(videos=form, fps=2).pixel_values, wanted.pixel_values)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_a_clip_in_a_stream(name: str) -> None:
    decoder = DECODERS[name]
    assert read_item(decoder) == ([], [decoder])
    assert read_item({"video": decoder}) == ([], [decoder])
    assert read_item({"video": {"bytes": b"x"}}) == ([], [{"bytes": b"x"}])
