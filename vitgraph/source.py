"""Where a checkpoint comes from: the arguments that every command on one shares."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of a command."""
    parser.add_argument("repo", metavar="REPO_OR_FOLDER", help="Hugging Face repo id, or a folder")
    parser.add_argument("--revision", help="branch, tag or commit")
    parser.add_argument("--subfolder", help="folder inside the repo that holds the checkpoint")
    parser.add_argument("--cache-dir", type=Path, help="where downloads are kept")
    parser.add_argument("--token", help="access token; by default the one you are logged in with")
    parser.add_argument("--local-files-only", action="store_true", help="never touch the network")
    parser.add_argument(
        "--fetch", choices=("auto", "ranges", "shards"), default="auto",
        help="the tower's byte ranges or the whole files that hold it; by default what is less",
    )  # fmt: skip
    parser.add_argument("--force-download", action="store_true", help="fetch what is cached again")
    parser.add_argument("--max-workers", type=int, default=8, metavar="N", help="requests at once")
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")


def read_source(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of ``weights.load_encoder`` that those arguments stand for."""
    return {
        "revision": options.revision,
        "subfolder": options.subfolder,
        "cache_dir": options.cache_dir,
        "token": options.token,
        "local_files_only": options.local_files_only,
        "fetch": options.fetch,
        "force_download": options.force_download,
        "max_workers": options.max_workers,
        "progress": not options.no_progress,
    }
