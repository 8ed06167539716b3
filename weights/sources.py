"""What a caller points at and where it shall go, checked before anything is opened or fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from .errors import CheckpointError, shown
from .hub import open_snapshot
from .hub_options import HubOptions
from .snapshot import Snapshot

_ADDRESS = re.compile(r"(https?://[^/]+/|hf://|(?:www\.)?(?:huggingface|hf)\.co/)([^?#]*).*")
_PAGE = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+?)(\.git)?"
    r"(/(?P<view>tree|blob|resolve)/(?P<revision>[^/]+)(/(?P<inside>.+))?)?/?"
)
_WITH_REVISION = re.compile(r"([\w.-]+/[\w.-]+)@([\w./-]+)")


def open_source(repo_id_or_path: str | os.PathLike[str], options: HubOptions) -> Snapshot:
    """Find a checkpoint by repo id or path.

    Raises:
        CheckpointError: nothing, or no name that a disk or the Hub can have; a ``revision`` of
            what is on this disk; or what :func:`~weights.hub.open_snapshot` raises.
        TypeError: neither text nor a path.
    """
    text = os.fspath(repo_id_or_path) if isinstance(repo_id_or_path, os.PathLike | str) else None
    if not isinstance(text, str):
        raise TypeError(
            f"repo_id_or_path={shown(repr(repo_id_or_path))}: must be text or a path: owner/name, "
            "a folder or a .safetensors file"
        )
    if not text:
        raise CheckpointError(
            "an empty name: pass owner/name, a folder ('.' is the current one) or a .safetensors "
            "file"
        )
    here = _is_here(text)
    if here and options.revision is not None:
        raise CheckpointError(
            f"{shown(text)}: revision={options.revision!r}, but this is a path on this disk, which "
            "has no revisions and wins over a repo id: leave revision out, or rename the path"
        )
    if not here:
        _refuse_other_spellings(text)
    return open_snapshot(repo_id_or_path, options)


def _refuse_other_spellings(text: str) -> None:
    """Raise a :class:`CheckpointError` for an address of a repo, or an id with its revision."""
    if match := _WITH_REVISION.fullmatch(text):
        raise CheckpointError(
            f"{text}: no such folder here, and a repo id has no @: pass {match[1]!r} and "
            f"revision={match[2]!r} (--revision)"
        )
    address = _ADDRESS.fullmatch(text)
    page = _PAGE.fullmatch(address[2]) if address else None
    if address is None or page is None or page["repo"].startswith(("datasets/", "spaces/")):
        return
    wanted = [repr(page["repo"])]
    if page["revision"]:
        wanted.append(f"revision={unquote(page['revision'])!r}")
    inside = page["inside"] or ""
    folder = inside if page["view"] == "tree" else inside.rpartition("/")[0]
    if folder.strip("/"):
        wanted.append(f"subfolder={unquote(folder.strip('/'))!r}")
    raise CheckpointError(
        f"{shown(text)}: the address of a repo, not its id: drop {shown(address[1])} and pass "
        + ", ".join(wanted)
    )


def _is_here(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, ~ of nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{shown(text)}: neither a path nor a repo id ({reason})") from error
