"""One repo of the Hub: how its files are addressed and asked for, and what messages call it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import huggingface_hub
from huggingface_hub import hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the client's library
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # not marked public
    validate_repo_id,
)

from .errors import CheckpointError
from .hub_options import HubOptions
from .obstacles import explain
from .remote import RemoteFile
from .snapshot import check_name
from .tower_cache import TowerCache, cache_root, clients_cache

_T = TypeVar("_T")


class Repo:
    """A repo at one revision, and from :meth:`pin` on at one commit."""

    def __init__(self, repo_id: str, options: HubOptions) -> None:
        self.repo_id = repo_id
        self.options = options
        self.revision = options.revision or "main"
        self.label = f"{repo_id}@{self.revision}"
        self.root = cache_root(options.cache_dir)
        """The folder of all kept towers."""
        self._remotes: dict[str, RemoteFile] = {}
        self.ask(lambda: validate_repo_id(repo_id), "it")
        if options.force_download and self.offline:
            raise CheckpointError(
                f"{repo_id}: force_download=True needs what local_files_only=True or "
                "HF_HUB_OFFLINE forbids"
            )

    @property
    def offline(self) -> bool:
        """Whether no request may be sent."""
        return self.options.local_files_only or huggingface_hub.constants.HF_HUB_OFFLINE

    @property
    def clients_cache(self) -> Path:
        """The folder that the Hub client keeps whole files in."""
        return clients_cache(self.options.cache_dir)

    @property
    def folder_name(self) -> str:
        """What caches call the folder of the repo."""
        return "models--" + self.repo_id.replace("/", "--")

    def pin(self, commit: str) -> None:
        """From here on everything is read at ``commit``."""
        self.revision = commit
        self._remotes.clear()

    def kept(self, commit: str) -> TowerCache:
        """Our own cache of the repo at a commit."""
        return TowerCache.of(self.root, self.repo_id, commit, self.options.subfolder)

    def inside(self, name: str) -> str:
        """The path of a file in the repo, of which the checkpoint may be a folder."""
        folder = self.options.subfolder
        return check_name(f"{folder}/{name}" if folder else name, self.label)

    def remote(self, name: str) -> RemoteFile:
        """A file on the Hub."""
        if name not in self._remotes:
            url = hf_hub_url(self.repo_id, self.inside(name), revision=self.revision)
            self._remotes[name] = RemoteFile(url, self.options.token, f"{self.label}: {name}")
        return self._remotes[name]

    def clients(self, name: str, revision: str | None = None) -> Path | bool | None:
        """A file in the client's cache; False if it is known not to exist; None if unknown."""
        found = try_to_load_from_cache(
            self.repo_id,
            self.inside(name),
            cache_dir=self.clients_cache,
            revision=revision or self.revision,
        )
        return Path(found) if isinstance(found, str) else None if found is None else False

    def ask(self, question: Callable[[], _T], name: str) -> _T:
        """The answer to a question about ``name``.

        Raises:
            CheckpointError: there is none, and why.
        """
        try:
            return question()
        except CheckpointError:
            raise
        except (EntryNotFoundError, HTTPError, OSError, ValueError) as error:
            raise CheckpointError(self.explain(error, name)) from error

    def explain(self, error: BaseException, name: str) -> str:
        """One line that says what went wrong with ``name``, and what to do about it."""
        page = f"{huggingface_hub.constants.ENDPOINT}/{self.repo_id}"
        return explain(error, self.label, self.revision, name, page)
