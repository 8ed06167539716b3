"""``vitgraph embed``: which files are read, what is written, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from encoders.base.vision_encoder import VisionEncoder
from tests.support.commands.embed_jobs import close, run_job
from tests.support.graphs.made import note_graphed_encoders
from tests.support.photographs import china, flower, hopper
from vitgraph.cli import main
from vitgraph.embedding.sources.reading import File, ImageReader, Readable
from vitgraph.features import load_embeddings
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

KEYS = ["b/inner/one.jpg", "b/two.PNG", "c.jpg", "d.jpg"]
FIELDS = "pooler_output,last_hidden_state,deepstack_features"
BIAS = "model.visual.merger.linear_fc2.bias"
Embed = Callable[..., int]


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


def test_a_folder_becomes_one_vector_per_image(
    embed: Embed,
    photos: Path,
    tmp_path: Path,
    encoder: VisionEncoder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert embed(photos, "--shard-items", 3) == 0
    said = capsys.readouterr().out
    assert said.startswith("skipped 2 files that are not images: 1 .npy, 1 .txt\n4 files, ")
    assert "2 shards, 0 of them done\nwrites 4 vectors [96], about 1.5 kB of float32 to " in said
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == KEYS
    assert matrix.dtype == np.float32
    alone = [encoder.embed([photos / key], pool="mean")[0].numpy() for key in KEYS]
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
    alone = encoder.embed([photos / key for key in KEYS], pool="max", normalize=True)
    assert np.allclose(matrix, alone, atol=1e-6 if dtype == "float32" else 2e-4)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert f"00000.{format}" in names
    assert f"00001.{format}" in names


@pytest.mark.parametrize(
    ("value", "weights", "chosen", "message"),
    [
        (1e6, torch.float32, ("--out-dtype", "float16"), "up to 1e+06, and float16 ends at 65504"),
        (1e39, torch.float64, ("--dtype", "float64"), "up to 1e+39, and float32 ends at 3.40"),
    ],
)
def test_a_number_too_large_for_the_written_dtype_is_refused(
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    value: float,
    weights: torch.dtype,
    chosen: tuple[str, ...],
    message: str,
) -> None:
    repo = write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64, dtype=weights)
    (file,) = (path for path in repo.glob("*.safetensors") if BIAS in load_file(path))
    tensors = load_file(file)
    tensors[BIAS][0] = value
    save_file(tensors, file)
    out = tmp_path / "out"
    command = ["embed", str(repo), str(photos), "--out", str(out), "--no-progress", *chosen]
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not list(out.glob("*.npy"))


def test_parquet_without_pyarrow_says_what_to_install(
    embed: Embed, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert embed(photos, "--format", "parquet") == 2
    assert "parquet files need pyarrow: pip install 'pyarrow>=15'" in capsys.readouterr().err


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
@pytest.mark.parametrize(
    "name", ['comma, and "quotes".jpg', "line\nbreak.jpg", "a\rb.jpg", "b\udcff.jpg"]
)
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
    assert main(["embed", "--verify", str(tmp_path / "out")]) == 0


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


@pytest.mark.parametrize("options", [(), ("--pool", "none", "--fields", FIELDS), ("--plan",)])
def test_whatever_reading_an_image_raises_is_its_error(
    options: tuple[str, ...],
    embed: Embed,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = ImageReader.read

    def read_some(reader: ImageReader, file: File) -> bytes:
        if file.key == "c.jpg":
            raise BadZipFile("Bad CRC-32 for file 'c.jpg'")
        return read(reader, file)

    monkeypatch.setattr(ImageReader, "read", read_some)
    # As images inside other files are; one in a folder is read by its path.
    monkeypatch.setattr(ImageReader, "item", lambda reader, file: Readable(reader, file))
    planned = "--plan" in options
    assert embed(photos, *options) == (0 if planned else 3)
    if not planned:
        with (tmp_path / "out" / "errors.csv").open() as file:
            assert list(csv.reader(file))[1:] == [["c.jpg", "Bad CRC-32 for file 'c.jpg'"]]


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


def test_an_error_without_a_text_is_named_by_its_class(
    embed: Embed, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(photos / "c.jpg", "c.jpg")

    def late(self: ImageReader, file: File) -> bytes:
        raise TimeoutError

    monkeypatch.setattr(ImageReader, "read", late)
    assert embed(tmp_path / "photos.tar") == 3
    (row,) = csv.DictReader((tmp_path / "out" / "errors.csv").read_text().splitlines())
    assert row == {"key": "photos.tar/c.jpg", "error": "TimeoutError()"}


def test_a_graph_of_class_tokens_keeps_no_other_rows(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = note_graphed_encoders(monkeypatch, "graphwrap.GraphedEncoder")
    folder = write_seeded_checkpoint(tmp_path / "dinov2", "dinov2", width=64)
    assert run_job(folder, photos, tmp_path / "out", "--pool", "cls", "--graph") == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    encoder = load_encoder(folder, dtype="float32", progress=False)
    assert close(matrix, encoder.embed([photos / key for key in keys], pool="cls"))
    (output,) = made[0].encode([china()])
    assert output.last_hidden_state is output.pooler_output is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shard-items", 0), "--shard-items 0: must be at least 1"),
        (("--fields", "pooler_output"), "--fields pooler_output: is for --pool none"),
        (("--pool", "none", "--fields", "tokens"), "--fields tokens: must be pooler_output, "),
        (("--pool", "none", "--normalize"), "needs one vector per item"),
        (("--pool", "cls"), "has no class token"),
        (("--max-tiles", 3), "this tower has no tiles"),
        (("--max-pixels", 5000), "min_pixels=65536 is over max_pixels=5000"),
        (("--batch-tokens", 0), "--batch-tokens 0: must be at least 1"),
        (("--dtype", "float17"), "--dtype float17: must be one of"),
    ],
)
def test_impossible_arguments_leave_nothing_behind(
    embed: Embed,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[object, ...],
    message: str,
) -> None:
    assert embed(photos, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_empty_source_and_a_used_folder_are_refused(
    embed: Embed, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, fault in (
        ("*.bmp", "no images found"),
        ("nowhere", "there is no such file or folder"),
    ):
        assert embed(photos / name) == 2
        assert f"{name}: {fault}; give a folder with images" in capsys.readouterr().err
    assert embed(photos, out="photos") == 2
    assert "holds files, and no manifest of an embedding job" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert embed(photos, out="file") == 2
    assert "file: is a file; give a folder" in capsys.readouterr().err
