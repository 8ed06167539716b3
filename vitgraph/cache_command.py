"""``vitgraph cache``: the towers that fetching has kept, listed, checked, removed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .terminal import format_table


def add_cache(parser: argparse.ArgumentParser) -> None:
    """The grammar of the command."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, command, summary in (
        ("list", list_towers, "What is kept and how large it is."),
        ("verify", verify_towers, "Read every kept tower and check it against its hashes."),
        ("remove", remove_towers, "Remove what is kept of one repo, or of one commit of it."),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        if name == "remove":
            action.add_argument("repo", metavar="REPO[@COMMIT]", help="Hugging Face repo id")
            action.add_argument(
                "--revision", metavar="COMMIT", help="this commit alone, or its start"
            )
        else:
            action.add_argument("--json", action="store_true", help="for programs")
        action.add_argument("--cache-dir", type=Path, help="where downloads are kept")
        action.add_argument("--debug", action="store_true", help="show the traceback of an error")
        action.set_defaults(command=command, parser=action)


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
    """Remove what is kept of one repo, or of one commit.

    Raises:
        ValueError: two commits were named, or nothing of it is kept.
    """
    from weights.cached_towers import remove_cached

    repo, _, commit = options.repo.partition("@")
    if commit and options.revision:
        raise ValueError(f"{options.repo} --revision {options.revision}: name the commit once")
    commit = commit or options.revision
    shards = _with_whole_shards(repo, commit or "", options.cache_dir)
    if commit:
        freed = _remove_commit(repo, commit, options.cache_dir)
    else:
        freed = remove_cached(repo, options.cache_dir)
    print(f"removed {repo}{'@' + commit if commit else ''}: {freed / 1e6:,.1f} MB freed")
    if shards:
        print("its whole shards are in the Hub client's cache still: hf cache ls, hf cache rm")


def _with_whole_shards(repo: str, commit: str, cache_dir: Path | None) -> bool:
    from weights.cached_towers import list_cached

    return any(
        tower.repo_id == repo
        and tower.commit.startswith(commit)
        and tower.state.startswith("whole shards")
        for tower in list_cached(cache_dir)
    )


def _remove_commit(repo: str, commit: str, cache_dir: Path | None) -> int:
    """Remove the towers of the commits that begin with ``commit``; returns the bytes freed."""
    from weights.cached_towers import list_cached
    from weights.tower_cache import TowerCache, drop

    kept = [tower for tower in list_cached(cache_dir) if tower.repo_id == repo]
    found = [tower for tower in kept if tower.commit.startswith(commit)]
    if len({tower.commit for tower in found}) != 1:
        known = ", ".join(sorted({tower.commit[:10] for tower in kept})) or "none"
        count = "several commits begin so" if found else "no tower of that commit is kept"
        raise ValueError(
            f"{repo}@{commit}: {count}; kept are: {known}. A branch is not kept under its name: "
            "`vitgraph cache list` shows commits"
        )
    for tower in found:
        with TowerCache(tower.folder).lock():
            drop(tower.folder)
    return sum(tower.bytes for tower in found)


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
