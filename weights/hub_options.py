"""How to talk to the Hub: what callers choose, and the client's progress bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, not marked public
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

FETCH_WAYS = ("auto", "ranges", "shards")


@dataclass(frozen=True)
class HubOptions:
    """How to talk to the Hub; most fields are keywords of ``hf_hub_download``."""

    revision: str | None = None
    subfolder: str | None = None
    cache_dir: str | Path | None = None
    token: bool | str | None = None
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


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Silence the client's bars for a while; its switch is one for the process."""
    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
