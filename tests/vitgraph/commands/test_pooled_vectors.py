"""``vitgraph encode --pool``: vectors in the features file, its dtype, calls in parts, the bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from encoders import EncoderOutput, InternViT
from tests.support.comparisons import assert_all_equal
from tests.support.photographs import hopper
from vitgraph.cli import main
from vitgraph.features import (
    FeatureFormat,
    Features,
    Item,
    load_features,
    save_features,
    writing_features,
)
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

Encode = Callable[..., str]


def seeded(folder: Path, family: str) -> Path:
    return write_seeded_checkpoint(folder, family, width=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeded(tmp_path_factory.mktemp("qwen"), "qwen3_vl")


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of InternViT, which cuts images into tiles and has a class token."""
    return seeded(tmp_path_factory.mktemp("tiles"), "intern_vit_300m")


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, width in zip(paths, (100, 200), strict=True):
        hopper().resize((width, 100)).save(path)
    return paths


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "f.safetensors"


@pytest.fixture
def encode(
    checkpoint: Path, photos: list[Path], out: Path, capsys: pytest.CaptureFixture[str]
) -> Encode:
    """Encode the photographs; returns what is printed, or the one line of an error."""

    def run(*arguments: str, repo: Path = checkpoint) -> str:
        command = ["encode", repo, *photos, "--out", out, *arguments]
        code = main([str(part) for part in command])
        said = capsys.readouterr()
        return said.err.removeprefix("vitgraph: error: ") if code else said.out

    return run


@pytest.mark.parametrize(("how", "normalize"), [("mean", True), ("max", False)])
def test_vectors_are_those_of_embed_and_need_safetensors_alone(
    encode: Encode, checkpoint: Path, photos: list[Path], out: Path, how: str, normalize: bool
) -> None:
    table = encode("--pool", how, *["--normalize"] * normalize)
    encoder = load_encoder(checkpoint, progress=False)
    tensors = load_file(out)
    wanted = [encoder.embed(path, pool=how, normalize=normalize)[0] for path in photos]  # type: ignore[arg-type]
    assert sorted(tensors) == [f"item{n}.{name}" for n in (0, 1) for name in ("grid_thw", "vector")]
    for number, vector in enumerate(wanted):
        assert tensors[f"item{number}.vector"].dtype == torch.float32
        assert torch.equal(tensors[f"item{number}.vector"], vector)
    header, _, row, *_ = table.splitlines()
    assert header.split()[4] == "vector"
    assert f"({encoder.out_features},)" in row
    features = load_features(out)
    assert (features.pool, features.normalize, features.outputs) == (how, normalize, [])
    assert_all_equal(features.vectors, wanted)
    assert [item.name for item in features.items] == [str(path) for path in photos]


def test_the_class_token_is_taken_where_there_is_one(
    encode: Encode, tiles: Path, photos: list[Path], out: Path
) -> None:
    said = encode("--pool", "cls")
    assert said == "pool='cls': this encoder has no class token; take pool='mean' or 'max'\n"
    assert not out.exists()
    encode("--pool", "cls", "--max-tiles", "1", repo=tiles)
    wanted = load_encoder(tiles, progress=False).embed(photos, pool="cls", max_tiles=1)
    assert torch.allclose(torch.stack(load_features(out).vectors), wanted)


@pytest.mark.parametrize("graph", [False, True])
def test_the_head_of_the_checkpoint_makes_the_vectors(
    encode: Encode, tmp_path: Path, photos: list[Path], out: Path, graph: bool
) -> None:
    repo = seeded(tmp_path / "siglip", "siglip")
    encode("--pool", "head", "--dtype", "float32", *["--graph"] * graph, repo=repo)
    wanted = load_encoder(repo, dtype="float32", progress=False).embed(photos, pool="head")
    torch.testing.assert_close(torch.stack(load_features(out).vectors), wanted)


@pytest.mark.parametrize(
    ("name", "how"),
    [("float32", "none"), ("float16", "none"), ("stored", "none"), ("stored", "mean")],
)
def test_the_file_has_the_dtype_that_is_asked_for(
    encode: Encode, out: Path, name: str, how: str
) -> None:
    encode("--dtype", "bfloat16", "--out-dtype", name, "--pool", how)
    own = torch.bfloat16 if how == "none" else torch.float32
    wanted = {"float32": torch.float32, "float16": torch.float16, "stored": own}[name]
    tensors = load_file(out)
    assert {x.dtype for key, x in tensors.items() if "grid" not in key} == {wanted}
    with safe_open(str(out), "pt") as file:
        about = json.loads(file.metadata()["vitgraph"])
    assert (about["pool"], about["normalize"]) == (how, False)


def test_items_above_the_limit_of_a_call_run_in_parts(
    encode: Encode, tiles: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--dtype", "float32", "--max-tiles", "2")
    encode(*options, repo=tiles)
    whole, tokens = load_features(out).outputs, []
    forward = InternViT.forward

    def counted(self: InternViT, *arguments: Any, **named: Any) -> EncoderOutput:
        output = forward(self, *arguments, **named)
        assert output.pooler_output is not None
        tokens.append(len(output.pooler_output))
        return output

    monkeypatch.setattr(InternViT, "forward", counted)
    encode(*options, "--max-tokens-per-call", "300", repo=tiles)
    assert max(tokens) <= 300 < max(len(output.pooler_output) for output in whole)
    for one, other in zip(load_features(out).outputs, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--normalize"],
            "--normalize: needs one vector per item; add --pool mean, max, cls or h",
        ),
        (["--max-tokens-per-call", "0"], "--max-tokens-per-call 0: must be positive"),
        (["--pool", "sum"], "argument --pool: invalid choice: 'sum'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    encode: Encode, arguments: list[str], message: str
) -> None:
    assert encode(*arguments).startswith(message)


def test_graphs_give_the_same_vectors(encode: Encode, out: Path) -> None:
    encode("--pool", "mean", "--dtype", "float32")
    eager = load_features(out).vectors
    encode("--pool", "mean", "--dtype", "float32", "--graph", "--budgets", "64")
    for one, other in zip(load_features(out).vectors, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_terminal_is_shown_a_bar(
    encode: Encode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", shown.append)
    encode()
    assert not shown
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    encode("--no-progress")
    assert not shown
    encode()
    assert "encode: 100%" in "".join(shown)
    assert "2/2" in "".join(shown)


def test_a_value_that_float16_cannot_hold_is_refused(out: Path) -> None:
    item = Item("a.png", "image", (2, 2), 1, (1, 2, 2), None)
    large = Features("o/n", None, "X", [item], [], "max", False, [torch.tensor([70000.0])])
    save_features(out, large)
    assert float(load_features(out).vectors[0]) == 70000
    file_format = FeatureFormat("max", dtype=torch.float16)
    with (
        pytest.raises(ValueError, match=r"a\.png: has features of up to 70000, and float16 ends"),
        writing_features(out, "o/n", None, "X", file_format) as write,
    ):
        write(item, large.vectors[0])
