"""Say what a checkpoint holds without reading a tensor of it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from .hub.repo import HubOptions
from .published import check_family
from .source import open_checkpoint


@dataclass(frozen=True)
class CheckpointInfo:
    """The vision tower that a checkpoint holds, and what fetching it takes."""

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
    """Bytes of the tower's tensors, projector included, as stored."""
    dtype: str
    """The dtype that the tower is loaded in by default."""
    bytes_by_dtype: dict[str, int]
    """More than one entry where the stored dtypes are mixed; the largest wins."""
    shards: tuple[str, ...]
    """Files that hold the tower."""
    checkpoint_tensors: int
    """Tensors in the whole checkpoint."""
    bytes_as_ranges: int
    """Bytes of weights that loading transfers as byte ranges if nothing is cached."""
    bytes_as_shards: int
    """Bytes of weights that loading transfers as whole files if nothing is cached."""
    cached: str
    """What is here: ``tower``, ``shards``, ``some shards``, ``nothing``; ``local`` for a folder."""
    fetch: str
    """What loading would fetch now: ``ranges``, ``shards`` or ``nothing``."""
    unfinished: bool
    """Whether an earlier fetch of ranges was cut off, and would be continued."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, for JSON."""
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
    family: str | None = None,
) -> CheckpointInfo:
    """Say which tower a checkpoint holds; takes the arguments of :func:`load_encoder`.

    Reads the config, the index and the headers of the files that hold the tower; tensors are not
    read or fetched (unless a server cannot send parts of files). The tower is checked as
    ``load_encoder`` would.

    Raises:
        CheckpointError: what ``load_encoder`` would raise.
        ValueError: an unknown ``family`` or ``fetch``.
    """
    options = HubOptions(
        revision=revision,
        subfolder=subfolder,
        cache_dir=cache_dir,
        token=token,
        local_files_only=local_files_only,
        force_download=force_download,
        fetch=fetch,
        max_workers=max_workers,
        progress=progress,
    )
    check_family(family)
    snapshot = open_checkpoint(repo_id_or_path, options)
    from .match import find_encoder  # not before it is known that there is such a checkpoint

    tower, encoder = find_encoder(snapshot, family)
    wanted, traffic = tower.wanted, snapshot.traffic(tower.wanted)
    return CheckpointInfo(
        name=snapshot.label,
        commit=snapshot.commit,
        family=tower.family.name,
        encoder=type(encoder).__name__,
        config=tower.config,
        layout=tower.layout.name,
        prefix=wanted.published.prefix,
        tensors=len(wanted.tensors),
        parameters=sum(prod(tensor.entry.shape) for tensor in wanted.tensors),
        bytes=sum(tower.bytes_by_dtype.values()),
        dtype=str(tower.dtype).removeprefix("torch."),
        bytes_by_dtype=tower.bytes_by_dtype,
        shards=tuple(wanted.published.shards),
        checkpoint_tensors=wanted.published.tensors,
        bytes_as_ranges=traffic.ranges,
        bytes_as_shards=sum(wanted.published.shards.values()),
        cached=traffic.cached,
        fetch=traffic.route,
        unfinished=traffic.unfinished,
    )
