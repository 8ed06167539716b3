"""Mistakes in the arguments: each is one line that says where the right way is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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


@pytest.mark.parametrize(("number", "said"), [(0, "0 files"), (1, "1 file"), (1000, "1,000 files")])
def test_a_count_of_one_is_singular(number: int, said: str) -> None:
    assert counted(number, "file") == said
