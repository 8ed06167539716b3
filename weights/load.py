"""Loading a tower: built on meta, filled straight from the files, strictly or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from encoders import VisionEncoder

from .errors import CheckpointError, DamagedError
from .hub_options import HubOptions
from .plan import DTYPES, Source, Tower, find_encoder
from .preprocessing import set_up_preprocessing
from .published_form import published_form
from .snapshot import Located, with_headers, with_located
from .sources import open_source
from .tensor_file import read_into

MOST_READERS = 4
"""Threads that read at once: reading and CRC-32 both let go of Python's lock."""


def load_encoder(
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
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> VisionEncoder:
    """Load the vision tower of a checkpoint, and nothing else of it.

    Only the byte ranges of the tower are fetched or, where that saves nothing, the shards that hold
    it. Every tensor of the tower must be there, with the shape its config says, and nothing else
    under its prefix.

    Args:
        repo_id_or_path: ``owner/name`` on the Hub, a folder, or one ``.safetensors`` file with its
            ``config.json`` beside it. An existing path wins.
        revision: branch, tag or commit of the repo; a path has none, and is refused with one.
        subfolder: folder inside the repo that holds the checkpoint.
        cache_dir: the Hub client's cache, if not its default.
        token: access token for private and gated repos, as the Hub client takes it.
        local_files_only: use the cache and send no request.
        force_download: fetch again what is cached.
        fetch: ``"ranges"``, ``"shards"``, or ``"auto"``: ranges if they transfer at most nine
            tenths of what the shards would. What is cached either way is used. A path needs no
            fetching: this, ``force_download`` and the cache mean nothing there.
        max_workers: requests in flight at once.
        progress: show progress bars, in bytes.
        dtype: floating dtype of the encoder; None keeps the stored one (if mixed, that with most
            bytes).
        device: where the encoder goes; None is torch's default device.

    Returns:
        The encoder in eval mode, gradients off, preprocessing set up as the checkpoint says; if it
        has no processor file that says how images are prepared, by the family's defaults, with a
        warning.

    Raises:
        CheckpointError: the checkpoint cannot be found or read, is an adapter, quantised or
            pickled, has an unsupported model type, or its tensors do not fit.
        ValueError: ``dtype`` is not a floating dtype, ``device`` is not one of this machine, or an
            unknown ``fetch``; nothing was fetched yet.
        TypeError: ``repo_id_or_path`` is neither text nor a path.
    """
    if dtype is not None and dtype not in DTYPES.values():
        known = ", ".join(str(kind) for kind in DTYPES.values())
        raise ValueError(f"dtype={dtype}: an encoder runs in one of {known}")
    options = HubOptions(
        revision, subfolder, cache_dir, token, local_files_only, force_download, fetch,
        max_workers, progress,
    )  # fmt: skip
    target = _check_device(device)
    snapshot = open_source(repo_id_or_path, options)
    tower, encoder = with_headers(snapshot, lambda: find_encoder(snapshot))
    encoder.load_state_dict(read_tensors(tower, dtype or tower.dtype, target), assign=True)
    everything = chain(encoder.named_parameters(), encoder.named_buffers())
    left = [name for name, value in everything if value.is_meta]
    assert not left, f"{type(encoder).__name__} makes tensors that no checkpoint holds: {left}"
    files = set_up_preprocessing(encoder, tower)
    names = encoder.state_dict()
    encoder.published = published_form(tower, names, files, os.fspath(repo_id_or_path))
    return encoder.eval().requires_grad_(False)


def _check_device(device: torch.device | str | None) -> torch.device:
    """The device that tensors are made on, once it is known to be there."""
    try:
        target = torch.get_default_device() if device is None else torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, ImportError) as error:  # how backends say they are away
        reason = shorten(str(error).partition("\n")[0], 120, placeholder=" ...")
        raise ValueError(
            f"device={str(device)!r} is not one of this machine ({reason}): pass one that is, or "
            "leave it out for the CPU"
        ) from error
    if target.type == "meta":
        raise ValueError("device='meta' holds no weights: pass cpu, cuda, cuda:1, mps, ...")
    return target


def read_tensors(tower: Tower, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Read every tensor of the tower, by our names, in ``dtype`` on ``device``.

    Each is read into the memory it stays in; one that changes dtype or device, through a copy that
    lives no longer than it takes. Nothing is mapped, so no page of a file counts as the process's.

    Raises:
        CheckpointError: a file that is not what its header promised, or cannot be fetched.
    """
    return with_located(
        tower.contents.snapshot, tower.pieces, lambda found: _read(tower, found, dtype, device)
    )


def _read(
    tower: Tower, found: Mapping[str, Located], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    places = {source.name: (found[source.name], source) for source in tower.sources}
    rows = {name: _rows(tensors, source, dtype, device) for name, (_, source) in places.items()}
    order = sorted(places, key=lambda name: (str(places[name][0].path), places[name][0].offset))

    def fill(name: str) -> None:
        _fill(rows[name], places[name][1], places[name][0], tower.contents.label)

    with ThreadPoolExecutor(_readers(device)) as pool:
        for _ in pool.map(fill, order):
            pass
    return tensors


def _readers(device: torch.device) -> int:
    """Threads that read: more are no faster, and one is enough to keep a GPU's copies busy."""
    return min(MOST_READERS, os.cpu_count() or 1) if device.type == "cpu" else 1


def _fill(rows: Tensor, source: Source, place: Located, label: str) -> None:
    stored = DTYPES[source.entry.dtype]
    direct = rows.dtype == stored and rows.device.type == "cpu"
    buffer = rows if direct else torch.empty(rows.shape, dtype=stored, device="cpu")
    name, view, checked = f"{label}: {place.path.name}", _bytes_of(buffer), place.crc32 is not None
    try:
        with place.path.open("rb", buffering=0) as raw:
            value = read_into(raw, place.offset, view, name, checked=checked)
    except FileNotFoundError as error:  # removed since it was located: fetched again if it can
        raise DamagedError(f"{label}: {place.path}: removed while loading") from error
    except OSError as error:
        raise CheckpointError(f"{label}: {place.path}: {error.strerror}") from error
    if value != place.crc32:
        raise DamagedError(f"{name}: {source.name} is not what was fetched: damaged on this disk")
    if not direct:
        rows.copy_(buffer.to(rows.device))  # a cast then takes memory there, and not twice here


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
