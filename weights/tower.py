"""The vision tower in a checkpoint: its tensors, read from the headers of the files that hold it.

Before data are read, towers are rejected whose tensors are quantised in a form that is not read,
empty, or wrapped by a training library.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod

import torch

from encoders.stored_tensors import STORED_DTYPES

from .adapters import Adapter, find_changes
from .configs import build_config
from .errors import CheckpointError, legible, problem_line
from .families.family import Family, FamilyConfig
from .files.adapter_file import KEPT, adapter_error, adapter_names
from .files.checkpoint import PublishedCheckpoint, TowerFiles, TowerTensor
from .files.index import Contents
from .files.tensor_file import TensorEntry
from .files.tower_folder import describe, transformers_class
from .fp8 import config_dtype, pair_scales
from .layouts import Layout, Prefix
from .strict_json import JsonDict

_QUANTISED = re.compile(
    "qweight|qzeros|scales|g_idx|weight_scale_2|scale_weight|weight_(packed|shape|zero_point)"
    "|comfy_quant|SCB|absmax|quant_map"
)
"""The last part of a tensor's name, if it belongs to a weight quantised in a form not read."""
_CONNECTOR = frozenset(
    (
        *("abstractor", "aligner", "connector", "image_projection", "merger", "mlp1"),
        *("mm_projector", "modality_projection", "multi_modal_projector", "perceiver_resampler"),
        *("projector", "resampler", "vision_projection", "vision_projector", "visual_projector"),
    )
)
"""Words of tensor names by which a connector between a tower and a language model is known."""
_ELSEWHERE = frozenset(("audio_tower", "layers", "language_model", "talker", "text_model"))
"""Words of tensor names that lie in no connector of a vision tower."""


@dataclass(frozen=True)
class FoundTower:
    """The vision tower that was found in a checkpoint: its family, config and tensors."""

    contents: Contents
    family: Family
    layout: Layout
    prefix: Prefix
    config: FamilyConfig
    tensors: Sequence[TowerTensor]
    """The published tensors that fill the encoder, those in FP8 with their scales."""
    tower_files: TowerFiles
    """The files to fetch: those of ``tensors``, of scales and of the adapter's tensors."""
    adapter: Adapter | None = None
    """The adapter beside the weights, None without one."""
    unread: Sequence[str] = ()
    """The names of tensors that look like a connector between the tower and a language model, and
    that no layout of the family names."""

    @property
    def described(self) -> JsonDict:
        """The ``config.json`` of a folder that holds only the tower, in its stored dtype."""
        dtype, has_projector = str(self.dtype).removeprefix("torch."), bool(self.projector_names)
        return describe(
            self.contents.config, self.family, self.layout, dtype, projector=has_projector
        )

    @property
    def num_heads(self) -> int:
        """The number of attention heads, for layouts whose query and key rows need reordering."""
        heads: int = asdict(self.config)["num_heads"]
        return heads

    @property
    def projector_names(self) -> set[str]:
        """Names, after the prefix, of projector tensors that are saved to a file of their own.

        The set is empty unless a class of transformers reads the tower: it has no projector.
        """
        if transformers_class(self.contents.config, self.family, self.layout) is None:
            return set()
        local = (tensor.local for tensor in self.tensors)
        return {name for name in local if name.startswith(self.layout.projector)}

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """The bytes of tensors by stored dtype, such as "BF16"; the dtype with most comes first."""
        counter: Counter[str] = Counter()
        for tensor in self.tensors:
            counter[tensor.entry.dtype] += tensor.entry.nbytes
        return dict(counter.most_common())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the tower is stored in; if there are several, the one with most bytes.

        It is the config's if there are weights in FP8.
        """
        if any(tensor.scale for tensor in self.tensors):
            return config_dtype(self.contents.config)
        return next(map(STORED_DTYPES.__getitem__, self.bytes_by_dtype), torch.get_default_dtype())

    def own_entry(self, tensor: TowerTensor) -> TensorEntry:
        """Return dtype, shape and size of a tensor in a folder that holds only the tower."""
        if tensor.scale is None:
            return tensor.entry
        name = next(name for name, dtype in STORED_DTYPES.items() if dtype == self.dtype)
        nbytes = prod(tensor.entry.shape) * self.dtype.itemsize
        return TensorEntry(name, tensor.entry.shape, 0, nbytes)


def read_tower(contents: Contents, family: Family, layout: Layout, prefix: Prefix) -> FoundTower:
    """Return the tower of a family in a checkpoint, whose names have this layout and prefix.

    Raises:
        CheckpointError: tensors of the tower cannot be read: they are quantised, wrapped or empty,
            or have other dtypes than ``STORED_DTYPES``, but for FP8 with scales.
    """
    label = contents.checkpoint.label
    local = layout.tower_names(prefix, contents.files, label)
    if adapter_names(local.values()):
        raise adapter_error(label)
    if any("base_layer" in name.split(".") for name in local.values()):
        raise CheckpointError(
            f"{label}: the tower's layers are wrapped for an adapter (base_layer): merge the "
            "adapter (merge_and_unload of peft) and save the model"
        )
    _refuse_quantised(local, label)
    under_prefix, shards = _tower_tensors(contents, layout, prefix, local)
    tensors, scales = pair_scales(under_prefix, contents.config, label)
    _refuse_dtypes(tensors, label)
    _refuse_empty(tensors, label)
    slots = [(tensor.slot, tensor.entry.shape) for tensor in tensors]
    joined_shapes = {slot.name: slot.joined_shape(shape) for slot, shape in slots if slot}
    shapes = {
        name: layout.published_shape(name, shape, inverse=True)
        for name, shape in joined_shapes.items()
    }
    config = build_config(family, contents.config, shapes, label)
    adapter, files = None, contents.adapter
    if files is not None:
        adapter = find_changes(files, family.layouts, joined_shapes, label)
        shards |= {files.file: files.file_bytes} if adapter.changes else {}
    published = contents.checkpoint.published or PublishedCheckpoint(
        prefix.full, len(contents.files), shards
    )
    fetched = [*tensors, *scales, *(adapter.tensors if adapter else ())]
    tower_files = TowerFiles(fetched, published, contents.small_files)
    found = (contents, family, layout, prefix, config, tensors, tower_files, adapter)
    return FoundTower(*found, _connectors(contents.files, layout, local))


def _tower_tensors(
    contents: Contents, layout: Layout, prefix: Prefix, local: Mapping[str, str]
) -> tuple[list[TowerTensor], dict[str, int]]:
    """Return the tower's tensors, and the size in bytes of each file that holds some of them."""
    tensors: dict[str, TowerTensor] = {}
    headers = contents.headers({contents.files[name] for name in local})
    for file, header in headers.items():
        index_names = {name for name in local if contents.files[name] == file}
        tower_names = [name for name in header.tensors if not name.startswith(KEPT)]
        header_names = set(layout.tower_names(prefix, tower_names, contents.checkpoint.label))
        if strays := sorted(index_names ^ header_names):
            only = f"only in {file}" if strays[0] in header_names else "only in the index"
            raise CheckpointError(
                f"{contents.checkpoint.label}: the index and {file} disagree about "
                f"{len(strays)} tensor{'s' * (len(strays) != 1)}, the first {legible(strays[0])} "
                f"({only}): download both again from one revision{contents.checkpoint.advice}"
            )
        for name in index_names:
            slot = layout.to_slot(local[name])
            tensors[name] = TowerTensor(name, local[name], file, header.tensors[name], slot)
    sizes = {file: header.file_bytes for file, header in headers.items()}
    return [tensors[name] for name in local], sizes


def _connectors(names: Iterable[str], layout: Layout, local: Mapping[str, str]) -> list[str]:
    """Return the tensors outside a bare tower that look like a connector to a language model."""
    if layout.projector and any(name.startswith(layout.projector) for name in local.values()):
        return []
    outside = [name for name in names if name not in local]
    return [
        name
        for name in outside
        if _CONNECTOR.intersection(words := name.split(".")) and not _ELSEWHERE.intersection(words)
    ]


def _refuse_quantised(local: Mapping[str, str], label: str) -> None:
    quantised = [
        name
        for name, local_name in local.items()
        if _QUANTISED.fullmatch(local_name.rpartition(".")[2])
    ]
    if quantised:
        raise CheckpointError(
            f"{label}: the tower is quantised ({len(quantised)} tensors like "
            f"{legible(quantised[0])}): load the original repo, or a quantised one that leaves "
            "the vision tower in bf16"
        )


def _refuse_empty(tensors: Iterable[TowerTensor], label: str) -> None:
    empty = [tensor.name for tensor in tensors if 0 in tensor.entry.shape]
    if empty:
        raise CheckpointError(
            f"{label}: {len(empty)} tensors of the tower are empty, the first {legible(empty[0])}, "
            "as DeepSpeed's ZeRO-3 leaves them on each rank: gather the weights before saving "
            "(stage3_gather_16bit_weights_on_model_save, or zero_to_fp32.py)"
        )


def _refuse_dtypes(tensors: Iterable[TowerTensor], label: str) -> None:
    odd = [t for t in tensors if t.entry.dtype not in STORED_DTYPES and t.scale is None]
    if wrong := [f"{tensor.name} is {tensor.entry.dtype}" for tensor in odd]:
        raise CheckpointError(
            f"{label}: the tower is quantised or not made of weights:\n  "
            + problem_line("wrong dtype", wrong)
            + f"\nTowers are loaded from {', '.join(STORED_DTYPES)}: use the original repo."
        )
