"""How to talk to the Hub: what callers choose, checked before the first request."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ..errors import CheckpointError, shown
from ..snapshot import LONGEST_PART

FETCH_WAYS = ("auto", "ranges", "shards")


@dataclass(frozen=True)
class HubOptions:
    """How to talk to the Hub; the fields are keywords of :func:`~weights.load_encoder`.

    A ``subfolder`` is kept in its plain spelling, a ``token`` without space around it.
    """

    revision: str | None = None
    subfolder: str | None = None
    cache_dir: str | Path | None = None
    token: bool | str | None = field(default=None, repr=False)
    local_files_only: bool = False
    force_download: bool = False
    fetch: str = "auto"
    max_workers: int = 8
    progress: bool = True

    def __post_init__(self) -> None:
        if self.fetch not in FETCH_WAYS:
            raise ValueError(f"fetch={self.fetch!r}: must be one of {', '.join(FETCH_WAYS)}")
        if type(self.max_workers) is not int or not 1 <= self.max_workers <= 64:
            raise ValueError(f"max_workers={self.max_workers!r}: must be an integer from 1 to 64")
        if self.cache_dir == "":
            raise ValueError("cache_dir='': pass a folder, or None for the Hub client's own cache")
        parts = Path(self.cache_dir or ".").parts
        if any(len(part.encode(errors="replace")) > LONGEST_PART for part in parts):
            raise ValueError(
                f"cache_dir={shown(str(self.cache_dir))!r}: has a name of over {LONGEST_PART} "
                "bytes, which no disk takes; pass another folder"
            )
        object.__setattr__(self, "subfolder", _plain_folder(self.subfolder))
        object.__setattr__(self, "token", _plain_token(self.token))


def _plain_folder(subfolder: str | None) -> str | None:
    """Return ``a/b`` for ``./a//b/``, and None for the top."""
    path = PurePosixPath(subfolder or "")
    if path.is_absolute() or ".." in path.parts or "\\" in str(path):
        raise CheckpointError(
            f"subfolder={str(path)[:200]!r}: leaves the checkpoint; pass the names of folders "
            "inside it, joined by '/'"
        )
    return path.as_posix() if path.parts else None


def _plain_token(token: bool | str | None) -> bool | str | None:
    if not isinstance(token, str):
        return token
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"token=<{len(token)} characters, not shown>: a token is one line of letters, digits "
            "and signs without spaces; copy it again, or log in (hf auth login)"
        )
    return token
