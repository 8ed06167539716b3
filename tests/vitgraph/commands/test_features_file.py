"""The features file: read back as it was written, and refused where it is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from encoders.contract import OUTPUT_FIELDS, EncoderOutput
from vitgraph.features import (
    FeatureFormat,
    Features,
    Item,
    load_features,
    save_features,
    writing_features,
)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def some_features() -> Features:
    items = [
        Item("a.jpg", "image", (40, 30), 1, (1, 4, 6), None),
        Item("b.mp4", "video", (96, 64), 7, (4, 4, 6), (2, 1, True)),
    ]
    outputs = [
        EncoderOutput(noise(24, 8), noise(6, 16), (noise(6, 16), noise(6, 16) + 1)),
        EncoderOutput(noise(96, 8).bfloat16(), noise(24, 16), (), {"prefix": noise(4, 5, 8)}),
    ]
    return Features("owner/name", None, "Qwen3VLEncoder", items, outputs)


def test_features_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written = some_features()
    save_features(tmp_path / "f.safetensors", written)
    read = load_features(tmp_path / "f.safetensors")
    assert read[:4] == written[:4]
    for one, other in zip(read.outputs, written.outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("field", OUTPUT_FIELDS)
def test_a_field_left_out_is_read_back_as_left_out(field: str, tmp_path: Path) -> None:
    whole = some_features()
    written = whole._replace(outputs=[one._replace(**{field: None}) for one in whole.outputs])
    save_features(tmp_path / "f.safetensors", written)
    read = load_features(tmp_path / "f.safetensors")
    absent = () if field == "deepstack_features" else None  # the file cannot tell () from None
    for one, other in zip(read.outputs, whole.outputs, strict=True):
        torch.testing.assert_close(one, other._replace(**{field: absent}), rtol=0, atol=0)


POOLED = {"repo": "owner/name", "revision": None, "encoder": "X", "pool": "mean"}
ITEM = some_features().items[0]._asdict()


@pytest.mark.parametrize(
    "about",
    [
        "no JSON",
        "[]",
        "{}",
        '{"items": [{"name": "a"}]}',
        '{"items": [[1]]}',
        json.dumps({**POOLED, "items": [ITEM]}),
    ],
)
def test_features_file_with_a_damaged_header_is_refused_by_name(tmp_path: Path, about: str) -> None:
    path = tmp_path / "f.safetensors"
    save_file({"x": torch.zeros(1)}, path, {"vitgraph": about})
    with pytest.raises(ValueError, match=f"{path}: .*damaged"):
        load_features(path)


def test_failed_write_leaves_the_old_features_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "f.safetensors"
    path.write_bytes(b"old")
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match="the disk is full"):
        save_features(path, some_features())
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"f.safetensors": b"old"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_features_of_mixed_dtypes_and_odd_sizes_are_aligned(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    outputs = [
        EncoderOutput(noise(rows, 3).to(dtype), noise(rows, 5).bfloat16(), (noise(rows, 1),))
        for rows in (1, 3, 0, 7)
    ]
    items = [Item("a.jpg", "image", (40, 30), 1, (1, 4, 6), None)] * len(outputs)
    written = Features("owner/name", "c0ffee", "Qwen3VLEncoder", items, outputs)
    save_features(tmp_path / "f.safetensors", written)
    read = load_features(tmp_path / "f.safetensors")
    assert read[:4] == written[:4]
    for one, other in zip(read.outputs, outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_file_of_another_kind_is_not_read_as_features(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="not a features file"):
        load_features(tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_text("hello, this is no header")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_features(tmp_path / "y.safetensors")


def test_a_new_infinity_is_refused_beside_an_old_one(tmp_path: Path) -> None:
    path, item = tmp_path / "f.safetensors", some_features().items[0]
    vector, half = torch.tensor([float("inf"), 1e6]), FeatureFormat("mean", False, torch.float16)
    with (
        pytest.raises(ValueError, match=r"1e\+06, and float16 ends at 65504"),
        writing_features(path, "owner/name", None, "X", half) as add,
    ):
        add(item, vector)
    wide, bfloat16 = torch.tensor([1e39], dtype=torch.float64), half._replace(dtype=torch.bfloat16)
    with (
        pytest.raises(ValueError, match="and bfloat16 ends at"),
        writing_features(path, "owner/name", None, "X", bfloat16) as add,
    ):
        add(item, wide)


def test_features_that_could_not_be_read_are_not_written(tmp_path: Path) -> None:
    whole, path = some_features(), tmp_path / "f.safetensors"
    vectors = [noise(4), noise(4)]
    for wrong in (
        whole._replace(pool="mean"),
        whole._replace(vectors=vectors),
        whole._replace(pool="mean", outputs=[], vectors=vectors[:1]),
    ):
        with pytest.raises(ValueError, match=r"vectors for 2 items .*: pass one \w+ per item"):
            save_features(path, wrong)
    assert not path.exists()
