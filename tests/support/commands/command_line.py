"""How the tests of the command line hold what a run printed."""

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
    """Return the one line of a run that was refused."""
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1), run.err
    assert run.err.startswith("vitgraph: error: ")
    return run.err
