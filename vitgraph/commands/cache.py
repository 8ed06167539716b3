"""``vitgraph cache``: lists, verifies or removes cached vision towers, and kept tables of times."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..terminal import counted, format_table

if TYPE_CHECKING:
    from weights import CachedTower


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the actions, such as ``list`` and ``remove``, with their arguments to ``parser``."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, command, summary in (
        ("list", list_towers, "List the cached towers and their sizes."),
        ("verify", verify_towers, "Read every cached tower and compare its checksums."),
        ("remove", remove_towers, "Remove the cached towers of one repo, or of one commit of it."),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        if name == "remove":
            action.add_argument(
                "repo", metavar="REPO[@COMMIT]", help="repo id, and the commit to remove"
            )
            action.add_argument(
                "--revision",
                metavar="COMMIT",
                help="only this commit; its first characters are enough",
            )
        else:
            action.add_argument("--json", action="store_true", help="print JSON")
        action.add_argument("--cache-dir", type=Path, help="where downloads are kept")
        action.add_argument("--debug", action="store_true", help="show the traceback of an error")
        action.set_defaults(command=command, parser=action)
    summary = "List the kept times of CUDA graphs, which VITGRAPH_TABLES can move."
    tables = actions.add_parser("tables", help=summary, description=summary)
    tables.add_argument("--json", action="store_true", help="print JSON")
    tables.set_defaults(command=print_tables, parser=tables)
    summary = "Remove kept times of CUDA graphs, which the next capture measures again."
    tables = actions.add_parser("remove-tables", help=summary, description=summary)
    tables.add_argument(
        "names", nargs="*", metavar="NAME", help="as `vitgraph cache tables` shows it; default: all"
    )
    tables.set_defaults(command=remove_kept_tables, parser=tables)
    for action in (tables, actions.choices["tables"]):
        action.add_argument("--debug", action="store_true", help="show the traceback of an error")


def list_towers(options: argparse.Namespace) -> None:
    """Print one line per cached vision tower: repo id, commit, number of tensors, size, state."""
    from weights import list_cached

    _print(list_cached(options.cache_dir), options)


def verify_towers(options: argparse.Namespace) -> None:
    """Read every cached vision tower, check it against its stored hashes, and print a line for it.

    Raises:
        ValueError: a tower is damaged.
    """
    from weights import list_cached

    towers = list_cached(options.cache_dir, verify=True)
    _print(towers, options)
    damaged = [tower for tower in towers if tower.state.startswith("damaged")]
    if damaged:
        names = ", ".join(sorted({tower.repo_id for tower in damaged}))
        raise ValueError(
            f"{len(damaged)} of {counted(len(towers), 'cached tower')} damaged ({names}): load "
            "them with a connection, which downloads them again, or remove them"
        )


def remove_towers(options: argparse.Namespace) -> None:
    """Remove the cached files of one repo, or only the files of one commit of the repo.

    Raises:
        ValueError: the commit is empty or named twice, or the cache has no such repo or commit.
    """
    from weights import remove_cached

    repo, separator, commit_after_at = options.repo.partition("@")
    if separator and options.revision is not None:
        raise ValueError(f"{options.repo} --revision {options.revision}: name the commit once")
    commit = commit_after_at if separator else options.revision
    if commit is not None and not commit.strip():
        raise ValueError(
            f"{repo}: an empty commit; name one (vitgraph cache list shows them), or leave out "
            "@ and --revision to remove all commits of the repo"
        )
    freed = remove_cached(repo, options.cache_dir, commit=commit)
    print(f"removed {repo}{'@' + commit if commit else ''}: {freed / 1e6:,.1f} MB freed")


def print_tables(options: argparse.Namespace) -> None:
    """Print one line per kept table of times: its name, encoder, dtype, device, budgets, size."""
    from graphwrap import list_tables

    tables = list_tables()
    if options.json:
        print(json.dumps([table._asdict() for table in tables], indent=2))
    elif tables:
        rows = [(*map(str, table[:5]), f"{table.bytes / 1e3:,.1f}") for table in tables]
        print(format_table(("name", "encoder", "dtype", "device", "budgets", "kB"), rows))
    else:
        print("no tables are kept")


def remove_kept_tables(options: argparse.Namespace) -> None:
    """Remove the kept tables of these names, or all.

    Raises:
        ValueError: no table of one of the names is kept.
    """
    from graphwrap import list_tables, remove_tables

    before = len(list_tables())
    freed = remove_tables(options.names or None)
    removed = counted(before - len(list_tables()), "table")
    print(f"removed {removed}: {freed / 1e3:,.1f} kB freed")


def _print(towers: list[CachedTower], options: argparse.Namespace) -> None:
    if options.json:
        rows = [{**asdict(tower), "folder": str(tower.folder)} for tower in towers]
        print(json.dumps(rows, indent=2))
        return
    if not towers:
        print("no towers are cached (whole shards are in the Hub client's cache: hf cache ls)")
        return
    header = ("repo id", "commit", "tensors", "MB", "state")
    cells = [
        (
            tower.repo_id
            + (f" ({tower.subfolder})" if tower.subfolder else "")
            + (", text half" if tower.part == "text half" else ""),
            tower.commit[:10],
            str(tower.tensors),
            f"{tower.bytes / 1e6:,.1f}",
            tower.state,
        )
        for tower in towers
    ]
    print(format_table(header, cells))
    print(f"\n{sum(tower.bytes for tower in towers) / 1e6:,.1f} MB in all")
