"""Write the tower of a checkpoint as a folder of its own, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .errors import CheckpointError, DamagedError, legible
from .files.checkpoint import Checkpoint, TensorLocation, TowerTensor
from .files.index import PROCESSOR_FILES, SINGLE
from .files.tensor_file import file_crc32, header_bytes
from .files.tower_folder import PROJECTOR
from .files.writing import flush, lock
from .hub.repo import Fetch, HubOptions
from .opening import read_repaired
from .published import check_family

if TYPE_CHECKING:
    from .tower import FoundTower

WRITTEN = {f"{name}.json" for name in ("config", *PROCESSOR_FILES)} | {SINGLE, PROJECTOR}
"""The names that files of an extracted tower may have."""


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
    fetch: Fetch = "auto",
    max_workers: int = 8,
    progress: bool = True,
    family: str | None = None,
) -> Path:
    """Write a folder with only the vision tower: ``model.safetensors`` and a config of the tower.

    Tensors keep their published dtypes and bytes (weights in FP8 are written as ``load_encoder``
    gives them), and their published names without the prefix of the tower. So the folder can be
    read by ``load_encoder``, by the class that transformers has for the tower
    (``Qwen3VLVisionModel.from_pretrained(out_dir)``), with no tensor missing or unexpected, by
    ``AutoModel`` if it knows that class (otherwise it rejects the folder), and by timm
    (``local-dir:``) if the repo was in timm's layout. A projector outside that class is written to
    ``projector.safetensors``. ``config.json`` describes the tower; its key ``vitgraph`` has the
    rest of the published config. Processor files are copied.

    The downloaded bytes stay in the cache, too (``vitgraph cache remove`` frees them).

    Args:
        repo_id_or_path: repo id, folder or ``.safetensors`` file; keywords that are not listed
            here mean the same as for :func:`load_encoder`.
        out_dir: the folder to make (``~`` is the home folder); it may exist if it is empty. It
            appears whole or not at all.
        overwrite: replace ``out_dir`` if it holds an extracted tower, and nothing else.

    Returns:
        ``out_dir``.

    Raises:
        CheckpointError: ``load_encoder`` would raise it, too; or ``out_dir`` cannot be replaced,
            is the checkpoint's own folder or lies inside or around it; or the disk is full.
        ValueError: an unknown ``family`` or ``fetch``; nothing was downloaded yet.
    """
    source = (revision, subfolder, cache_dir, token, local_files_only)
    options = HubOptions(*source, force_download, fetch, max_workers, progress)
    check_family(family)
    try:
        target = Path(out_dir).expanduser()
    except RuntimeError as error:  # "~name" of a user who does not exist
        raise CheckpointError(f"{legible(str(out_dir))}: {error}; pass another folder") from error
    out = Path(os.path.abspath(target))
    _check_target(out, overwrite)

    def write(checkpoint: Checkpoint) -> Path:
        _refuse_own_folder(checkpoint.folder.resolve(), out)
        # Imported here, because it imports torch (seconds), and the checkpoint may not exist.
        from .match import find_encoder

        tower, _ = find_encoder(checkpoint, family)
        _extract(tower, out, overwrite)
        return target

    return read_repaired(repo_id_or_path, options, write)


def _refuse_own_folder(origin: Path, out: Path) -> None:
    """Raise a :class:`CheckpointError` if writing ``out`` would change the checkpoint itself.

    It would change if ``out`` is ``origin``, the checkpoint's folder, or lies inside or around it.
    """
    target = out.resolve()
    if target == origin or target in origin.parents or origin in target.parents:
        raise CheckpointError(
            f"{out}: is the checkpoint itself, its parent or a folder inside it ({origin}), "
            "which is left as it is; pass a folder beside it"
        )


def _check_target(out: Path, overwrite: bool) -> None:
    """Raise a :class:`CheckpointError` unless the folder ``out`` can be made or replaced.

    The folder may be absent or empty or, with ``overwrite``, hold only files of an extracted tower.
    """
    try:
        if out.is_symlink():
            raise CheckpointError(f"{out}: is a link; pass the folder that it leads to, or another")
        if out.exists() and not out.is_dir():
            raise CheckpointError(f"{out}: is a file; pass a folder")
        present = sorted(out.iterdir()) if out.exists() else []
        parent = next(folder for folder in out.parents if folder.exists())
    except OSError as error:  # for example if a name is too long
        reason = f"cannot be read ({error.strerror}); pass another folder"
        raise CheckpointError(f"{legible(str(out))}: {reason}") from error
    plain_files = [path for path in present if path.is_file() and not path.is_symlink()]
    other_names = [p.name for p in present if p not in plain_files or p.name not in WRITTEN]
    if other_names:
        raise CheckpointError(
            f"{out}: is not an extracted tower but holds {', '.join(other_names[:3])}"
            f"{' and more' if len(other_names) > 3 else ''}, and is never replaced; pass another "
            "folder"
        )
    if present and not overwrite:
        raise CheckpointError(
            f"{out}: exists already; pass overwrite=True (--force) to replace it, or another folder"
        )
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise CheckpointError(f"{out}: cannot be made, as {parent} cannot be written to")


def _extract(tower: FoundTower, out: Path, overwrite: bool) -> None:
    """Write the tower to a folder beside ``out``, then rename that to ``out``.

    With ``overwrite``, an extracted tower in ``out`` is moved away first, and put back on an error.
    """
    tower_files = tower.tower_files
    locations = tower.contents.checkpoint.locate(tower_files)
    work = out.with_name(f".{out.name}.extract")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _lock_folder(out.parent):
            _restore(work, out)  # an earlier extraction may have been killed halfway
            _check_target(out, overwrite)
            needed_bytes = sum(tower.own_entry(tensor).nbytes for tensor in tower.tensors)
            free_bytes = shutil.disk_usage(out.parent).free
            if free_bytes < needed_bytes:
                raise CheckpointError(
                    f"{out.parent}: the disk is full: the tower needs {needed_bytes / 1e6:,.1f} MB "
                    f"and {free_bytes / 1e6:,.1f} MB are free; nothing was left behind"
                )
            try:
                work.mkdir()
                _write_folder(tower, locations, work / "new")
                if out.exists():
                    out.rename(work / "old")
                (work / "new").rename(out)
            finally:
                _restore(work, out)
    except OSError as error:
        raise CheckpointError(
            f"{out}: could not be written ({error.strerror or error}); nothing was left behind"
        ) from error


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs, so that one process writes a tower into the folder."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle)
        yield
    finally:
        os.close(handle)


def _restore(work: Path, out: Path) -> None:
    """Remove the working folder ``work`` of an extraction to ``out``.

    If ``out`` is missing, the tower that had been there is first moved back from ``work``.
    """
    if (work / "old").is_dir() and not out.exists():
        (work / "old").rename(out)
    shutil.rmtree(work, ignore_errors=True)


def _write_folder(tower: FoundTower, locations: Mapping[str, TensorLocation], folder: Path) -> None:
    folder.mkdir()
    for name, content in tower.tower_files.files().items():
        if name in WRITTEN:  # not the config of an adapter, which is merged
            (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(tower.described, indent=2) + "\n", "utf-8")
    files: dict[str, list[TowerTensor]] = {SINGLE: [], PROJECTOR: []}
    projector_names = tower.projector_names
    for tensor in tower.tensors:
        files[PROJECTOR if tensor.local in projector_names else SINGLE].append(tensor)
    for name, tensors in files.items():
        if tensors:
            _write_tensors(tower, tensors, locations, folder / name)


def _write_tensors(
    tower: FoundTower,
    tensors: Sequence[TowerTensor],
    locations: Mapping[str, TensorLocation],
    file: Path,
) -> None:
    label, changed = tower.contents.checkpoint.label, _changed_tensors(tower, tensors, locations)
    entries = [(tensor.local, tower.own_entry(tensor)) for tensor in tensors]
    with file.open("wb") as out:
        out.write(header_bytes(entries, {"format": "pt"}))
        for tensor in tensors:
            if tensor.name in changed:
                out.write(changed[tensor.name])
            else:
                _copy_tensor(f"{label}: {tensor.file}", tensor, locations[tensor.name], out)
    flush(file)


def _changed_tensors(
    tower: FoundTower, tensors: Sequence[TowerTensor], locations: Mapping[str, TensorLocation]
) -> dict[str, memoryview]:
    """Return the bytes of tensors in FP8 or changed by the tower's adapter, by published name."""
    merged = set() if tower.adapter is None else tower.adapter.changed
    wanted = [t for t in tensors if t.slot and (t.slot.name in merged or t.scale is not None)]
    if not wanted:
        return {}
    import torch  # seconds, which most extractions need not wait for again

    from encoders.stored_tensors import STORED_DTYPES, in_halves

    from .load import read_tensors

    changed: dict[str, memoryview] = {}
    for stored in dict.fromkeys(tower.own_entry(tensor).dtype for tensor in wanted):
        alike = [tensor for tensor in wanted if tower.own_entry(tensor).dtype == stored]
        dtype = STORED_DTYPES[stored]
        state = read_tensors(tower, alike, locations, dtype, torch.device("cpu"))
        for tensor in alike:
            assert tensor.slot is not None
            rows = state[tensor.slot.name].chunk(tensor.slot.chunks)[tensor.slot.chunk]
            if tensor.slot.rotary_halves:
                rows = in_halves(rows, tower.num_heads)
            changed[tensor.name] = rows.contiguous().view(-1).view(torch.uint8).numpy().data
    return changed


def _copy_tensor(label: str, tensor: TowerTensor, location: TensorLocation, out: BinaryIO) -> None:
    try:
        value = file_crc32(location.path, location.offset, tensor.entry.nbytes, out)
    except FileNotFoundError as error:  # a DamagedError makes the caller fetch the file again
        raise DamagedError(f"{label}: removed while it was being copied") from error
    if location.crc32 is not None and value != location.crc32:
        raise DamagedError(
            f"{label}: {tensor.name} is not what was downloaded: damaged on this disk"
        )
