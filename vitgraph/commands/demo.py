"""``vitgraph demo``: its arguments, and the checks that run before torch is imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..packages import require_matplotlib
from .arguments import check_repo


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command ``demo`` to its parser."""
    parser.add_argument(
        "repos",
        metavar="REPO",
        nargs="*",
        help="repo ids or folders of checkpoints; by default small ones with random weights, of "
        "four families",
    )
    parser.add_argument(
        "--all", action="store_true", help="draw a small random tower of every family, not of four"
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the pictures")


def demo(options: argparse.Namespace) -> None:
    """Run ``vitgraph demo``: check its arguments, encode sample photographs, and draw the features.

    Raises:
        ValueError: an invalid argument, a missing package, or a checkpoint that cannot be loaded.
    """
    check_demo(options.out, options.repos, options.all)
    from .demo_pictures import run_demo

    run_demo(options.out, options.repos, options.all)


def check_demo(out: Path, repos: Sequence[str], every_family: bool = False) -> None:
    """Check the arguments of ``vitgraph demo``, and that the packages that it needs are installed.

    Args:
        out: folder for the pictures; it need not exist.
        repos: repo ids or folders of checkpoints.
        every_family: whether the seeded towers of all families are to be drawn.

    Raises:
        ValueError: an optional package is missing, a checkpoint does not exist, two checkpoints
            have the same last part of their name, ``out`` is a file, or all families are to be
            drawn beside checkpoints.
    """
    require_matplotlib()
    if every_family and repos:
        raise ValueError(
            f"--all with {', '.join(repos)}: --all draws random towers in place of checkpoints; "
            "leave out one of them"
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; give a folder for the pictures")
    if len({Path(repo).name for repo in repos}) < len(repos):
        raise ValueError(f"{', '.join(repos)}: pass checkpoints whose last parts differ")
    for repo in repos:
        check_repo(repo, {})
    from encoders.inputs import require_av  # last: it imports torch, which takes seconds

    require_av()
