"""``vitgraph cache``: the towers that fetching has kept, listed, checked, removed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .tables import format_table


def add_cache(parser: argparse.ArgumentParser) -> None:
    """The grammar of the command."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, command, summary in (
        ("list", list_towers, "What is kept and how large it is."),
        ("verify", verify_towers, "Read every kept tower and check it against its hashes."),
        ("remove", remove_towers, "Remove all that is kept of one repo."),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        if name == "remove":
            action.add_argument("repo", metavar="REPO", help="Hugging Face repo id")
        else:
            action.add_argument("--json", action="store_true", help="for programs")
        action.add_argument("--cache-dir", type=Path, help="where downloads are kept")
        action.add_argument("--debug", action="store_true", help="show the traceback of an error")
        action.set_defaults(command=command)


def list_towers(options: argparse.Namespace) -> None:
    """Print a line a kept tower."""
    from weights.cached_towers import list_cached

    _print(list_cached(options.cache_dir), options)


def verify_towers(options: argparse.Namespace) -> None:
    """Print a line a kept tower, each read and checked; fail if one is damaged.

    Raises:
        ValueError: at least one is.
    """
    from weights.cached_towers import verify_cached

    towers = verify_cached(options.cache_dir)
    _print(towers, options)
    damaged = [tower for tower in towers if tower.state.startswith("damaged")]
    if damaged:
        names = ", ".join(sorted({tower.repo_id for tower in damaged}))
        raise ValueError(
            f"{len(damaged)} of {len(towers)} kept towers damaged ({names}): load them with a "
            "connection, which fetches them again, or remove them"
        )


def remove_towers(options: argparse.Namespace) -> None:
    """Remove what is kept of one repo."""
    from weights.cached_towers import remove_cached

    freed = remove_cached(options.repo, options.cache_dir)
    print(f"removed {options.repo}: {freed / 1e6:,.1f} MB freed")


def _print(towers: list[Any], options: argparse.Namespace) -> None:
    if options.json:
        rows = [{**asdict(tower), "folder": str(tower.folder)} for tower in towers]
        print(json.dumps(rows, indent=2))
        return
    if not towers:
        print("no towers are kept (whole shards are in the Hub client's cache: hf cache ls)")
        return
    header = ("repo id", "commit", "tensors", "MB", "state")
    cells = [
        (
            tower.repo_id + (f" ({tower.subfolder})" if tower.subfolder else ""),
            tower.commit[:10],
            str(tower.tensors),
            f"{tower.bytes / 1e6:,.1f}",
            tower.state,
        )
        for tower in towers
    ]
    print(format_table(header, cells))
    print(f"\n{sum(tower.bytes for tower in towers) / 1e6:,.1f} MB in all")
