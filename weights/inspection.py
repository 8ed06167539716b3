"""Saying what a checkpoint holds without reading a tensor of it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from .hub import SAVING
from .hub_options import HubOptions
from .plan import Tower, find_encoder
from .snapshot import Traffic, with_headers
from .sources import open_source
from .tower_cache import TowerCache, cache_root


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint holds for us."""

    name: str
    """Repo and revision, or the folder."""
    commit: str | None
    family: str
    encoder: str
    """Class name of the encoder."""
    config: Any
    """The encoder's config, as it would be built."""
    layout: str
    prefix: str
    """What stands before the tower's names."""
    tensors: int
    parameters: int
    bytes: int
    """Of the tower's tensors, projector included, as stored."""
    dtype: str
    """What the tower is loaded as by default."""
    bytes_by_dtype: dict[str, int]
    """More than one entry where the stored dtypes are mixed; the largest wins."""
    shards: tuple[str, ...]
    """Files that hold the tower."""
    checkpoint_tensors: int
    """Tensors in the whole checkpoint."""
    bytes_as_ranges: int
    """What loading transfers of the weights as byte ranges, were nothing cached."""
    bytes_as_shards: int
    """What it would transfer as whole files, were nothing cached."""
    cached: str
    """What is here: ``tower``, ``shards``, ``some shards``, ``nothing``; ``local`` for a folder."""
    fetch: str
    """What loading would fetch now: ``ranges``, ``shards`` or ``nothing``."""
    unfinished: bool
    """Whether an earlier fetch of ranges was cut off, and would be gone on with."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)


def inspect_checkpoint(
    repo_id_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | Path | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    fetch: str = "auto",
    max_workers: int = 8,
    progress: bool = True,
) -> CheckpointInfo:
    """Say which tower a checkpoint holds; takes the arguments of :func:`load_encoder`.

    Reads the config, the index and the headers of the files that hold the tower; tensors are not
    read or fetched (unless a server cannot send parts of files). The tower is checked as
    ``load_encoder`` would.

    Raises:
        CheckpointError: what ``load_encoder`` would raise.
    """
    options = HubOptions(
        revision, subfolder, cache_dir, token, local_files_only, force_download, fetch,
        max_workers, progress,
    )  # fmt: skip
    snapshot = open_source(repo_id_or_path, options)
    tower, encoder = with_headers(snapshot, lambda: find_encoder(snapshot))
    by_dtype: Counter[str] = Counter()
    for source in tower.sources:
        by_dtype[source.entry.dtype] += source.entry.nbytes
    traffic = snapshot.traffic(tower.pieces)
    return CheckpointInfo(
        name=tower.contents.label,
        commit=snapshot.commit,
        family=tower.family.name,
        encoder=type(encoder).__name__,
        config=tower.config,
        layout=tower.layout.name,
        prefix=tower.place.prefix,
        tensors=len(tower.sources),
        parameters=sum(prod(source.entry.shape) for source in tower.sources),
        bytes=sum(by_dtype.values()),
        dtype=str(tower.dtype).removeprefix("torch."),
        bytes_by_dtype=dict(by_dtype.most_common()),
        shards=tuple(tower.files),
        checkpoint_tensors=len(tower.contents.files),
        bytes_as_ranges=traffic.ranges,
        bytes_as_shards=traffic.shards,
        cached=traffic.cached,
        fetch=_way(tower, traffic, os.fspath(repo_id_or_path), options),
        unfinished=_unfinished(tower, os.fspath(repo_id_or_path), options),
    )


def _way(tower: Tower, traffic: Traffic, repo_id: str, options: HubOptions) -> str:
    """What ``load_encoder`` would fetch."""
    if traffic.cached in ("local", "tower", "shards"):
        return "nothing"
    if options.fetch != "auto":
        return options.fetch
    shards = traffic.shards
    if traffic.cached == "some shards":
        headers = tower.contents.headers(tower.files)
        shards = sum(
            header.file_bytes
            for file, header in headers.items()
            if not _is_cached(file, tower, repo_id, options)
        )
    return "ranges" if traffic.ranges <= SAVING * shards else "shards"


def _is_cached(file: str, tower: Tower, repo_id: str, options: HubOptions) -> bool:
    name = f"{options.subfolder}/{file}" if options.subfolder else file
    commit = tower.contents.snapshot.commit
    found = try_to_load_from_cache(repo_id, name, options.cache_dir, revision=commit)
    return isinstance(found, str)


def _unfinished(tower: Tower, repo_id: str, options: HubOptions) -> bool:
    commit, root = tower.contents.snapshot.commit, cache_root(options.cache_dir)
    if commit is None:
        return False
    return TowerCache.of(root, repo_id, commit, options.subfolder).partial.is_dir()
