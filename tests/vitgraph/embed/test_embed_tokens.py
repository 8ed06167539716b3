"""``vitgraph embed --pool none``: all tokens of each image, in every format."""

from __future__ import annotations

import csv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from encoders.base.vision_encoder import VisionEncoder
from tests.support.commands.embed_jobs import close
from tests.support.photographs import china, flower, hopper
from vitgraph.cli import main
from vitgraph.embedding.parquet_files import read_arrays, write_tokens
from vitgraph.features import load_embeddings
from vitgraph.seeded import write_seeded_checkpoint

KEYS = ["b.png", "c.png", "d.png"]
FIELDS = "pooler_output,last_hidden_state,deepstack_features"
NEEDS_PYARROW = pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")
FORMATS = ["npy", "safetensors", pytest.param("parquet", marks=NEEDS_PYARROW)]
Embed = Callable[..., int]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photographs of different sizes."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, (key, image) in enumerate(zip(KEYS, (china(), hopper(), flower()), strict=True)):
        image.resize((256 + 30 * number, 200)).save(folder / key)
    return folder


@pytest.mark.parametrize("format", FORMATS)
def test_whole_outputs_are_found_through_the_row_table(
    embed: Embed, photos: Path, tmp_path: Path, encoder: VisionEncoder, format: str
) -> None:
    chosen = ("--pool", "none", "--fields", FIELDS, "--format", format)
    assert embed(photos, "--shard-items", 2, *chosen) == 0
    found = {}
    for number in range(2):
        start = tmp_path / "out" / f"{number:05d}"
        if format == "npy":
            arrays = {
                path.name[6:-4]: np.load(path)
                for path in (tmp_path / "out").glob(f"{start.name}.*.npy")
            }
        elif format == "safetensors":
            arrays = load_file(f"{start}.safetensors")
        else:
            arrays = read_columns(Path(f"{start}.parquet"))
        for row in csv.DictReader(Path(f"{start}.csv").read_text().splitlines()):
            tokens = slice(int(row["offset"]), int(row["offset"]) + int(row["tokens"]))
            rows = slice(int(row["row_offset"]), int(row["row_offset"]) + int(row["rows"]))
            grid = [int(row[name]) for name in "thw"]
            hidden = arrays["last_hidden_state"][rows]
            deep = [arrays[name][tokens] for name in sorted(arrays) if "deepstack" in name]
            found[row["key"]] = grid, arrays["pooler_output"][tokens], hidden, deep
    assert list(found) == KEYS
    for key, (grid, tokens, hidden, deep) in found.items():
        (output,) = encoder.encode([photos / key])
        assert encoder.preprocess([photos / key]).grid_thw.tolist() == [grid]
        assert close(tokens, output.pooler_output)
        assert close(hidden, output.last_hidden_state)
        assert output.deepstack_features
        assert len(deep) == len(output.deepstack_features)
        assert all(close(a, b) for a, b in zip(deep, output.deepstack_features, strict=True))


def read_columns(path: Path) -> dict[str, Any]:
    """The columns of a parquet file with a row per item, as pyarrow alone reads them."""
    from pyarrow import parquet

    table = parquet.read_table(path).to_pydict()
    return {
        name: np.concatenate([np.asarray(item, np.float32) for item in column])
        for name, column in table.items()
        if isinstance(column[0], list)
    }


def test_a_row_of_a_parquet_file_is_an_item_for_every_reader(
    embed: Embed, photos: Path, tmp_path: Path, encoder: VisionEncoder
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pandas = pytest.importorskip("pandas")
    chosen = ("--pool", "none", "--fields", FIELDS, "--format", "parquet")
    assert embed(photos, *chosen, "--out-dtype", "float16") == 0
    path = tmp_path / "out" / "00000.parquet"
    assert parquet.ParquetFile(path).metadata.num_rows == len(KEYS)
    assert str(parquet.read_schema(path).field("pooler_output").type) == (
        "list<element: fixed_size_list<element: halffloat>[96]>"
    )
    table = pandas.read_parquet(path)
    assert list(table.key) == KEYS
    step = 2.0**-10  # of float16; a batch of other images may round its float32 sums otherwise
    for _, row in table.iterrows():
        (output,) = encoder.encode([photos / row.key])
        grid = encoder.preprocess([photos / row.key]).grid_thw[0].tolist()
        assert row[["t", "h", "w"]].tolist() == grid
        assert row.tokens == len(output.pooler_output)
        assert row.rows == len(output.last_hidden_state)
        wanted = {
            "pooler_output": output.pooler_output,
            "last_hidden_state": output.last_hidden_state,
            "deepstack.0": output.deepstack_features[0],
        }
        for name, features in wanted.items():
            np.testing.assert_allclose(
                np.stack(row[name]), features.half().numpy(), rtol=step, atol=1e-5
            )


def test_an_item_of_many_tokens_has_a_row_group_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    counts = {"pooler_output": [3, 0, 5], "last_hidden_state": [1, 0, 2]}
    arrays = {
        "pooler_output": np.arange(24, dtype=np.float16).reshape(8, 3),
        "last_hidden_state": np.arange(3 * 2 * 5, dtype=np.float32).reshape(3, 2, 5),
    }
    keys = ["a.png", "b\udcff.png", "c.png"]
    path = tmp_path / "one.parquet"
    monkeypatch.setattr("vitgraph.embedding.parquet_files._GROUP", 100)
    write_tokens(path, keys, ["image"] * 3, [(1, 2, 2)] * 3, arrays, counts)
    assert parquet.ParquetFile(path).num_row_groups == 3
    assert parquet.read_table(path, columns=["key"])["key"].to_pylist()[1] == r"b\udcff.png"
    found = read_arrays(path)
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())


def test_size_of_whole_outputs_is_estimated(
    embed: Embed, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed(photos, "--pool", "none") == 0
    said = capsys.readouterr().out
    size = sum(path.stat().st_size - 128 for path in (tmp_path / "out").glob("*.npy"))
    assert f"writes about {size / 1e3:,.1f} kB, by a sample of 3 images, of float32" in said


@pytest.mark.parametrize("format", FORMATS)
def test_whole_outputs_load_as_one_array_per_image(
    embed: Embed, photos: Path, tmp_path: Path, encoder: VisionEncoder, format: str
) -> None:
    (photos / "bad.jpg").write_bytes(b"x")
    chosen = ("--pool", "none", "--fields", FIELDS, "--format", format, "--shard-items", 2)
    assert embed(photos, *chosen) == 3
    for field in (None, "pooler_output", "last_hidden_state", "deepstack.0"):
        keys, items = load_embeddings(tmp_path / "out", field)
        assert keys == KEYS
        assert items.shape == (len(KEYS),)
        for key, found in zip(keys, items, strict=True):
            (output,) = encoder.encode([photos / key])
            wanted = {
                "last_hidden_state": output.last_hidden_state,
                "deepstack.0": output.deepstack_features[0],
            }.get(field, output.pooler_output)
            assert close(found, wanted)
    with pytest.raises(ValueError, match=r"field='tokens': .* holds .*pooler_output.*; name one"):
        load_embeddings(tmp_path / "out", "tokens")


def test_fields_of_which_the_encoder_has_none_are_refused(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = write_seeded_checkpoint(tmp_path / "other", "qwen2_5_vl", width=64)
    fields = ["--pool", "none", "--fields", "deepstack_features"]
    assert main(["embed", str(repo), str(photos), "--out", str(tmp_path / "out"), *fields]) == 2
    assert "has no DeepStack features; name another field" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
