"""``vitgraph embed`` on images inside tar files, parquet files and datasets."""

from __future__ import annotations

import errno
import gc
import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands.embed_jobs import find_files, run_job
from tests.support.photographs import china
from vitgraph.cli import main
from vitgraph.embedding.sources import tables
from vitgraph.embedding.sources.reading import File, ImageReader, SourceOptions
from vitgraph.features import load_embeddings

read = ImageReader(SourceOptions()).read

Embed = Callable[..., int]


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    """Six image files."""
    files = []
    for number in range(6):
        file = io.BytesIO()
        china().crop((30 * number, 0, 30 * number + 90, 80)).save(file, "PNG")
        files.append(file.getvalue())
    return files


@pytest.fixture
def wanted(repo: Path, images: list[bytes], tmp_path: Path) -> np.ndarray[Any, Any]:
    """The vectors of the six images as files of their own."""
    (tmp_path / "alone").mkdir()
    for number, content in enumerate(images):
        (tmp_path / "alone" / f"{number}.png").write_bytes(content)
    assert run_job(repo, tmp_path / "alone", tmp_path / "wanted") == 0
    return load_embeddings(tmp_path / "wanted")[1]


Members = Mapping[str, bytes] | Sequence[tuple[str, bytes]]


def write_tar(path: Path, members: Members, format: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=format) as file:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            file.addfile(about, io.BytesIO(content))


def write_parquet(path: Path, column: str, cells: list[Any], rows: int = 2) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = arrow.table({"number": list(range(len(cells))), column: cells})
    parquet.write_table(table, path, row_group_size=rows)


# --- tar files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_images_in_tar_files_give_the_vectors_of_files(
    repo: Path, images: list[bytes], wanted: Any, tmp_path: Path, format: int
) -> None:
    """As WebDataset writes them: other files of a sample lie between the images."""
    tars = tmp_path / "tars"
    tars.mkdir()
    long = "folder/" * 9 + "name" * 9
    for number in range(2):
        members = {}
        for place in range(3):
            members[f"{long}{place}.png"] = images[3 * number + place]
            members[f"{long}{place}.json"] = b"{}"
            members[f"{long}{place}.cls"] = b"1"
        write_tar(tars / f"part-{number}.tar", {**members, "folder/._x.png": b"?"}, format)
    assert run_job(repo, tars / "part-*.tar", tmp_path / "out", "--shard-items", 2) == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    parts = [f"part-{number}.tar/{long}{place}.png" for number in range(2) for place in range(3)]
    assert keys == parts
    assert np.allclose(matrix, wanted, atol=1e-5)
    assert main(["embed", "--verify", str(tmp_path / "out")]) == 0


def test_a_list_may_name_tar_files_beside_images(
    repo: Path, images: list[bytes], wanted: Any, tmp_path: Path
) -> None:
    write_tar(tmp_path / "two.tar", {"a.png": images[1], "b.png": images[2]})
    (tmp_path / "list.txt").write_text("alone/0.png\ntwo.tar\nalone/3.png\n")
    assert run_job(repo, tmp_path / "list.txt", tmp_path / "out") == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == ["alone/0.png", "two.tar/a.png", "two.tar/b.png", "alone/3.png"]
    assert np.allclose(matrix, wanted[:4], atol=1e-5)


def test_members_of_one_name_stay_apart(repo: Path, images: list[bytes], tmp_path: Path) -> None:
    names = ["x.png", "x.png", "y.png", "x.png"]
    contents = [b"?", images[0], images[1], images[1]]
    write_tar(tmp_path / "x.tar", list(zip(names, contents, strict=True)))
    assert run_job(repo, tmp_path / "x.tar", tmp_path / "out", "--shard-items", 3) == 3
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == [f"x.tar/{name}" for name in names[1:]]
    assert np.allclose(matrix[1], matrix[2], atol=1e-6)
    assert not np.allclose(matrix[0], matrix[1])


def test_a_damaged_member_is_one_bad_file(repo: Path, images: list[bytes], tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"a.png": images[0], "b.png": images[1][:200], "c.png": b""})
    assert run_job(repo, tmp_path / "x.tar", tmp_path / "out") == 3
    assert load_embeddings(tmp_path / "out")[0] == ["x.tar/a.png"]
    table = (tmp_path / "out" / "errors.csv").read_text()
    assert table.count("cannot be read as an image") == 2


def test_a_tar_file_that_changes_after_listing_gives_no_image(
    images: list[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "x.tar"
    write_tar(path, {"a.png": images[0], "b.png": images[1]})
    first, last = find_files(str(path))
    assert read(last) == images[1]
    path.write_bytes(path.read_bytes()[: last.position + 10])
    with pytest.raises(OSError, match=r"x.tar: has changed since the job listed it"):
        read(first)
    with pytest.raises(OSError, match=r"x.tar: has changed since|x.tar: ends before byte"):
        read(last)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.tar", b"no tar file" * 100, "cannot be read as a tar file"),
        ("x.tar.gz", b"", "is compressed, so that no image in it can be reached"),
        ("x.parquet", b"no parquet file", "cannot be read as a parquet file"),
    ],
)
def test_a_file_that_should_hold_images_and_is_damaged_is_refused(
    repo: Path,
    tmp_path: Path,
    name: str,
    content: bytes,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    assert run_job(repo, tmp_path / name, tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cut", [100, 900, 1024, 1500])
def test_a_truncated_tar_file_is_refused(tmp_path: Path, cut: int) -> None:
    """In the data of the first of two files of 512 bytes, or in the header of the other."""
    write_tar(tmp_path / "x.tar", {name: bytes(512) for name in ("a.png", "b.png")})
    (tmp_path / "x.tar").write_bytes((tmp_path / "x.tar").read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"x.tar: cannot be read as a tar file"):
        find_files(str(tmp_path / "x.tar"))


# --- parquet --------------------------------------------------------------------------------------


def test_a_reader_keeps_few_row_groups_of_many_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(tables, "_GROUP_BYTES", 1 << 20)
    for number in range(12):
        cells = [bytes([number, row]) * 250_000 for row in range(4)]
        write_parquet(tmp_path / f"{number}.parquet", "image", cells)
    reader, before = ImageReader(SourceOptions()), arrow.total_allocated_bytes()
    gc.disable()
    try:
        for number in range(12):
            for row in range(4):
                path = tmp_path / f"{number}.parquet"
                file = File("", str(path), kind="row", position=row)
                assert reader.read(file) == bytes([number, row]) * 250_000
        held = arrow.total_allocated_bytes() - before
        assert held < 6 * 1_500_000  # four groups of 1 MB, in buffers of 1.5, of 24 groups
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["bytes", "struct", "path"])
def test_images_in_a_column_of_parquet_files_give_the_vectors_of_files(
    repo: Path, images: list[bytes], wanted: Any, tmp_path: Path, kind: str
) -> None:
    cells: list[Any] = list(images)
    if kind == "struct":
        cells = [{"bytes": content, "path": None} for content in images[:5]]
        cells.append({"bytes": None, "path": "alone/5.png"})
    elif kind == "path":
        cells = [f"alone/{number}.png" for number in range(6)]
    write_parquet(tmp_path / "x.parquet", "picture", cells)
    options = ("--column", "picture", "--shard-items", 4)
    assert run_job(repo, tmp_path / "x.parquet", tmp_path / "out", *options) == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == [f"x.parquet/{row}" for row in range(6)]
    assert np.allclose(matrix, wanted, atol=1e-5)


def test_empty_cells_are_bad_files_and_an_unknown_column_is_refused(
    repo: Path, images: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(tmp_path / "x.parquet", "image", [images[0], None, b"?"])
    assert run_job(repo, tmp_path / "x.parquet", tmp_path / "out") == 3
    assert load_embeddings(tmp_path / "out")[0] == ["x.parquet/0"]
    table = (tmp_path / "out" / "errors.csv").read_text()
    assert "holds NoneType, not the bytes or the path of an image" in table
    assert run_job(repo, tmp_path / "x.parquet", tmp_path / "other", "--column", "photo") == 2
    error = capsys.readouterr().err
    assert "x.parquet: has no column 'photo'; name one of number, image with --column" in error


def test_a_path_in_a_cell_that_leads_nowhere_is_named(repo: Path, tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", "image", ["nowhere.png"])
    assert run_job(repo, tmp_path / "x.parquet", tmp_path / "out") == 3
    assert "No such file or directory" in (tmp_path / "out" / "errors.csv").read_text()


# --- lists and names ------------------------------------------------------------------------------

NAMES = ["a\u2028b.png", "c\x85d.png", "e\x0cf.png", "\u00fc.png", " g.png", "h\udcff.png"]


@pytest.mark.parametrize("name", ["list.txt", "LIST.TXT"])
@pytest.mark.parametrize(("start", "end"), [("", "\n"), ("\ufeff", "\r\n")])
def test_a_list_ends_its_lines_as_text_files_do(
    tmp_path: Path, name: str, start: str, end: str
) -> None:
    text = start + "".join(line + end for line in NAMES)
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert [file.key for file in find_files(str(tmp_path / name))] == NAMES


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_list_of_powershell_in_utf_16_is_read(
    tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*NAMES[:5], "\u0d0d\u0a0d.png", "\U0001f600.png"]
    content = "".join(line + "\r\n" for line in ("\ufeff" + names[0], *names[1:])).encode(encoding)
    (tmp_path / "list.txt").write_bytes(content)
    assert [file.key for file in find_files(str(tmp_path / "list.txt"))] == names
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert [file.key for file in find_files("-")] == names


@pytest.mark.parametrize("content", ["a.png\n".encode("utf-16-le"), b"\xff\xfea"])
def test_a_list_that_is_no_text_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"list\.txt: .*save it as UTF-8"):
        find_files(str(tmp_path / "list.txt"))


@pytest.mark.parametrize("name", ["photos.zip", "PHOTOS.ZIP", "photos.7z", "photos.rar"])
def test_an_archive_that_is_not_read_is_named(
    images: list[bytes], tmp_path: Path, name: str
) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as file:
        file.writestr("a.png", images[0])
    (tmp_path / "list.txt").write_text(f"{name}\n")
    for source in (tmp_path / name, tmp_path / "list.txt", tmp_path / f"*{name[-3:]}"):
        with pytest.raises(ValueError, match=rf"{name}: is an archive .* unpack it"):
            find_files(str(source))


def test_a_folder_that_cannot_be_read_is_an_error(
    images: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    for path in (tmp_path / "a.png", tmp_path / "closed" / "b.png"):
        path.write_bytes(images[0])
    plain = os.scandir

    def refusing(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return plain(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match="closed"):
        find_files(str(tmp_path))


def test_standard_input_may_hold_names_that_are_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(line + "\n" for line in NAMES).encode("utf-8", "surrogateescape")
    strict = io.TextIOWrapper(io.BytesIO(text), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", strict)
    assert [file.key for file in find_files("-")] == NAMES


def test_a_file_that_looks_like_a_pattern_is_a_file(images: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "one [2].png").write_bytes(images[0])
    (file,) = find_files(str(tmp_path / "one [2].png"))
    assert (file.key, read(file)) == ("one [2].png", images[0])
    write_tar(tmp_path / "[x].tar", {"a.png": images[1]})
    (file,) = find_files(str(tmp_path / "[x].tar"))
    assert (file.key, read(file)) == ("[x].tar/a.png", images[1])


# --- datasets ------------------------------------------------------------------------------------


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of the library
def test_a_data_set_gives_the_vectors_of_files(
    repo: Path,
    images: list[bytes],
    wanted: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    cells = [{"bytes": content, "path": None} for content in images]
    write_parquet(folder / "test-0.parquet", "image", cells[:4])
    write_parquet(folder / "test-1.parquet", "image", cells[4:])
    assert run_job(repo, f"hf://datasets/{folder}", tmp_path / "out", "--split", "test") == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == [f"test/{row}" for row in range(6)]
    assert np.allclose(matrix, wanted, atol=1e-5)
    empty = tmp_path / "other"
    empty.mkdir()
    write_parquet(empty / "train.parquet", "label", [1, 2])
    with pytest.raises(ValueError, match=r"has no column 'image'; name one of number, label"):
        find_files(f"hf://datasets/{empty}")


def test_without_the_datasets_package_the_error_names_it(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert run_job(repo, "hf://datasets/beans", tmp_path / "out") == 2
    assert "beans: needs the datasets package: pip install 'data" in capsys.readouterr().err
