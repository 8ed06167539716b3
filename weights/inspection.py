"""Inspection of a checkpoint: what it holds, without reading a tensor of it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from .files.checkpoint import Route
from .hub.repo import Fetch, HubOptions
from .opening import open_checkpoint
from .published import check_family
from .strict_json import JsonDict

if TYPE_CHECKING:  # this module imports torch, which refusing a wrong argument need not wait for
    from .families.family import FamilyConfig


@dataclass(frozen=True)
class CheckpointInfo:
    """The vision tower that a checkpoint holds, and the bytes of its download."""

    name: str
    """The repo and revision of the checkpoint, or its folder."""
    commit: str | None
    """The commit of the repo; None for a folder."""
    family: str
    encoder: str
    """The name of the encoder class that loads the checkpoint."""
    config: FamilyConfig
    """The config of the encoder, read from the checkpoint."""
    layout: str
    prefix: str
    """The prefix of the names of the tower's tensors in the checkpoint."""
    tensors: int
    parameters: int
    bytes: int
    """The bytes of the tensors of tower and projector, in their stored dtypes."""
    dtype: str
    """The dtype that the tower is loaded in by default."""
    bytes_by_dtype: dict[str, int]
    """The bytes of tensors per stored dtype, such as "BF16". A tower with several is loaded in the
    dtype with most bytes."""
    shards: tuple[str, ...]
    """The names of the files that hold tensors of the tower."""
    checkpoint_tensors: int
    """The number of tensors in the whole checkpoint."""
    bytes_as_ranges: int
    """The bytes that loading would transfer as byte ranges if nothing were cached."""
    bytes_as_shards: int
    """The bytes that loading would transfer as whole files if nothing were cached."""
    cached: str
    """The part on this disk: the ``tower`` alone, the ``shards`` that hold all of it, ``some
    shards`` or ``nothing``; ``local`` for a folder."""
    fetch: Route
    """The part that loading would download: byte ``ranges``, whole ``shards`` or ``nothing``."""
    unfinished: bool
    """Whether an earlier download of byte ranges was interrupted; loading would resume it."""
    quantisation: str = ""
    """Which weights are in FP8, and the dtype they are loaded as, a sentence; empty if none is."""
    adapter: str = ""
    """What the adapter beside the weights does to the tower, a sentence; empty without one."""
    unread: tuple[str, ...] = ()
    """The names of tensors that look like a connector between the tower and a language model, and
    are not loaded, because no layout of the family names them."""
    head: bool = False
    """Whether the encoder has a learned head that makes one vector of an image (``pool="head"``).
    """

    def to_dict(self) -> JsonDict:
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
    fetch: Fetch = "auto",
    max_workers: int = 8,
    progress: bool = True,
    family: str | None = None,
) -> CheckpointInfo:
    """Return which tower a checkpoint holds, and what loading it would download.

    The config, the index and the headers of the files that hold the tower are read; tensors are not
    read or downloaded (unless a server cannot send parts of files). The tower is checked as
    ``load_encoder`` would.

    Args:
        repo_id_or_path: ``owner/name`` on the Hub, a folder, or one ``.safetensors`` file.
        revision: branch, tag or commit of the repo; with a path it is an error.
        subfolder: folder inside the repo that holds the checkpoint.
        cache_dir: the Hub client's cache, if not its default.
        token: access token for private and gated repos, as the Hub client takes it.
        local_files_only: use the cache and send no request.
        force_download: download configs and headers again that are cached.
        fetch: how ``load_encoder`` is to download: "ranges", "shards" or "auto"; the result says
            what that transfers.
        max_workers: requests in flight at once.
        progress: show progress bars, in bytes.
        family: name of the family to take for a checkpoint whose model type is not known.

    Raises:
        CheckpointError: ``load_encoder`` would raise it, too.
        ValueError: an unknown ``family`` or ``fetch``.
    """
    source = (revision, subfolder, cache_dir, token, local_files_only)
    options = HubOptions(*source, force_download, fetch, max_workers, progress)
    check_family(family)
    checkpoint = open_checkpoint(repo_id_or_path, options)
    # Imported here, because it imports torch (seconds), and the checkpoint may not exist.
    from .fp8 import say_scales
    from .match import find_encoder

    tower, encoder = find_encoder(checkpoint, family)
    tower_files, traffic = tower.tower_files, checkpoint.traffic(tower.tower_files)
    return CheckpointInfo(
        name=checkpoint.label,
        commit=checkpoint.commit,
        family=tower.family.name,
        encoder=type(encoder).__name__,
        config=tower.config,
        layout=tower.layout.name,
        prefix=tower_files.published.prefix,
        tensors=len(tower.tensors),
        parameters=sum(prod(tensor.entry.shape) for tensor in tower.tensors),
        bytes=sum(tower.bytes_by_dtype.values()),
        dtype=str(tower.dtype).removeprefix("torch."),
        bytes_by_dtype=tower.bytes_by_dtype,
        shards=tuple(tower_files.published.shards),
        checkpoint_tensors=tower_files.published.tensors,
        bytes_as_ranges=traffic.ranges,
        bytes_as_shards=sum(tower_files.published.shards.values()),
        cached=traffic.cached,
        fetch=traffic.route,
        unfinished=traffic.unfinished,
        quantisation=say_scales(tower.tensors, tower.dtype),
        unread=tuple(tower.unread),
        adapter="" if tower.adapter is None else str(tower.adapter),
        head=encoder.pooling_head is not None,
    )
