"""Open the checkpoint that a caller names by a repo id, a folder or one file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from .errors import CheckpointError, DamagedError, legible
from .files.checkpoint import Checkpoint, check_name
from .hub.hub_checkpoint import open_repo
from .hub.repo import HubOptions
from .published import similar_names

_ADDRESS = re.compile(r"(https?://[^/]+/|hf://|(?:www\.)?(?:huggingface|hf)\.co/)([^?#]*).*")
_PAGE = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+?)(\.git)?"
    r"(/(?P<view>tree|blob|resolve)/(?P<revision>[^/]+)(/(?P<inside>.+))?)?/?"
)
_WITH_REVISION = re.compile(r"([\w.-]+/[\w.-]+)@([\w./-]+)")
_T = TypeVar("_T")
_MOST_REPAIRS = 2
"""The number of times that a load opens a checkpoint again after a fetched copy proves damaged."""


def resolve_commit(
    repo_id_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | Path | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
) -> str | None:
    """Return the commit that a branch or tag names now, to pass it as ``revision=`` to later calls.

    A branch may move between two calls. Several loads, in one process or in many, read one and the
    same checkpoint if they are given the commit. To resolve a branch takes one request; a commit
    whose config is on this disk takes none. Torch is not imported.

    Args:
        repo_id_or_path: repo id ``owner/name``, or the path of a folder or a ``.safetensors`` file.
        revision: branch, tag or commit; None is the main branch.
        subfolder: folder inside the repo that holds the checkpoint.
        cache_dir: the Hub client's cache; None is its default.
        token: access token, or whether to send the stored one, as the Hub client takes it.
        local_files_only: never touch the network; return the commit of the cached copy.

    Returns:
        The 40-digit commit; None for a folder or a file, which have no commits.

    Raises:
        CheckpointError: there is no such repo, revision or path, or the Hub cannot be reached.
    """
    options = HubOptions(revision, subfolder, cache_dir, token, local_files_only)
    return open_checkpoint(repo_id_or_path, options).commit


def open_checkpoint(
    repo_id_or_path: str | os.PathLike[str],
    options: HubOptions,
    damages: Sequence[DamagedError] = (),
) -> Checkpoint:
    """Open a repo id, a folder or one ``.safetensors`` file; an existing path wins over a repo id.

    Args:
        repo_id_or_path: repo id or path, as the user passed it.
        options: settings of requests to the Hub.
        damages: errors that earlier tries to read a fetched copy of the repo have raised; if there
            are any, the copy is fetched again.
    """
    text = _text(repo_id_or_path)
    if _is_here(text):
        if options.revision is not None:
            raise CheckpointError(
                f"{legible(text)}: revision={options.revision!r}, but this is a path on this disk, "
                "which has no revisions and wins over a repo id: leave revision out, or rename "
                "the path"
            )
        return _open_local(Path(text).expanduser(), options.subfolder)
    _refuse_other_spellings(text)
    path = text.startswith((".", "/", "~")) or "\\" in text or text.endswith((".safetensors", "/"))
    if path or text.count("/") != 1 or not isinstance(repo_id_or_path, str):
        raise CheckpointError(
            f"{legible(text)}: no such file or folder (and not a repo id, which reads owner/name)"
            f"{similar_names(text)}"
        )
    return open_repo(text, options, damages[-1] if damages else None)


def read_repaired(
    repo_id_or_path: str | os.PathLike[str],
    options: HubOptions,
    read: Callable[[Checkpoint], _T],
) -> _T:
    """Return ``read(checkpoint)`` of an opened checkpoint.

    If a fetched copy proves damaged meanwhile, the checkpoint is opened again and the copy fetched
    anew, at most twice.
    """
    damages: list[DamagedError] = []
    while True:
        checkpoint = open_checkpoint(repo_id_or_path, options, damages)
        try:
            return read(checkpoint)
        except DamagedError as error:
            if len(damages) == _MOST_REPAIRS:
                raise
            damages.append(error)


def _text(repo_id_or_path: str | os.PathLike[str]) -> str:
    text = os.fspath(repo_id_or_path) if isinstance(repo_id_or_path, os.PathLike | str) else None
    if not isinstance(text, str):
        raise TypeError(
            f"repo_id_or_path={legible(repr(repo_id_or_path))}: must be a string or a path: "
            "owner/name, a folder or a .safetensors file"
        )
    if not text:
        raise CheckpointError(
            "an empty name: pass owner/name, a folder ('.' is the current one) or a .safetensors "
            "file"
        )
    return text


def _open_local(path: Path, subfolder: str | None) -> Checkpoint:
    """Open the checkpoint in a folder, or in its ``subfolder``, or in one safetensors file."""
    if path.is_file():
        if path.suffix == ".gguf":
            raise CheckpointError(
                f"{path}: GGUF weights are not read: use the original repo with safetensors"
            )
        if path.suffix != ".safetensors":
            raise CheckpointError(
                f"{path}: not a .safetensors file; pass the folder of a checkpoint, one "
                ".safetensors file or a repo id (pickle files are never opened)"
            )
        if subfolder is not None:
            raise CheckpointError(f"{path}: subfolder={subfolder!r} needs a folder, this is a file")
        return Checkpoint(path.parent, path.name)
    folder = path / check_name(subfolder, str(path)) if subfolder else path
    if not folder.is_dir():
        raise CheckpointError(
            f"{path}: has no folder {subfolder!r}; pass one that it has, or leave subfolder out"
        )
    return Checkpoint(folder)


def _refuse_other_spellings(text: str) -> None:
    """Raise a :class:`CheckpointError` if ``text`` is a repo's web address, or ends in @revision.

    The error says which repo id and keywords to pass instead.
    """
    if match := _WITH_REVISION.fullmatch(text):
        raise CheckpointError(
            f"{text}: no such folder here, and a repo id has no @: pass {match[1]!r} and "
            f"revision={match[2]!r} (--revision)"
        )
    address = _ADDRESS.fullmatch(text)
    page = _PAGE.fullmatch(address[2]) if address else None
    if address is None or page is None or page["repo"].startswith(("datasets/", "spaces/")):
        return
    arguments = [repr(page["repo"])]
    if page["revision"]:
        arguments.append(f"revision={unquote(page['revision'])!r}")
    path_in_repo = page["inside"] or ""
    folder = path_in_repo if page["view"] == "tree" else path_in_repo.rpartition("/")[0]
    if folder.strip("/"):
        arguments.append(f"subfolder={unquote(folder.strip('/'))!r}")
    raise CheckpointError(
        f"{legible(text)}: the address of a repo, not its id: drop {legible(address[1])} and pass "
        + ", ".join(arguments)
    )


def _is_here(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError) as error:
        # The path may be too long, hold a NUL, or name a "~user" who does not exist.
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{legible(text)}: neither a path nor a repo id ({reason})"
        ) from error
