"""Values that would crash, hang or give NaN later are refused when the checkpoint is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from encoders.inputs.sizes import MOST_TILES, _tile_grids, best_tiling
from tests.support.hub.checkpoints import INDEX, edit_config, edit_tensors, read_json
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder
from weights.errors import legible
from weights.layouts import MOST_IN_TOWER

NAN, INF = float("nan"), float("inf")
PREPROCESSOR = "preprocessor_config.json"


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "hf", "intern_vit_hf", width=64)


def edit_preprocessor(folder: Path, **fields: Any) -> None:
    path = folder / PREPROCESSOR
    path.write_text(json.dumps(read_json(path) | fields))


def counted(monkeypatch: pytest.MonkeyPatch, function: str) -> list[Any]:
    """Return a list that grows by one entry for each call of the function of this name."""
    calls: list[Any] = []
    original = resolve_name(function)

    def call(*arguments: Any, **keywords: Any) -> Any:
        calls.append(None)
        return original(*arguments, **keywords)

    monkeypatch.setattr(function, call)
    return calls


@pytest.mark.parametrize("value", [0.5, -0.0, 1e-30, True, "-1", [-1]])
def test_a_feature_layer_must_be_an_integer(chat: Path, converted: Path, value: Any) -> None:
    for folder, name in ((chat, "select_layer"), (converted, "vision_feature_layer")):
        edit_config(folder, lambda config, name=name: config.update({name: value}))
        with pytest.raises(CheckpointError, match=rf"{name}=.* must be an integer"):
            load_encoder(folder)


@pytest.mark.parametrize("value", [NAN, INF, -1, 0, 1e-30, 10**400, 2, "1e-6", True])
def test_an_epsilon_must_be_small_and_positive(chat: Path, value: Any) -> None:
    edit_config(chat, lambda config: config["vision_config"].update(layer_norm_eps=value))
    with pytest.raises(CheckpointError, match=r"layer_norm_eps=.* must be a number from 1e-12 to"):
        load_encoder(chat)


@pytest.mark.parametrize("family", ["intern_vit_300m", "intern_vit_hf", "qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image_mean", NAN),
        ("image_mean", INF),
        ("image_mean", 1e30),
        ("image_mean", [0.5, NAN, 0.5]),
        ("image_mean", 10**400),
        ("image_std", 0),
        ("image_std", 1e-30),
        ("image_std", NAN),
        ("image_std", INF),
        ("image_std", [0.5, 0.5, 0.0]),
    ],
)
def test_means_and_deviations_must_be_those_of_pictures(
    tmp_path: Path, family: str, field: str, value: Any
) -> None:
    folder = write_seeded_checkpoint(tmp_path, family, width=64)
    edit_preprocessor(folder, **{field: value})
    with pytest.raises(CheckpointError, match=rf"{field}=.* must be three numbers from") as info:
        load_encoder(folder)
    assert str(info.value).count(str(folder)) == 1


@pytest.mark.parametrize("value", [1025, 10**9, 10**18, 10**30])
def test_an_image_has_at_most_1024_tiles(chat: Path, converted: Path, value: int) -> None:
    edit_preprocessor(converted, max_patches=value)
    with pytest.raises(CheckpointError, match=rf"max_patches={value} must be at most {MOST_TILES}"):
        load_encoder(converted)
    edit_config(chat, lambda config: config.update(max_dynamic_patch=min(value, 1 << 20)))
    with pytest.raises(CheckpointError, match=rf"max_tiles=.*must be from 1 to {MOST_TILES}"):
        load_encoder(chat)
    with pytest.raises(ValueError, match=rf"max_tiles={value}: at most {MOST_TILES}"):
        best_tiling(640, 480, 1, value, 448)


def test_the_most_tiles_there_may_be_are_chosen_among_few_grids(converted: Path) -> None:
    edit_preprocessor(converted, max_patches=MOST_TILES)
    encoder = load_encoder(converted)
    assert best_tiling(4000, 3000, 1, MOST_TILES, 448) is not None
    assert len(_tile_grids(1, MOST_TILES, MOST_TILES)) < 8 * MOST_TILES
    assert encoder.preprocessor.max_tiles == MOST_TILES


@pytest.mark.parametrize("load", [load_encoder, inspect_checkpoint])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "an empty name: pass owner/name"),
        ("a/" + "b" * 5000, "neither a path nor a repo id"),
        ("a/b\0c", "a repo id"),
    ],
)
def test_a_name_that_nothing_can_have_is_refused(
    load: Callable[[str], object], name: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as info:
        load(name)
    assert len(str(info.value)) < 600


@pytest.mark.parametrize("name", ["x" * 300, "é" * 200, "x" * 5000])
def test_a_path_of_over_255_bytes_is_a_value_error(qwen3: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="neither a path nor a repo id"):
        load_encoder(tmp_path / name)
    with pytest.raises(ValueError, match=r"xx|éé"):
        load_encoder(qwen3, subfolder=name)
    with pytest.raises(ValueError, match="pass another folder"):
        extract_encoder(qwen3, tmp_path / name)
    with pytest.raises(ValueError, match="pass another folder"):
        load_encoder("owner/name", cache_dir=tmp_path / name, local_files_only=True)


def test_a_path_has_no_revisions(qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"revision='v1', but this is a path on this disk"):
        load_encoder(qwen3, revision="v1")
    with pytest.raises(CheckpointError, match="has no revisions"):
        extract_encoder(qwen3, tmp_path / "out", revision="main")


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_opened(
    tmp_path: Path, device: str
) -> None:
    with pytest.raises(ValueError, match=f"device='{device}'") as info:
        load_encoder(tmp_path / "nothing here", device=device)
    assert not isinstance(info.value, CheckpointError)
    assert "\n" not in str(info.value)


def test_a_shard_name_of_over_255_bytes_is_refused(qwen3: Path) -> None:
    index = read_json(qwen3 / INDEX)
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "é" * 120 + "x" * 20 + ".safetensors"
    (qwen3 / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no file system allows names over 255 bytes"):
        load_encoder(qwen3)


def test_missing_shards_are_named_with_the_index_that_names_them(qwen3: Path) -> None:
    for path in qwen3.glob("model-*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"model-00001.*, model-00002.*, which its index nam"):
        load_encoder(qwen3)


def test_a_block_without_a_number_is_left_over_whatever_the_config_says(qwen3: Path) -> None:
    """It was read as the depth, and the config blamed for it."""
    edit_config(qwen3, lambda config: config["vision_config"].pop("depth"))
    for word in ("x", "999999999", "²", "9" * 5000):
        name = f"model.visual.blocks.{word}.norm1.weight"
        edit_tensors(qwen3, lambda tensors, name=name: tensors.update({name: torch.zeros(1)}))
        with pytest.raises(CheckpointError, match=r"unexpected \(1\): '?model.visual.blocks"):
            load_encoder(qwen3)
        edit_tensors(qwen3, lambda tensors, name=name: tensors.pop(name))
    assert load_encoder(qwen3).config.depth == 2


def test_messages_stay_short_and_can_be_printed(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = counted(monkeypatch, "weights.errors.get_close_matches")
    index = read_json(qwen3 / INDEX)
    file = next(iter(index["weight_map"].values()))
    for word in ("ab." * 3_000_000, "\ud800", "\x1b[2J"):
        name = f"model.visual.{word}"
        changed = {"weight_map": {**index["weight_map"], name: file}}
        (qwen3 / INDEX).write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=r"the index and .* disagree") as info:
            load_encoder(qwen3)
        assert compared == []
        message = str(info.value)
        assert len(message) < 1000
        assert message.encode()
        assert "\x1b" not in message


@pytest.mark.parametrize("where", ["index", pytest.param("header", marks=pytest.mark.slow)])
def test_names_without_end_are_not_matched_one_by_one(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    index = read_json(qwen3 / INDEX)
    file = next(iter(index["weight_map"].values()))
    names = [f"model.visual.blocks.{number}.norm1.weight" for number in range(100_000)]
    if where == "index":
        changed = {"weight_map": {**index["weight_map"], **dict.fromkeys(names, file)}}
        (qwen3 / INDEX).write_text(json.dumps(changed))
    else:
        raw = (qwen3 / file).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        empty = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
        text = json.dumps(dict.fromkeys(names, empty) | json.loads(raw[8 : 8 + length])).encode()
        (qwen3 / file).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    known = len(index["weight_map"])
    matched = counted(monkeypatch, "weights.layouts.Layout.is_ignored")
    with pytest.raises(CheckpointError, match=r"over 20000 tensors under 'model.visual.'"):
        load_encoder(qwen3)
    assert len(matched) <= MOST_IN_TOWER + 2 * known  # by the index, then by the headers


def test_long_names_keep_both_ends() -> None:
    short = legible("a" * 300 + "z" * 100)
    assert short.startswith("a" * 150)
    assert short.endswith("z" * 50)
    assert "(200 more characters)" in short
    assert len(str(CheckpointError("x" * 10**7))) < 9000
    assert str(CheckpointError("\ud800")) == "\\ud800"
