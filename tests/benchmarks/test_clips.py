"""The benchmark of video decoders reads every frame of a clip by each decoder there is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import av
import pytest
import torch
from torch import Tensor

from benchmarks import clips


def test_decoders_of_clips_yield_the_same_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codecs = [name for name, row in clips.CODECS.items() if row[1] in av.codecs_available]
    path = tmp_path / "clips.json"
    command = ["--size", "128x96", "--repeats", "1", "--seconds", "1", "--codecs", *codecs]
    clips.main([*command, "--json", str(path)])
    rows = json.loads(path.read_text())["clips"]
    assert [row["codec"] for row in rows[::2]] == codecs
    for row in rows:
        assert set(row["decoders"]) == set(clips.readers())
        assert row["decoders"]["read_video"]["largest"] == 0
        assert row["decoders"]["read_video"]["seconds"] > 0
    capsys.readouterr()
    clips.main(["--table", str(path)])
    assert len(capsys.readouterr().out.splitlines()) == 4 + 2 * len(codecs)


def test_every_frame_of_a_clip_is_read_once_and_the_first_is_its_key(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    clips.write_clip(path, "H.264", 1, "128x96")
    with av.open(str(path)) as container:
        keys = [packet.is_keyframe for packet in container.demux(video=0) if packet.size]
    assert keys == [True] + [False] * 29
    one, other = clips.by_read_video(path, range(30)), clips.by_one_pass(path, range(30))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_decoder_that_fails_has_its_error_in_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, indices: Sequence[int]) -> Iterator[Tensor]:
        raise RuntimeError("no such codec\nand more")

    path = tmp_path / "clip.mp4"
    clips.write_clip(path, "H.264", 1, "128x96")
    monkeypatch.setattr(clips, "readers", lambda: {"PyAV": clips.by_one_pass, "broken": fail})
    for row in clips.measure(path, 30, 1):
        assert row["decoders"]["broken"] == {"error": "no such codec"}
        assert clips.cell(row["decoders"]["broken"], wall=True) == "-"
        assert row["decoders"]["PyAV"]["CPU seconds"] > 0
