"""Whole files and lists of files through the Hub's client: tried again, quiet, stopped in time.

The client tries again where it can resume a body, and not where an answer is an error; Ctrl-C and
the failure of another file reach it between two chunks.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub import HfApi, ModelInfo, hf_hub_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the client's library
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, not marked public
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    tqdm,
)

from .errors import CheckpointError
from .leftovers import finish_leftover
from .obstacles import disk_full, is_full
from .remote import ATTEMPTS, BUSY, GivenUpError, TryAgain, retry_after, wait_to_try_again
from .repo import Repo
from .workers import Stopped, in_parallel

_T = TypeVar("_T")


def list_files(repo: Repo) -> list[str]:
    """The files of the checkpoint, by name."""
    api = HfApi(token=repo.options.token)
    seconds = huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    name = "the list of files"

    def question() -> ModelInfo:
        return api.model_info(repo.repo_id, revision=repo.revision, timeout=seconds)

    info = repo.ask(lambda: patiently(question, f"{repo.label}: {name}", None), name)
    prefix = repo.inside("x")[:-1]
    files = [file.rfilename for file in info.siblings or ()]
    return sorted(file[len(prefix) :] for file in files if file.startswith(prefix))


def download(repo: Repo, sizes: Mapping[str, int], *, force: bool = False) -> dict[str, Path]:
    """Whole files into the client's cache; ``sizes`` are their bytes, 0 where not known.

    Those that are there are fetched again only by ``force``.

    Raises:
        CheckpointError: one cannot be had, or the disk is full.
    """
    names = list(sizes)
    needed = sum(sizes.values())
    if needed > _free(repo.clients_cache):
        raise _disk_full(repo, needed, "nothing was fetched")
    left = "whole files that had arrived stay in the Hub client's cache (hf cache ls)"

    def task(name: str, stop: Event) -> Path:
        return _download(repo, name, sizes[name], stop, force=force)

    try:
        with quiet(repo.options.progress):
            paths = in_parallel(task, names, repo.options.max_workers)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError) and is_full(error.__cause__):
            raise _disk_full(repo, needed, left) from error.__cause__
        raise
    return dict(zip(names, paths, strict=True))


def _download(repo: Repo, name: str, size: int, stop: Event, *, force: bool) -> Path:
    options = repo.options
    force = force or options.force_download
    bar = _bar(options.progress, stop)
    extra: dict[str, Any] = {"tqdm_class": bar} if _takes_bars() else {}
    if size and not force and not repo.offline:
        repo.ask(lambda: finish_leftover(repo, name, size, stop, bar), name)

    failed: list[OSError] = []

    def question() -> str:
        try:
            return download_once(force or bool(failed))
        except OSError as error:
            if _is_inconsistent(error):  # what an old client kept of a file is wrong: begin anew
                failed.append(error)
            raise

    def download_once(force: bool) -> str:
        return hf_hub_download(
            repo.repo_id,
            repo.inside(name),
            revision=repo.revision,
            cache_dir=options.cache_dir,
            token=options.token,
            local_files_only=repo.offline,
            force_download=force,
            library_name="vitgraph",
            **extra,
        )

    label = f"{repo.label}: {name}"
    return Path(repo.ask(lambda: patiently(question, label, stop), name))


def patiently(question: Callable[[], _T], label: str, stop: Event | None) -> _T:
    """The answer to a question that the client asks the Hub, once the Hub has one.

    Raises:
        GivenUpError: the Hub stayed busy, or connections broke.
        OSError, ValueError: what the client raised, if another try would not mend it.
    """
    failures = 0
    while True:
        if stop is not None and stop.is_set():
            raise Stopped
        try:
            return question()
        except (HTTPError, OSError, ValueError) as error:
            again = _passing(error)
            if again is None:
                raise
            # The client itself has tried several times before it says that it cannot connect.
            failures += 2 if isinstance(error, LocalEntryNotFoundError) else 1
            if failures >= ATTEMPTS:
                tries = f"given up after several tries ({again}): load again later"
                raise GivenUpError(f"{label}: {tries}") from error
            wait_to_try_again(label, failures, again, stop)


def _passing(error: BaseException | None) -> Exception | None:
    """What another try may mend, or None."""
    if isinstance(error, (LocalEntryNotFoundError, ValueError)) and error.__cause__ is not None:
        return _passing(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in BUSY:
            return TryAgain(f"the server answers {status}", retry_after(error.response))
        return None
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, OSError) and _is_inconsistent(error):
        return TryAgain("the body ended early")
    return None


def _is_inconsistent(error: OSError) -> bool:
    return "Consistency check failed" in str(error)


def _disk_full(repo: Repo, needed: int, left: str) -> CheckpointError:
    what = "fetching whole shards"
    return disk_full(repo.label, what, needed, repo.clients_cache, left)


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


# Progress bars


@contextmanager
def quiet(shown: bool) -> Iterator[None]:
    """Silence the bars of a client too old to be handed ours; its switch is one for the process."""
    always = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is not None
    if shown or _takes_bars() or always or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _takes_bars() -> bool:
    """Whether the client lets its callers choose the bar (not before 1.2)."""
    return "tqdm_class" in inspect.signature(hf_hub_download).parameters


def _bar(shown: bool, stop: Event) -> type[Any]:
    """The client's bar, which ends the download once ``stop`` is set."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            if not shown:
                keywords["disable"] = True
            super().__init__(*arguments, **keywords)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if stop.is_set():
                raise Stopped
            return super().update(n)

    return Bar
