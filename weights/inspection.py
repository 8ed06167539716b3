"""Saying what a checkpoint holds without reading a tensor, and cutting the tower out of it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from .contents import PROCESSOR_FILES, SINGLE, read_contents
from .errors import CheckpointError
from .hub import HubOptions, open_snapshot
from .plan import Source, Tower, build_encoder, find_tower
from .snapshot import Snapshot
from .tensor_file import read_header

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
        revision, subfolder, cache_dir, token, local_files_only, force_download, progress
    )
    tower = find_tower(read_contents(open_snapshot(repo_id_or_path, options)))
    encoder = build_encoder(tower)
    by_dtype: Counter[str] = Counter()
    for source in tower.sources:
        by_dtype[source.entry.dtype] += source.entry.nbytes
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
        revision, subfolder, cache_dir, token, local_files_only, force_download, progress
    )
    snapshot = open_snapshot(repo_id_or_path, options)
    tower = find_tower(read_contents(snapshot))
    build_encoder(tower)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        made = Path(folder) / "tower"
        made.mkdir()
        _copy_configs(snapshot, made)
        with (made / SINGLE).open("wb") as file:
            _write_tensors(tower, file)
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    return out


def _copy_configs(snapshot: Snapshot, folder: Path) -> None:
    for name in ("config", *PROCESSOR_FILES):
        path = snapshot.optional(f"{name}.json")
        if path is not None:
            shutil.copyfile(path, folder / f"{name}.json")


def _write_tensors(tower: Tower, out: BinaryIO) -> None:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for source in tower.sources:
        entry = source.entry
        table[source.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    out.write(len(head).to_bytes(8, "little") + head)
    for source in tower.sources:
        _copy_tensor(tower, source, out)


def _copy_tensor(tower: Tower, source: Source, out: BinaryIO) -> None:
    path = tower.contents.snapshot.path(source.file)
    start = read_header(path, f"{tower.contents.label}: {source.file}").data_start
    with path.open("rb") as file:
        file.seek(start + source.entry.begin)
        left = source.entry.nbytes
        while left and (chunk := file.read(min(left, COPY_BYTES))):
            out.write(chunk)
            left -= len(chunk)
    if left:
        raise CheckpointError(f"{tower.contents.label}: {source.file} ends inside {source.name}")
