"""Loading a tower: built on meta, filled straight from the files, strictly or not at all."""

from __future__ import annotations

import os
from collections import defaultdict
from io import RawIOBase
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from encoders import VisionEncoder

from .contents import PROCESSOR_FILES, read_contents
from .errors import CheckpointError
from .hub import HubOptions, open_snapshot
from .plan import DTYPES, Source, Tower, build_encoder, find_tower
from .snapshot import Snapshot
from .tensor_file import read_header, read_into


def load_encoder(
    repo_id_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | Path | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    progress: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> VisionEncoder:
    """Load the vision tower of a checkpoint, and nothing else of it.

    Only the shards that hold tower tensors are fetched. Every tensor of the tower must be there,
    with the shape its config says, and nothing else under its prefix.

    Args:
        repo_id_or_path: ``owner/name`` on the Hub, a folder, or one ``.safetensors`` file with its
            ``config.json`` beside it. An existing path wins.
        revision: branch, tag or commit of the repo.
        subfolder: folder inside the repo that holds the checkpoint.
        cache_dir: the Hub client's cache, if not its default.
        token: access token for private and gated repos, as the Hub client takes it.
        local_files_only: use the cache and send no request.
        force_download: fetch again what is cached.
        progress: show the Hub client's progress bars.
        dtype: floating dtype of the encoder; None keeps the stored one (if mixed, that with most
            bytes).
        device: where the encoder goes; None is torch's default device.

    Returns:
        The encoder in eval mode, gradients off, preprocessing set up as the checkpoint says.

    Raises:
        CheckpointError: the checkpoint cannot be found or read, is an adapter, quantised or
            pickled, has an unsupported model type, or its tensors do not fit.
        ValueError: ``dtype`` is not a floating dtype.
    """
    if dtype is not None and dtype not in DTYPES.values():
        known = ", ".join(str(kind) for kind in DTYPES.values())
        raise ValueError(f"dtype={dtype}: an encoder runs in one of {known}")
    options = HubOptions(
        revision, subfolder, cache_dir, token, local_files_only, force_download, progress
    )
    snapshot = open_snapshot(repo_id_or_path, options)
    tower = find_tower(read_contents(snapshot))
    encoder = build_encoder(tower)
    target = torch.get_default_device() if device is None else torch.device(device)
    encoder.load_state_dict(read_tensors(tower, dtype or tower.dtype, target), assign=True)
    everything = chain(encoder.named_parameters(), encoder.named_buffers())
    left = [name for name, value in everything if value.is_meta]
    assert not left, f"{type(encoder).__name__} makes tensors that no checkpoint holds: {left}"
    try:
        encoder.preprocessor = encoder.preprocessor.with_files(read_processor_files(snapshot))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{snapshot.label}: processor files: {error}") from error
    return encoder.eval().requires_grad_(False)


def read_processor_files(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """What the checkpoint says about preprocessing: file name without ``.json`` -> its content."""
    found = ((name, snapshot.read_json(f"{name}.json")) for name in PROCESSOR_FILES)
    return {name: content for name, content in found if content is not None}


def read_tensors(tower: Tower, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Read every tensor of the tower, by our names, in ``dtype`` on ``device``.

    Each is read into the memory it stays in; one that changes dtype or device, through a copy that
    lives no longer than it takes. Nothing is mapped, so no page of a file counts as the process's.

    Raises:
        CheckpointError: a file that is not what its header promised.
    """
    tensors: dict[str, Tensor] = {}
    by_file: dict[str, list[Source]] = defaultdict(list)
    for source in tower.sources:
        by_file[source.file].append(source)
    for file, sources in by_file.items():
        _read_file(tower, file, sources, tensors, dtype, device)
    return tensors


def _read_file(
    tower: Tower,
    file: str,
    sources: list[Source],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    path = tower.contents.snapshot.path(file)
    label = f"{tower.contents.label}: {file}"
    header = read_header(path, label)
    try:
        with path.open("rb", buffering=0) as raw:
            for source in sorted(sources, key=lambda source: source.entry.begin):
                if header.tensors.get(source.name) != source.entry:
                    raise CheckpointError(f"{label}: changed while it was being loaded; load again")
                rows = _rows(tensors, source, dtype, device)
                _fill(rows, source, raw, header.data_start, label)
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read ({error})") from error


def _fill(rows: Tensor, source: Source, raw: RawIOBase, data_start: int, label: str) -> None:
    stored = DTYPES[source.entry.dtype]
    direct = rows.dtype == stored and rows.device.type == "cpu"
    buffer = rows if direct else torch.empty(rows.shape, dtype=stored, device="cpu")
    read_into(raw, data_start + source.entry.begin, _bytes_of(buffer), label)
    if not direct:
        rows.copy_(buffer)


def _rows(
    tensors: dict[str, Tensor], source: Source, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The memory that ``source`` is read into: a tensor of its own, or its rows of a joined one."""
    slot, shape = source.slot, source.entry.shape
    if slot.name not in tensors:
        joined = (shape[0] * slot.parts, *shape[1:]) if shape else shape
        tensors[slot.name] = torch.empty(joined, dtype=dtype, device=device)
    whole = tensors[slot.name]
    return whole.chunk(slot.parts)[slot.part] if slot.parts > 1 else whole


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; numpy has no bfloat16, bytes it has."""
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
