"""What a caller points at and where it shall go, checked before anything is opened or fetched."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import CheckpointError, shown
from .hub import open_snapshot
from .hub_options import HubOptions
from .snapshot import Snapshot


def open_source(repo_id_or_path: str | os.PathLike[str], options: HubOptions) -> Snapshot:
    """Find a checkpoint by repo id or path.

    Raises:
        CheckpointError: nothing, or no name that a disk or the Hub can have; a ``revision`` of
            what is on this disk; or what :func:`~weights.hub.open_snapshot` raises.
    """
    text = os.fspath(repo_id_or_path)
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
    return open_snapshot(repo_id_or_path, options)


def _is_here(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, ~ of nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{shown(text)}: neither a path nor a repo id ({reason})") from error
