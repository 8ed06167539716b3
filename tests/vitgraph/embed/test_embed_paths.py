"""Which files ``vitgraph embed`` opens: links, pipes, names that lead out, what is left out."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands.embed_jobs import find_files, run_job
from tests.support.photographs import china
from vitgraph.embedding.sources import suffixes
from vitgraph.embedding.sources.listing import Source
from vitgraph.embedding.sources.reading import ImageReader, SourceOptions
from vitgraph.features import load_embeddings

read = ImageReader(SourceOptions()).read


def image_of(number: int) -> bytes:
    file = io.BytesIO()
    china().crop((number, 0, number + 70, 70)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an image in it, and another image beside it."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "own.png").write_bytes(image_of(0))
    (tmp_path / "private.png").write_bytes(image_of(1))
    return tmp_path / "photos"


# --- folders --------------------------------------------------------------------------------------


def test_linked_folders_are_followed_each_real_one_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "far.png").write_bytes(image_of(2))
    (folder / "sub").mkdir()
    (folder / "sub" / "near.png").write_bytes(image_of(3))
    for name, target in (
        ("a_link", tmp_path / "elsewhere"),
        ("b_link", tmp_path / "elsewhere"),  # the same folder again
        ("a_sub", folder / "sub"),  # has a place of its own
        ("circle", folder),
    ):
        (folder / name).symlink_to(target)
    (tmp_path / "elsewhere" / "back").symlink_to(folder)
    assert [file.key for file in find_files(str(folder))] == [
        "a_link/deep/far.png",
        "own.png",
        "sub/near.png",
    ]


def test_what_is_left_out_is_counted_by_suffix(
    repo: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.jxl", "b.JXL", "clip.mp4", "README", ".hidden.txt"):
        (folder / name).write_bytes(b"x")
    os.mkfifo(folder / "pipe.png")
    assert run_job(repo, folder, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "files that are not images: 2 .jxl, 1 " in said
    for part in ("1 .mp4", "1 without a suffix", "1 of another kind (pipe, device)"):
        assert part in said
    assert ".txt" not in said


def test_a_pattern_reports_broken_links_and_pipes_as_a_folder_does(
    repo: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "lost.png").symlink_to(tmp_path / "gone.png")
    (folder / "sub.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    for number, source in enumerate((folder, folder / "*.png")):
        assert run_job(repo, source, tmp_path / f"out {number}") == 3
        said = capsys.readouterr()
        assert "1 of another kind (pipe, device)" in said.out
        keys, _ = load_embeddings(tmp_path / f"out {number}")
        assert keys == ["own.png"]
        rows = (tmp_path / f"out {number}" / "errors.csv").read_text()
        assert "lost.png" in rows


def test_a_folder_that_a_pattern_matches_is_not_counted(folder: Path) -> None:
    (folder / "sub.png").mkdir()
    source = Source(str(folder / "*.png"))
    assert [file.key for file in source] == ["own.png"]
    assert source.left_out.describe() == []


def test_photographs_of_phones_are_taken_or_the_package_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "phone.HEIC").write_bytes(b"x")
    for installed in (True, False):
        found = installed or None
        monkeypatch.setattr(suffixes, "find_spec", lambda _, found=found: found)
        source = Source(str(folder))
        assert len(list(source)) == 1 + installed
        said = "".join(source.left_out.describe())
        assert (
            "1 .heic; .heic needs pillow-heif: pip install 'pillow-heif>=1.0'" in said
        ) is not installed


# --- lists and cells ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../private.png", "{}/private.png", "link.png", "sub/../../private.png"]
)
def test_a_list_names_files_in_its_folder_unless_any_path_is_given(
    repo: Path, folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "link.png").symlink_to(tmp_path / "private.png")
    (folder / "sub").mkdir()
    name = name.format(tmp_path)
    (folder / "list.txt").write_text(f"own.png\n{name}\n")
    assert run_job(repo, folder / "list.txt", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"line 2: {name}: lies outside the folder" in said
    assert "give --any-path if it may" in said
    assert not (tmp_path / "out").exists()
    assert run_job(repo, folder / "list.txt", tmp_path / "out", "--any-path") == 0


@pytest.mark.parametrize("as_struct", [False, True])
def test_a_cell_names_files_in_its_folder_unless_any_path_is_given(
    folder: Path, tmp_path: Path, as_struct: bool
) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (folder / "link.png").symlink_to(tmp_path / "private.png")
    names = ["own.png", "../private.png", str(tmp_path / "private.png"), "link.png"]
    cells: list[Any] = [{"bytes": None, "path": n} for n in names] if as_struct else names
    parquet.write_table(arrow.table({"image": cells}), folder / "x.parquet")
    good, *outside = find_files(str(folder / "x.parquet"))
    assert read(good) == image_of(0)
    for file in outside:
        with pytest.raises(ValueError, match=r"lies outside the folder .*; give --any-path"):
            read(file)
        assert ImageReader(SourceOptions(any_path=True)).read(file) == image_of(1)


@pytest.mark.parametrize("options", [SourceOptions(), SourceOptions(any_path=True)])
def test_pipes_and_devices_are_not_opened(
    folder: Path, tmp_path: Path, options: SourceOptions
) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    names = ["pipe.png", "zero.png"] if options.any_path else ["pipe.png"]
    parquet.write_table(arrow.table({"image": names}), folder / "x.parquet")
    (folder / "list.txt").write_text("\n".join(names))
    for source in ("x.parquet", "list.txt"):
        for file in find_files(str(folder / source), options):
            with pytest.raises(OSError, match="is not a regular file but a folder, a pipe or a"):
                ImageReader(options).read(file)


def test_a_job_over_a_pipe_ends_with_an_error_of_its_item(
    repo: Path, folder: Path, tmp_path: Path
) -> None:
    os.mkfifo(folder / "pipe.png")
    (folder / "list.txt").write_text("own.png\npipe.png\n")
    assert run_job(repo, folder / "list.txt", tmp_path / "out") == 3
    assert "is not a regular file" in (tmp_path / "out" / "errors.csv").read_text()


@pytest.mark.parametrize("source", ["list.txt", "text.parquet", "struct.parquet"])
def test_urls_stop_the_job_before_it_starts(
    repo: Path, folder: Path, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "https://host.example/a.png"
    if source == "list.txt":
        (folder / source).write_text(f"own.png\n{url}\n")
    else:
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        cells: list[Any] = [url] if source == "text.parquet" else [{"bytes": None, "path": url}]
        parquet.write_table(arrow.table({"image": cells}), folder / source)
    assert run_job(repo, folder / source, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"{url} is a URL, and nothing is downloaded unless asked for: give --fetch-urls" in said
    assert not (tmp_path / "out").exists()


# --- tar files ------------------------------------------------------------------------------------


def test_links_in_tar_files_give_the_member_they_name(tmp_path: Path) -> None:
    """Hard links name a file before them; symbolic ones any file, relative to their own folder."""
    links = [
        ("a/hard.png", tarfile.LNKTYPE, "blobs/0"),
        ("a/soft.png", tarfile.SYMTYPE, "../blobs/1"),
        ("a/chain.png", tarfile.SYMTYPE, "soft.png"),
        ("a/hard2.png", tarfile.LNKTYPE, "a/hard.png"),
        ("dangling.png", tarfile.SYMTYPE, "nowhere.png"),
        ("circle.png", tarfile.SYMTYPE, "circle.png"),
        ("out.png", tarfile.SYMTYPE, "/etc/passwd"),
    ]
    with tarfile.open(tmp_path / "x.tar", "w") as file:
        for name, number in (("blobs/0", 0), ("blobs/1", 1)):
            about = tarfile.TarInfo(name)
            about.size = len(image_of(number))
            file.addfile(about, io.BytesIO(image_of(number)))
        for name, kind, target in links:
            about = tarfile.TarInfo(name)
            about.type, about.linkname = kind, target
            file.addfile(about)
    files = {file.key.removeprefix("x.tar/"): file for file in find_files(str(tmp_path / "x.tar"))}
    assert set(files) == {name for name, *_ in links}
    for name, number in (("hard", 0), ("soft", 1), ("chain", 1), ("hard2", 0)):
        assert read(files[f"a/{name}.png"]) == image_of(number)
    for name in ("dangling", "circle", "out"):
        with pytest.raises(OSError, match="is a link that names no file of"):
            read(files[f"{name}.png"])


def has_gnu_tar() -> bool:
    found = shutil.which("tar")
    return (
        found is not None
        and b"GNU tar" in subprocess.run([found, "--version"], capture_output=True).stdout
    )


@pytest.mark.skipif(not has_gnu_tar(), reason="GNU tar writes sparse members")
@pytest.mark.parametrize("format", ["gnu", "posix"])
def test_a_sparse_member_has_the_bytes_of_its_file(repo: Path, tmp_path: Path, format: str) -> None:
    content = image_of(0) + bytes(1 << 20) + b"end"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(image_of(1))
    for name in ("b.png", "c.png"):
        with open(tmp_path / "in" / name, "wb") as file:
            file.write(image_of(0))
            file.seek(1 << 20, os.SEEK_CUR)  # a hole
            file.write(b"end")
    command = ["tar", "--sparse", f"--format={format}", "-cf", "x.tar"]
    subprocess.run([*command, "-C", "in", "a.png", "b.png", "c.png"], cwd=tmp_path, check=True)
    assert (tmp_path / "x.tar").stat().st_size < len(content)
    files = find_files(str(tmp_path / "x.tar"))
    assert [file.kind for file in files] == ["member", "sparse", "sparse"]
    assert [read(file) for file in files] == [image_of(1), content, content]
    assert run_job(repo, tmp_path / "x.tar", tmp_path / "out") == 0
