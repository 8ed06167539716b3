"""One repo of the Hub: how its files are addressed and asked for, and what messages call it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import huggingface_hub
from huggingface_hub import hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError
    EntryNotFoundError,
    HTTPError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # not marked public
    validate_repo_id,
)

from ..cache.store import Store, cache_root
from ..errors import CheckpointError
from ..snapshot import check_name
from .http import RemoteFile, Unreachable
from .messages import explain
from .options import HubOptions

_T = TypeVar("_T")


class Repo:
    """A repo at one revision, and from :meth:`pin` on at one commit."""

    def __init__(self, repo_id: str, options: HubOptions) -> None:
        self.repo_id = repo_id
        self.options = options
        self.revision = options.revision or "main"
        self.label = f"{repo_id}@{self.revision}"
        self.root = cache_root(options.cache_dir)
        """The folder of all that we keep."""
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
    def clients_folder(self) -> Path:
        """The folder of the repo in the Hub client's cache."""
        cache = Path(self.options.cache_dir or huggingface_hub.constants.HF_HUB_CACHE)
        return cache.expanduser() / ("models--" + self.repo_id.replace("/", "--"))

    def pin(self, commit: str) -> None:
        """From here on everything is read at ``commit``."""
        self.revision = commit
        self._remotes.clear()

    def store(self, commit: str) -> Store:
        """Return the folder of what we keep of the repo at a commit."""
        return Store.of(self.root, self.repo_id, commit, self.options.subfolder)

    def inside(self, name: str) -> str:
        """Return the path of a file in the repo, of which the checkpoint may be a folder."""
        folder = self.options.subfolder
        return check_name(f"{folder}/{name}" if folder else name, self.label)

    def remote(self, name: str) -> RemoteFile:
        """Return a file on the Hub."""
        if name not in self._remotes:
            url = hf_hub_url(self.repo_id, self.inside(name), revision=self.revision)
            self._remotes[name] = RemoteFile(url, self.options.token, f"{self.label}: {name}")
        return self._remotes[name]

    def listing(self) -> RemoteFile:
        """Return the description of the repo, which lists its files."""
        endpoint = huggingface_hub.constants.ENDPOINT
        url = f"{endpoint}/api/models/{self.repo_id}/revision/{self.revision}"
        return RemoteFile(url, self.options.token, f"{self.label}: the list of files")

    def clients_file(self, name: str, revision: str | None = None) -> Path | bool | None:
        """Return a file in the client's cache; False if it is known not to exist, else None."""
        found = try_to_load_from_cache(
            self.repo_id,
            self.inside(name),
            cache_dir=self.clients_folder.parent,
            revision=revision or self.revision,
        )
        return Path(found) if isinstance(found, str) else None if found is None else False

    def ask(self, question: Callable[[], _T], name: str) -> _T:
        """Return the answer to a question about the file ``name``.

        Raises:
            CheckpointError: there is no answer, and why.
        """
        try:
            return question()
        except CheckpointError:
            raise
        except (EntryNotFoundError, HTTPError, OSError, Unreachable, ValueError) as error:
            raise CheckpointError(self.explain(error, name)) from error

    def explain(self, error: BaseException, name: str) -> str:
        """Return one line that says what went wrong with ``name``, and what to do about it."""
        page = f"{huggingface_hub.constants.ENDPOINT}/{self.repo_id}"
        return explain(error, self.label, self.revision, name, page)
