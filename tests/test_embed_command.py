"""``vitgraph embed``: which files are read, what is written, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from encoders.vision_encoder import VisionEncoder
from photographs import china, flower, hopper
from vitgraph.cli import main
from vitgraph.embedding.parquet_files import read_arrays, write_tokens
from vitgraph.features import load_embeddings
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

KEYS = ["b/inner/one.jpg", "b/two.PNG", "c.jpg", "d.jpg"]
FIELDS = "pooler_output,last_hidden_state,deepstack_features"
Embed = Callable[..., int]


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeded_checkpoint(tmp_path_factory.mktemp("repo"), "qwen3_vl", width=64)


@pytest.fixture(scope="module")
def encoder(repo: Path) -> VisionEncoder:
    return load_encoder(repo, dtype=torch.float32, progress=False)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four photographs of 256x256 to 300x200 pixels, and files that are none."""
    folder = tmp_path / "photos"
    (folder / "b" / "inner").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    images = [china(), hopper(), flower(), china().rotate(90)]
    for key, image in zip(KEYS, images, strict=True):
        image.resize((256 + 10 * len(key), 200)).save(folder / key)
    for name in ("notes.txt", "b/._two.jpg", ".hidden/x.jpg", "data.npy"):
        (folder / name).write_bytes(b"no image")
    return folder


@pytest.fixture
def embed(repo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Embed:
    """Run the command with float32 weights; returns its exit code."""

    def run(source: object, *arguments: object, out: str = "out") -> int:
        command = ["embed", repo, source, "--out", tmp_path / out, "--dtype", "float32"]
        return main([str(each) for each in (*command, "--no-progress", *arguments)])

    return run


def close(one: Any, other: Any) -> bool:
    difference = np.linalg.norm(np.asarray(one, np.float64) - np.asarray(other, np.float64))
    return bool(difference <= 2e-6 * np.linalg.norm(np.asarray(other, np.float64)))


def test_a_folder_becomes_one_vector_per_image(
    embed: Embed, photos: Path, tmp_path: Path, encoder: VisionEncoder,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert embed(photos, "--shard-items", 3) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 files, ")
    assert "2 shards, 0 of them done\nwrites 4 vectors [96], about 1.5 kB of float32 to " in said
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == KEYS
    assert matrix.dtype == np.float32
    alone = [encoder.encode([photos / key], pool="mean")[0].numpy() for key in KEYS]
    assert close(matrix, np.stack(alone))
    # Without this package:
    parts = [np.load(path) for path in sorted((tmp_path / "out").glob("*.npy"))]
    assert [len(part) for part in parts] == [3, 1]
    assert np.array_equal(np.concatenate(parts), matrix)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "00000.csv").read_text())))
    assert [row["key"] for row in rows] == KEYS[:3]
    stats = json.loads((tmp_path / "out" / "00000_stats.json").read_text())
    assert (stats["items"], stats["rows"], stats["errors"]) == (3, 3, [])


@pytest.mark.parametrize("format", ["npy", "safetensors", "parquet"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_format_holds_the_same_vectors(
    embed: Embed, photos: Path, tmp_path: Path, encoder: VisionEncoder, format: str, dtype: str
) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    chosen = ("--format", format, "--out-dtype", dtype, "--normalize", "--pool", "max")
    assert embed(photos, "--shard-items", 2, *chosen) == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == KEYS
    assert matrix.dtype == np.dtype(dtype)
    alone = encoder.encode([photos / key for key in KEYS], pool="max", normalize=True)
    assert np.allclose(matrix, torch.stack(alone), atol=1e-6 if dtype == "float32" else 1e-3)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert f"00000.{format}" in names
    assert f"00001.{format}" in names


def test_parquet_without_pyarrow_says_what_to_install(
    embed: Embed, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert embed(photos, "--format", "parquet") == 2
    assert "'vitgraph[parquet]', or in a clone pip install '.[parquet]'" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["npy", "safetensors", "parquet"])
def test_whole_outputs_are_found_through_the_row_table(
    embed: Embed, photos: Path, tmp_path: Path, encoder: VisionEncoder, format: str
) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    chosen = ("--pool", "none", "--fields", FIELDS, "--format", format)
    assert embed(photos, "--shard-items", 3, *chosen) == 0
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
            assert np.array_equal(np.stack(row[name]), features.half().numpy())


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
    write_tokens(path, keys, [(1, 2, 2)] * 3, arrays, counts)
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
    assert f"writes about {size / 1e3:,.1f} kB, by a sample of 4 images, of float32" in said


@pytest.mark.parametrize("format", ["npy", "safetensors", "parquet"])
def test_whole_outputs_load_as_one_array_per_image(
    embed: Embed, photos: Path, tmp_path: Path, encoder: VisionEncoder, format: str
) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    (photos / "bad.jpg").write_bytes(b"x")
    chosen = ("--pool", "none", "--fields", FIELDS, "--format", format, "--shard-items", 3)
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


def test_loading_says_what_a_folder_has_not(embed: Embed, photos: Path, tmp_path: Path) -> None:
    assert embed(photos) == 0
    with pytest.raises(ValueError, match=r"field='pooler_output': .* holds one vector per item"):
        load_embeddings(tmp_path / "out", "pooler_output")
    with pytest.raises(ValueError, match=r"has no manifest.json"):
        load_embeddings(photos)


def test_graphs_may_be_asked_for_where_there_are_none(
    embed: Embed, photos: Path, tmp_path: Path
) -> None:
    assert embed(photos) == 0
    assert embed(photos, "--graph", out="graphed") == 0
    assert close(*(load_embeddings(tmp_path / name)[1] for name in ("graphed", "out")))


def test_an_unknown_option_points_to_the_help_of_the_command(
    embed: Embed, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed(photos, "--parts", "4") == 2
    error = capsys.readouterr().err
    assert "`vitgraph embed --help`" in error


# --- sources -----------------------------------------------------------------------------------


def test_a_pattern_names_files_below_its_fixed_folder(
    embed: Embed, photos: Path, tmp_path: Path
) -> None:
    assert embed(photos / "**" / "*.jpg") == 0
    assert load_embeddings(tmp_path / "out")[0] == ["b/inner/one.jpg", "c.jpg", "d.jpg"]


def test_a_list_keeps_its_order_and_is_relative_to_its_folder(
    embed: Embed, photos: Path, tmp_path: Path
) -> None:
    lines = ["d.jpg", "", "b/two.PNG", str(photos / "c.jpg"), "d.jpg"]
    (photos / "list.txt").write_text("\n".join(lines))
    assert embed(photos / "list.txt") == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == ["d.jpg", "b/two.PNG", "c.jpg", "d.jpg"]
    assert np.array_equal(matrix[0], matrix[3])


def test_a_dash_reads_paths_from_standard_input(
    embed: Embed, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos)
    monkeypatch.setattr("sys.stdin", io.StringIO("c.jpg\nb/two.PNG\n"))
    assert embed("-") == 0
    assert load_embeddings(tmp_path / "out")[0] == ["c.jpg", "b/two.PNG"]


@pytest.mark.parametrize("format", ["npy", "safetensors", "parquet"])
@pytest.mark.parametrize("name", ['comma, and "quotes".jpg', "line\nbreak.jpg", "b\udcff.jpg"])
def test_odd_file_names_come_back_as_they_are(
    embed: Embed, tmp_path: Path, name: str, format: str
) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    folder = tmp_path / "odd"
    folder.mkdir()
    with open(folder / name, "wb") as file:
        hopper().resize((64, 64)).save(file, "JPEG")
    (folder / "bad.jpg").write_bytes(b"x")
    assert embed(folder, "--format", format) == 3
    assert load_embeddings(tmp_path / "out")[0] == [name]


# --- errors ------------------------------------------------------------------------------------


def test_bad_files_go_into_a_table_and_the_exit_code_is_3(
    embed: Embed, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "c.jpg").write_bytes((photos / "c.jpg").read_bytes()[:900])
    (photos / "a.jpg").write_text("no image")
    assert embed(photos, "--shard-items", 2) == 3
    assert "2 files could not be encoded" in capsys.readouterr().out
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == ["b/inner/one.jpg", "b/two.PNG", "d.jpg"]
    assert len(matrix) == 3
    with (tmp_path / "out" / "errors.csv").open() as file:
        table = list(csv.reader(file))
    assert [row[0] for row in table] == ["key", "a.jpg", "c.jpg"]
    assert "cannot be read as an image" in table[2][1]


@pytest.mark.parametrize("format", ["npy", "safetensors", "parquet"])
def test_a_source_without_a_readable_image_gives_an_empty_matrix(
    embed: Embed, tmp_path: Path, format: str
) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "list.txt").write_text("missing.jpg\n")
    assert embed(tmp_path / "list.txt", "--format", format) == 3
    keys, matrix = load_embeddings(tmp_path / "out")
    assert (keys, matrix.shape) == ([], (0, 96))
    none = ("--pool", "none", "--fields", FIELDS, "--format", format)
    assert embed(tmp_path / "list.txt", *none, out="none") == 3
    assert main(["embed", "--verify", str(tmp_path / "none")]) == 0
    keys, items = load_embeddings(tmp_path / "none", "last_hidden_state")
    assert (keys, items.shape) == ([], (0,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shard-items", 0), "--shard-items 0: must be at least 1"),
        (("--fields", "pooler_output"), "names what --pool none writes"),
        (("--pool", "none", "--fields", "tokens"), "'tokens' is none of pooler_output, "),
        (("--pool", "none", "--normalize"), "needs one vector per item"),
        (("--pool", "cls"), "has no class token"),
        (("--max-tiles", 3), "a Qwen tower has no tiles"),
        (("--max-pixels", 5000), "min_pixels=65536 is over max_pixels=5000"),
        (("--batch-tokens", 0), "batch_tokens=0: must be a positive integer"),
        (("--dtype", "float17"), "--dtype float17: must be one of"),
    ],
)
def test_impossible_arguments_leave_nothing_behind(
    embed: Embed, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    arguments: tuple[object, ...], message: str,
) -> None:  # fmt: skip
    assert embed(photos, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_empty_source_and_a_used_folder_are_refused(
    embed: Embed, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (photos / "*.bmp", tmp_path / "nowhere"):
        assert embed(source) == 2
        assert "names no image; give a folder with images" in capsys.readouterr().err
    assert embed(photos, out="photos") == 2
    assert "holds files, and no manifest of an embedding job" in capsys.readouterr().err
