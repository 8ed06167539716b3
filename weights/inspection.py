"""Saying what a checkpoint holds without reading a tensor, and cutting the tower out of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from .contents import PROCESSOR_FILES, SINGLE, read_contents
from .errors import CheckpointError, DamagedError
from .hub import open_snapshot
from .hub_options import HubOptions
from .plan import Tower, build_encoder, find_tower
from .snapshot import Located, Piece, Snapshot, with_located
from .tower_cache import tower_header

COPY_BYTES = 16 << 20
"""Bytes moved at once; more is no faster."""


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
    """What it would transfer as whole files."""
    cached: str
    """What is here: ``tower``, ``shards``, ``some shards``, ``nothing``; ``local`` for a folder."""

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
    tower = find_tower(read_contents(open_snapshot(repo_id_or_path, options)))
    encoder = build_encoder(tower)
    by_dtype: Counter[str] = Counter()
    for source in tower.sources:
        by_dtype[source.entry.dtype] += source.entry.nbytes
    traffic = tower.contents.snapshot.traffic(tower.pieces)
    return CheckpointInfo(
        name=tower.contents.label,
        commit=tower.contents.snapshot.commit,
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
    )


def extract_encoder(
    repo_id_or_path: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | Path | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    fetch: str = "auto",
    max_workers: int = 8,
    progress: bool = True,
) -> Path:
    """Write the tower alone: the configs as published, and ``model.safetensors`` with its tensors.

    Names, dtypes and bytes stay as published, so that what reads the original reads the tower. The
    folder appears whole or not at all.

    Args:
        repo_id_or_path: as for :func:`load_encoder`, and so the other keywords.
        out_dir: the folder to make.
        overwrite: replace ``out_dir`` if it is there.

    Returns:
        ``out_dir``.

    Raises:
        CheckpointError: what ``load_encoder`` would raise, or ``out_dir`` is there already.
    """
    out = Path(out_dir)
    if out.exists() and not overwrite:
        raise CheckpointError(f"{out}: exists already; pass overwrite=True or another folder")
    options = HubOptions(
        revision, subfolder, cache_dir, token, local_files_only, force_download, fetch,
        max_workers, progress,
    )  # fmt: skip
    snapshot = open_snapshot(repo_id_or_path, options)
    tower = find_tower(read_contents(snapshot))
    build_encoder(tower)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        made = Path(folder) / "tower"
        made.mkdir()
        _copy_configs(snapshot, made)
        with_located(snapshot, tower.pieces, lambda found: _write(tower, found, made / SINGLE))
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    return out


def _copy_configs(snapshot: Snapshot, folder: Path) -> None:
    for name in ("config", *PROCESSOR_FILES):
        path = snapshot.optional(f"{name}.json")
        if path is not None:
            shutil.copyfile(path, folder / f"{name}.json")


def _write(tower: Tower, found: Mapping[str, Located], path: Path) -> None:
    with path.open("wb") as out:
        out.write(tower_header(tower.pieces))
        for piece in tower.pieces:
            _copy_tensor(f"{tower.contents.label}: {piece.file}", piece, found[piece.name], out)


def _copy_tensor(label: str, piece: Piece, place: Located, out: BinaryIO) -> None:
    left, value = piece.entry.nbytes, 0
    with place.path.open("rb") as file:
        file.seek(place.offset)
        while left and (chunk := file.read(min(left, COPY_BYTES))):
            out.write(chunk)
            value = crc32(chunk, value)
            left -= len(chunk)
    if left:
        raise CheckpointError(f"{label}: ends inside {piece.name}")
    if place.crc32 is not None and value != place.crc32:
        raise DamagedError(f"{label}: {piece.name} is not what was fetched: damaged on this disk")
