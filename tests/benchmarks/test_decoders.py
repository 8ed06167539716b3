"""The benchmark of decoders runs without a GPU, where PIL stands in for nvImageCodec."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import decoders
from encoders.inputs.gpu_decoding import DeviceImage, GpuDecoder
from encoders.inputs.image_files import open_image
from encoders.inputs.intake import to_rgb
from tests.oracles import BY_NAME, build_encoder


class OneLevelOff(GpuDecoder):
    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def decode_files(self, images: object) -> list[object]:
        pixels = [to_rgb(open_image(data)).permute(1, 2, 0) for data in images]  # type: ignore[attr-defined]
        return [DeviceImage(torch.where(one < 255, one + 1, one)) for one in pixels]


def test_rates_are_by_size_threads_and_decoder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["decoders", "cpu", "--sizes", "40x30", "--threads", "1", "2", "--seconds", "0.02"]
    monkeypatch.setattr(sys, "argv", command)
    decoders.main()
    found = json.loads(capsys.readouterr().out)["images per second"]
    assert all(
        found["40x30"][threads][name] > 0 for threads in "12" for name in ("PIL", "encoders")
    )


def test_differences_from_pil_are_in_levels_and_in_features() -> None:
    encoder = build_encoder(BY_NAME["qwen3_vl"], BY_NAME["qwen3_vl"].tiny)
    found = decoders.differences(OneLevelOff(), encoder, decoders.jpegs([(64, 48), (40, 40)]))
    assert found["largest difference in levels"] == 1
    assert found["decoded by the decoder"] == 2
    assert 0 < found["relative L2 of features"]["median"] < 0.5
    about = {"machine": {"gpu": "a GPU"}, "tower": "a tower"}
    assert "by at most 1 of 255 levels" in decoders.sentence({**about, **found})
