"""Mistakes in the arguments: each is one line that says where the right way is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from vitgraph.cli import main
from vitgraph.terminal import counted

Refuse = Callable[..., str]


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command that must fail; returns its one line."""

    def run(*arguments: object) -> str:
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert (code, said.out, said.err.count("\n")) == (2, "", 1), said
        return said.err.removeprefix("vitgraph: error: ")

    return run


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.new("RGB", (64, 64)).save(tmp_path / "photo.jpg")
    return tmp_path / "photo.jpg"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("encode", ("repo", "a.jpg", "--out", "f.safetensors")),
        ("extract", ("repo", "tower")),
        ("inspect", ("repo",)),
        ("list", ()),
        ("bench speed", ("repo",)),
        ("demo", ()),
        ("cache list", ()),
        ("cache remove", ("owner/name",)),
    ],
)
def test_an_unknown_option_points_to_the_help_of_its_own_command(
    refuse: Refuse, command: str, arguments: tuple[str, ...]
) -> None:
    error = refuse(*command.split(), *arguments, "--batchsize=3")
    assert "unrecognized arguments: --batchsize" in error
    assert f"`vitgraph {command} --help`" in error


def test_a_photograph_where_the_checkpoint_belongs_is_said_to_be_none(
    refuse: Refuse, photo: Path, tmp_path: Path
) -> None:
    for images in ((), (photo,)):
        error = refuse("encode", photo, *images, "--out", tmp_path / "f.safetensors")
        assert error.startswith(f"{photo}: ")
        assert "first argument is a repo id or the folder of a checkpoint" in error


@pytest.mark.parametrize("name", ["f.pt", "f.npz", "f"])
def test_features_file_of_another_suffix_is_refused_before_anything_is_read(
    refuse: Refuse, tmp_path: Path, name: str
) -> None:
    out = tmp_path / name
    error = refuse("encode", tmp_path / "no checkpoint", tmp_path / "no.jpg", "--out", out)
    assert error.startswith(f"--out {out}: ")
    assert str(tmp_path / "f.safetensors") in error


@pytest.mark.parametrize(("number", "said"), [(0, "0 files"), (1, "1 file"), (1000, "1,000 files")])
def test_a_count_of_one_is_singular(number: int, said: str) -> None:
    assert counted(number, "file") == said
