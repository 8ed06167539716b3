"""Load a tower: an encoder is built on the meta device, and gets all of its tensors or none.

The encoder's preprocessing is set to what the checkpoint's processor files say.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from encoders import Encoder, Publication
from encoders.contract import Preprocessor, warn_caller
from encoders.inputs import image_section
from encoders.stored_tensors import STORED_DTYPES, in_pairs

from .adapters import merge
from .cpu_facts import multiplies_bfloat16
from .errors import CheckpointError, DamagedError, legible
from .files.checkpoint import Checkpoint, TensorLocation, TowerTensor
from .files.index import PROCESSOR_FILES
from .files.tensor_file import read_into
from .files.tower_folder import PROJECTOR, usage
from .fp8 import SCALE_DTYPES, dequantise
from .hub.repo import Fetch, HubOptions
from .magnitudes import Magnitudes, check_magnitudes
from .match import find_encoder
from .opening import open_checkpoint, read_repaired
from .published import check_family
from .strict_json import JsonDict, JsonObject
from .tower import FoundTower

DtypeName: TypeAlias = Literal["auto", "bfloat16", "float16", "float32", "float64"]
"""The name of the dtype of an encoder; "auto" is the dtype in which the tower is stored."""
MOST_READERS = 4
"""The most threads that read tensors; reading and CRC-32 release Python's lock. On 4 CPU cores,
shared with other work, one thread read and checked 1.4 GiB/s of a file in the page cache, two 2.4,
four 3.8 and eight 3.7 (the best of twelve runs each)."""


def default_device() -> torch.device:
    """Return the first CUDA device, else MPS, else the CPU; ``device="auto"`` means this."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def load_encoder(
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
    dtype: torch.dtype | DtypeName | None = None,
    device: torch.device | str | None = None,
    family: str | None = None,
) -> Encoder:
    """Load only the vision tower of a checkpoint.

    Only the byte ranges of the tower are downloaded or, where that saves nothing, the shards that
    hold it. Every tensor of the tower must be there, with the shape that its config says, and no
    other tensor under its prefix. A LoRA adapter of peft beside the weights is merged into them.

    Args:
        repo_id_or_path: ``owner/name`` on the Hub, a folder, or one ``.safetensors`` file with its
            ``config.json`` beside it. An existing path wins.
        revision: branch, tag or commit of the repo; with a path it is an error.
        subfolder: folder inside the repo that holds the checkpoint.
        cache_dir: the Hub client's cache, if not its default.
        token: access token for private and gated repos, as the Hub client takes it.
        local_files_only: use the cache and send no request.
        force_download: download files again that are cached.
        fetch: ``"ranges"``, ``"shards"``, or ``"auto"``: ranges if they transfer at most nine
            tenths of what the shards would. A cached tower or shard is used either way. For a path
            nothing is downloaded: ``fetch``, ``force_download`` and ``cache_dir`` have no effect.
        max_workers: requests in flight at once.
        progress: show progress bars, in bytes.
        dtype: floating dtype of the encoder, or its name (``"bfloat16"``); None and ``"auto"``
            keep the stored dtype (if there are several, the one with most bytes). Weights in FP8
            are multiplied by their scales in float32 and rounded once to ``dtype``; None and
            ``"auto"`` are then the dtype that the config names, else bfloat16. If bfloat16 is kept
            on a CPU without instructions for it, the log says once that float32 is faster.
        device: where the encoder goes: a device or its name; ``"auto"`` is the first CUDA device,
            else MPS, else the CPU; None is torch's default device.
        family: name of the family (``"qwen3_vl"``) to take for a checkpoint whose model type is
            not known. The tensors must fit as strictly as ever; fields that the config lacks take
            the family's defaults.

    Returns:
        The encoder in eval mode, gradients off, preprocessing set up as the checkpoint says; if the
        checkpoint has no processor file for images, the family's defaults are used, with a warning.

    Raises:
        CheckpointError: the checkpoint cannot be found or read, is quantised or pickled, is or
            has an adapter that cannot be merged, has an unsupported model type, or its tensors do
            not fit; or a weight is not finite, or would not be in ``dtype``.
        ValueError: ``dtype`` is not a floating dtype, ``device`` is not one of this machine, or an
            unknown ``family`` or ``fetch``; nothing was downloaded yet.
        TypeError: ``repo_id_or_path`` is neither a string nor a path.
    """
    cast_dtype = _parse_dtype(dtype)
    check_family(family)
    source = (revision, subfolder, cache_dir, token, local_files_only)
    options = HubOptions(*source, force_download, fetch, max_workers, progress)
    target = parse_device(device)

    def read(checkpoint: Checkpoint) -> tuple[FoundTower, Encoder]:
        tower, encoder = find_encoder(checkpoint, family)
        locations = checkpoint.locate(tower.tower_files)
        dtype = cast_dtype or tower.dtype
        tensors = read_tensors(tower, tower.tensors, locations, dtype, target)
        _fill_encoder(encoder, tensors, tower.layout.transposed)
        return tower, encoder

    with torch.inference_mode(mode=False):  # else parameters could become inference tensors
        tower, encoder = read_repaired(repo_id_or_path, options, read)
        checkpoint = tower.contents.checkpoint
        if cast_dtype is None and tower.dtype == torch.bfloat16 and target.type == "cpu":
            _say_that_bfloat16_is_slow()
        if tower.adapter is not None:
            logging.getLogger("vitgraph").warning("%s: %s", checkpoint.label, tower.adapter)
        if tower.unread:
            warn_caller(
                f"{checkpoint.label}: {len(tower.unread)} tensors between the tower and the "
                f"language model are not loaded, the first {legible(tower.unread[0])}: the outputs "
                "are those of the bare tower"
            )
        files = _set_up_preprocessing(encoder, tower)
        encoder.published = _publication(tower, encoder, files, os.fspath(repo_id_or_path))
        return encoder.eval().requires_grad_(False)


def describe_encoder(
    repo_id_or_path: str | os.PathLike[str], options: HubOptions, family: str | None = None
) -> Encoder:
    """Return the encoder of a checkpoint on the meta device, with its preprocessing.

    It has every shape and no values; no tensor is read or downloaded. The arguments and errors are
    explained at :func:`load_encoder`, whose other keywords are in ``options``.
    """
    check_family(family)
    tower, encoder = find_encoder(open_checkpoint(repo_id_or_path, options), family)
    _set_up_preprocessing(encoder, tower)
    return encoder.eval().requires_grad_(False)


def _fill_encoder(
    encoder: Encoder, tensors: Mapping[str, Tensor], transposed: Collection[str]
) -> None:
    """Give an encoder on the meta device its ``tensors``, by their names in its ``state_dict``.

    Those in ``transposed`` are transposed. Each tensor is viewed in its shape in the encoder, which
    may have additional axes of length 1.
    """
    shapes = {name: value.shape for name, value in encoder.state_dict().items()}
    turned = {name: tensors[name].T.contiguous() for name in transposed if name in tensors}
    state = {name: tensor.view(shapes[name]) for name, tensor in {**tensors, **turned}.items()}
    encoder.load_state_dict(state, assign=True)
    everything = [*encoder.named_parameters(), *encoder.named_buffers()]
    unfilled = [name for name, value in everything if value.is_meta]
    assert not unfilled, (
        f"{type(encoder).__name__} makes tensors that no checkpoint holds: {unfilled}"
    )


def _parse_dtype(dtype: torch.dtype | DtypeName | None) -> torch.dtype | None:
    """Return the dtype that tensors are cast to, None to keep the stored one.

    A ValueError is raised if ``dtype`` is not one of the floating dtypes that towers are stored in.
    """
    if dtype is None or dtype == "auto":
        return None
    for stored_dtype in STORED_DTYPES.values():
        if dtype in (stored_dtype, str(stored_dtype).removeprefix("torch.")):
            return stored_dtype
    known_names = ", ".join(str(stored_dtype) for stored_dtype in STORED_DTYPES.values())
    raise ValueError(
        f"dtype={dtype!r}: an encoder runs in one of {known_names}: pass one, its name without "
        "'torch.', or 'auto' for the stored one"
    )


def parse_device(device: torch.device | str | None) -> torch.device:
    """Return the device that tensors are loaded to; None is torch's default device.

    A ValueError is raised if this machine has no such device, or if it is the meta device.
    """
    try:
        if device is None:
            target = torch.get_default_device()
        else:
            target = default_device() if device == "auto" else torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        # Torch raises a TypeError for a value that names no device, and one of the other errors if
        # the backend of the device is absent.
        reason = shorten(str(error).partition("\n")[0], 120, placeholder=" ...")
        raise ValueError(
            f"device={str(device)!r} is not one of this machine ({reason}): pass one that is, or "
            "leave it out for the CPU"
        ) from error
    if target.type == "meta":
        raise ValueError("device='meta' holds no weights: pass cpu, cuda, cuda:1, mps, ...")
    # ``torch.cuda.is_available`` would start CUDA, which forked workers could then not use.
    if device is None and target.type == "cpu" and torch.cuda.device_count():
        _say_that_the_gpu_is_idle()
    return target


@cache
def _say_that_the_gpu_is_idle() -> None:
    """Log once per process that an encoder goes to the CPU of a machine that has a GPU."""
    logging.getLogger("vitgraph").warning(
        "vitgraph: the encoder is loaded to the CPU although this machine has a CUDA device: pass "
        "device='auto' or 'cuda' to use it, or device='cpu' to leave this message out"
    )


@cache
def _say_that_bfloat16_is_slow() -> None:
    """Log once per process that an encoder keeps bfloat16 on a CPU without instructions for it."""
    if not multiplies_bfloat16():
        logging.getLogger("vitgraph").warning(
            "vitgraph: the encoder keeps its stored dtype, bfloat16, in which this CPU is several "
            "times slower than in float32: pass dtype='float32', or dtype='bfloat16' to leave this "
            "message out"
        )


def read_tensors(
    tower: FoundTower,
    wanted: Iterable[TowerTensor],
    locations: Mapping[str, TensorLocation],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Read tensors of a tower, by their names in the encoder, and merge its adapter into them.

    A tensor is read straight into its final memory or, if its dtype or device changes, into a
    temporary copy. Files are not mapped into memory, so that their pages do not count towards the
    memory of the process.

    Args:
        tower: the tower that was found in a checkpoint.
        wanted: the published tensors to read.
        locations: the place of each tensor of tower and adapter, by its published name.
        dtype: the dtype of the result.
        device: the device of the result.

    Raises:
        DamagedError: a fetched file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    label = tower.contents.checkpoint.label
    reads: list[tuple[TowerTensor, Tensor]] = []
    # A published tensor is a whole tensor of the encoder, or some rows of one, such as the queries
    # in a joined weight of queries, keys and values.
    for tensor in wanted:
        slot = tensor.slot
        assert slot is not None, f"{tensor.name} fits no tensor of the encoder"
        if slot.name not in tensors:
            shape = slot.joined_shape(tensor.entry.shape)
            tensors[slot.name] = torch.empty(shape, dtype=dtype, device=device)
        target = tensors[slot.name]
        rows = target.chunk(slot.chunks)[slot.chunk] if slot.chunks > 1 else target
        reads.append((tensor, rows))

    def place(read: tuple[TowerTensor, Tensor]) -> tuple[str, int]:
        location = locations[read[0].name]
        return str(location.path), location.offset

    reads.sort(key=place)
    # For a GPU only one thread reads, so that host memory holds one tensor at a time.
    readers = min(MOST_READERS, os.cpu_count() or 1) if device.type == "cpu" else 1
    with ThreadPoolExecutor(readers) as threads:
        largest = list(threads.map(lambda entry: fill_tensor(label, locations, *entry), reads))
    read_in_order = [tensor for tensor, _ in reads]
    check_magnitudes(zip(read_in_order, largest, strict=True), dtype, label)
    for tensor, target in reads:
        if tensor.slot is not None and tensor.slot.rotary_halves:
            target.copy_(in_pairs(target, tower.num_heads))
    if tower.adapter is not None and tower.adapter.changes:

        def read(tensor: TowerTensor, target: Tensor) -> None:
            fill_tensor(label, locations, tensor, target)

        merge(tower.adapter, tensors, read, lambda: tower.num_heads, label)
    return tensors


def fill_tensor(
    label: str, locations: Mapping[str, TensorLocation], tensor: TowerTensor, rows: Tensor
) -> Tensor:
    """Fill ``rows`` with a tensor of a file, and return the tensor's largest magnitude."""
    if tensor.scale is not None:
        weight = _read_scaled(label, locations, tensor, tensor.scale)
        rows.copy_(weight.view(rows.shape))
        return weight.abs().amax() if weight.numel() else weight.new_zeros(())
    stored_dtype = STORED_DTYPES[tensor.entry.dtype]
    is_direct = rows.dtype == stored_dtype and rows.device.type == "cpu"
    buffer = rows if is_direct else torch.empty(rows.shape, dtype=stored_dtype, device="cpu")
    magnitudes = Magnitudes(stored_dtype)
    _read(label, locations[tensor.name], tensor, buffer, magnitudes.add)
    if not is_direct:
        rows.copy_(buffer.to(rows.device))  # casts on the device: host memory holds only one copy
    return magnitudes.largest


def _read_scaled(
    label: str, locations: Mapping[str, TensorLocation], tensor: TowerTensor, scale: TowerTensor
) -> Tensor:
    """Read a weight in FP8 and its scales, and return their product in float32 on the CPU."""
    parts = []
    for part, dtype in ((tensor, torch.float8_e4m3fn), (scale, SCALE_DTYPES[scale.entry.dtype])):
        parts.append(torch.empty(part.entry.shape, dtype=dtype, device="cpu"))
        _read(label, locations[part.name], part, parts[-1], lambda piece: None)
    return dequantise(*parts)


def _read(
    label: str,
    location: TensorLocation,
    tensor: TowerTensor,
    buffer: Tensor,
    look: Callable[[memoryview], object],
) -> None:
    """Fill ``buffer``, on the CPU, with a tensor's bytes; ``look`` is called with each piece."""
    name, checked = f"{label}: {location.path.name}", location.crc32 is not None
    flat = buffer.view(-1).view(torch.uint8).numpy().data  # as bytes: numpy has no bfloat16
    try:
        with location.path.open("rb", buffering=0) as raw:
            value = read_into(raw, location.offset, flat, name, look, checked=checked)
    except FileNotFoundError as error:  # a DamagedError makes the caller fetch the file again
        raise DamagedError(f"{label}: {location.path}: removed while loading") from error
    except OSError as error:
        raise CheckpointError(f"{label}: {location.path}: {error.strerror}") from error
    if value != location.crc32:
        raise DamagedError(f"{name}: {tensor.name} is not what was downloaded: damaged")


def _publication(
    tower: FoundTower, encoder: Encoder, files: Mapping[str, JsonObject], repo_id: str
) -> Publication:
    """Return the published names, shapes and files with which ``save_pretrained`` saves a tower."""
    layout, state = tower.layout, encoder.state_dict()
    return Publication(
        files={"config": tower.described, **files},
        names={name: layout.published_names(name) for name in state},
        shapes={n: layout.published_shape(n, tuple(state[n].shape)) for n in layout.reshapes},
        transposed=[name for name in layout.transposed if name in state],
        rotary_halves={
            tensor.local: tower.num_heads
            for tensor in tower.tensors
            if tensor.slot is not None and tensor.slot.rotary_halves
        },
        projector_file=(PROJECTOR, sorted(tower.projector_names)),
        usage=usage(tower.contents.config, tower.family, layout),
        repo_id=None if tower.contents.checkpoint.commit is None else repo_id,
        commit=tower.contents.checkpoint.commit,
    )


def _set_up_preprocessing(encoder: Encoder, tower: FoundTower) -> dict[str, JsonDict]:
    """Give ``encoder`` the preprocessing of its checkpoint, and return the processor files.

    A bad value for images raises a CheckpointError now, a bad value for videos when the first video
    is prepared. The user is warned if no processor file says how images are prepared.
    """
    checkpoint = tower.contents.checkpoint
    contents = {name: checkpoint.read_json(f"{name}.json") for name in PROCESSOR_FILES}
    files = {name: content for name, content in contents.items() if content is not None}

    def bad_value(message: str) -> CheckpointError:
        return CheckpointError(f"{checkpoint.label}: processor files: {message}")

    describe = tower.family.processor_of
    described = describe(tower.contents.config) if describe is not None else None
    stated = files if files or described is None else {"preprocessor_config": described}
    preprocessor = encoder.preprocessor.with_files(stated, bad_value)
    if tower.layout.images_only:
        video_error = CheckpointError(f"{checkpoint.label}: {tower.layout.images_only}")
        preprocessor = preprocessor.without_videos(video_error)
    encoder.preprocessor = preprocessor
    # Repos of timm and StepFun publish no processor files, because their code has the values. This
    # library has the same values as defaults: no warning is needed for these layouts.
    if image_section(files) is None and tower.layout.processor_files:
        warn_caller(_defaults_used(tower, encoder.preprocessor))
    return files


def _defaults_used(tower: FoundTower, preprocessor: Preprocessor) -> str:
    """Return the warning that a checkpoint has no processor file for images.

    It lists the values of ``preprocessor`` that are used instead, the family's defaults.
    """
    checkpoint = tower.contents.checkpoint
    values, keyword = preprocessor.say_defaults(tower.contents.config)
    fix = "copy preprocessor_config.json from the original repo"
    if keyword:
        fix += f", or pass {keyword}=..."
    if checkpoint.offline:
        fix = f"load once with a connection, {fix}"
    return (
        f"{checkpoint.label}: no preprocessor_config.json or processor_config.json "
        f"{'in the cache ' if checkpoint.offline else ''}says how images are prepared, so "
        f"{tower.family.facts.title}'s defaults are used ({values}), which may not be what the "
        f"model was trained with: {fix}"
    )
