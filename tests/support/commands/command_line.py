"""The result of a run of the command line, as tests compare it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias


class Run(NamedTuple):
    """The exit code of a run of ``vitgraph``, and what it printed."""

    code: int
    out: str
    err: str


Cli: TypeAlias = Callable[..., Run]


def refusal(run: Run) -> str:
    """Check that a run was refused with one line on stderr, and return that line."""
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1), run.err
    assert run.err.startswith("vitgraph: error: ")
    return run.err
