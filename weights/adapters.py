"""LoRA adapters of peft, merged into a tower by peft's rule: W + B A alpha / r.

The names of an adapter's tensors are those of the modules of the model that it was trained in,
which may be named in another layout than the checkpoint beside it. So each name is looked up in
every layout of the family. Adapters of other kinds, and tensors that fit no layout, are rejected if
they would change the tower.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod, sqrt

import torch
from torch import Tensor

from encoders.stored_tensors import STORED_DTYPES, in_pairs

from .errors import CheckpointError, legible
from .files.adapter_file import ADAPTER_CONFIG, ADAPTER_FILE, KEPT, AdapterFile
from .files.checkpoint import TowerTensor
from .layouts import Layout, Slot
from .strict_json import JsonObject

_WITHOUT_EFFECT = frozenset(
    (
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config"),
        *("ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode"),
        *("init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config"),
        *("lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core"),
        *("modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r"),
        *("rank_pattern", "revision", "runtime_config", "target_modules", "task_type"),
        *("trainable_token_indices", "use_rslora"),
        "fan_in_fan_out",  # peft ignores it for linear layers, and towers have no Conv1D
    )
)
"""The fields of peft's ``LoraConfig`` (0.21.2) that are read here, or that do not change how
saved weights are merged. An adapter with a value in any other field is rejected."""
_INITS = ("gaussian", "orthogonal", "eva")
"""The ways to initialise an adapter, beside true and false, that leave the base weights unchanged;
others, such as PiSSA, move a part of the base weights into the adapter."""
_PREFIX = "base_model.model."
_PATTERN = re.compile(r"[\w.\\^$|()\[\]*+-]{1,256}")
LONGEST_MODULE = 256
"""The most characters of a module's name, because patterns of a checkpoint are matched with it."""


@dataclass(frozen=True)
class Change:
    """The tensors of an adapter that change one place of the encoder's tensors.

    They are the two factors A and B, whose product times ``scale`` is added, or one tensor that
    replaces the published one.
    """

    slot: Slot
    tensors: tuple[TowerTensor, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Adapter:
    """The changes that an adapter makes to a tower; without any, it concerns other modules only."""

    changes: tuple[Change, ...]

    @property
    def tensors(self) -> list[TowerTensor]:
        """The adapter's tensors that have to be read."""
        return [tensor for change in self.changes for tensor in change.tensors]

    @property
    def changed(self) -> set[str]:
        """The names of the encoder's tensors that the adapter changes."""
        return {change.slot.name for change in self.changes}

    def __str__(self) -> str:
        """A sentence for users that says what the adapter does to the tower."""
        if not self.changes:
            return f"{ADAPTER_FILE} changes no tensor of the vision tower"
        return f"{ADAPTER_FILE} is merged into {len(self.changed)} tensors of the vision tower"


def find_changes(
    file: AdapterFile,
    layouts: Sequence[Layout],
    shapes: Mapping[str, tuple[int, ...]],
    label: str,
) -> Adapter:
    """Return the changes that the adapter in ``file`` makes to a tower.

    Args:
        file: the adapter's config and header.
        layouts: the layouts of the tower's family.
        shapes: the shapes of the tower's tensors, by the encoder's names.
        label: name of the checkpoint in messages.

    Raises:
        CheckpointError: an adapter that would change the tower, and is not LoRA or does not fit.
    """
    found: dict[str, tuple[Slot, dict[str, TowerTensor]]] = {}
    strays: list[str] = []
    for name, entry in file.tensors.items():
        target, role = _target(name)
        slot = _slot(target, layouts, shapes)
        if slot is None or role is None:
            if slot is not None or _in_tower(target, layouts, shapes):
                strays.append(name)
            continue
        tensor = TowerTensor(name, KEPT + name, file.file, entry)
        found.setdefault(target, (slot, {}))[1][role] = tensor
    if found or strays:
        _check_kind(file.config, label)
    roles = {target: "".join(sorted(tensors)) for target, (_, tensors) in found.items()}
    strays += [target for target, names in roles.items() if names not in ("=", "AB")]
    if strays:
        raise CheckpointError(
            f"{label}: the adapter changes the tower by {len(strays)} tensors that are not merged, "
            f"the first {legible(sorted(strays)[0])}: merge the adapter with peft "
            "(merge_and_unload) and save the model"
        )
    return Adapter(
        tuple(
            _change(target, slot, tensors, file.config, shapes, label)
            for target, (slot, tensors) in found.items()
        )
    )


def _target(name: str) -> tuple[str, str | None]:
    """Return the tensor of the model that an adapter's tensor changes, and its role there.

    The role is A or B, a factor of the change, or "=", the new value; None for other tensors.
    """
    target = name.removeprefix(_PREFIX)
    if target == name:
        return target, None
    module, _, rest = target.partition(".lora_")
    if rest in ("A.weight", "B.weight"):
        return f"{module}.weight", rest[0]
    return target.replace(".base_layer.", "."), None if rest else "="


def _slot(
    name: str, layouts: Iterable[Layout], shapes: Mapping[str, tuple[int, ...]]
) -> Slot | None:
    """Return the encoder's tensor that ``name`` means in one of the layouts, or None."""
    for layout in layouts:
        for prefix in layout.prefixes:
            local = layout.local_name(prefix, name)
            slot = None if local is None else layout.to_slot(local)
            if slot is not None and slot.name in shapes:
                return slot
    return None


def _in_tower(name: str, layouts: Sequence[Layout], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a tensor that fits no place lies under a tower or in a module of one."""
    for layout in layouts:
        for prefix in layout.prefixes:
            local = layout.local_name(prefix, name)
            is_inside = local is not None and (prefix.full or local.startswith(layout.projector))
            if local is not None and is_inside and not layout.is_ignored(local):
                return True
    words = name.split(".")
    modules = [".".join(words[:count]) for count in range(1, len(words))]
    parameters = [f"{module}.{end}" for module in modules for end in ("weight", "bias")]
    return any(_slot(parameter, layouts, shapes) for parameter in parameters)


def _check_kind(config: JsonObject, label: str) -> None:
    """Raise a :class:`CheckpointError` unless the config is one of plain LoRA."""
    kind, init = config.get("peft_type"), config.get("init_lora_weights", True)
    problem = ""
    if kind != "LORA":
        problem = f"peft_type={legible(str(kind))}"
    elif not (init is None or isinstance(init, bool) or init in _INITS):
        problem = f"init_lora_weights={legible(str(init))}, which changes the base weights, too"
    else:
        unknown = [name for name in config if name not in _WITHOUT_EFFECT and config[name]]
        problem = ", ".join(f"{legible(n)}={legible(str(config[n]))}" for n in unknown[:3])
    if problem:
        raise CheckpointError(
            f"{label}: {ADAPTER_CONFIG}: {problem}: only plain LoRA adapters of the tower are "
            "merged: merge this one with peft (merge_and_unload) and save the model"
        )


def _change(
    target: str,
    slot: Slot,
    tensors: Mapping[str, TowerTensor],
    config: JsonObject,
    shapes: Mapping[str, tuple[int, ...]],
    label: str,
) -> Change:
    """Return a change with its scale; tensors that do not fit raise a CheckpointError."""
    rows, *columns = (*shapes[slot.name], 1)[: max(len(shapes[slot.name]), 1)]
    shape = (rows // slot.chunks, *columns)
    if odd := [t for t in tensors.values() if t.entry.dtype not in STORED_DTYPES]:
        raise CheckpointError(
            f"{label}: the adapter's {odd[0].name} is {odd[0].entry.dtype}: must be one of "
            f"{', '.join(STORED_DTYPES)}"
        )
    if "=" in tensors:
        (tensor,) = tensors.values()
        if prod(tensor.entry.shape) != prod(shape):
            raise _misfit(label, tensor, shape)
        return Change(slot, (tensor,))
    a, b = tensors["A"], tensors["B"]
    module = target.removesuffix(".weight")
    rank = _pattern_value(config, "rank_pattern", "r", module, label)
    if not (a.entry.shape and (a.entry.shape[0], prod(a.entry.shape[1:])) == (rank, prod(columns))):
        raise _misfit(label, a, (rank, *columns))
    if not (b.entry.shape and (b.entry.shape[0], prod(b.entry.shape[1:])) == (shape[0], rank)):
        raise _misfit(label, b, (shape[0], rank))
    alpha = _pattern_value(config, "alpha_pattern", "lora_alpha", module, label)
    return Change(slot, (a, b), alpha / (sqrt(rank) if config.get("use_rslora") else rank))


def _misfit(label: str, tensor: TowerTensor, shape: Iterable[float]) -> CheckpointError:
    return CheckpointError(
        f"{label}: the adapter's {tensor.name} is {list(tensor.entry.shape)}, where the tower and "
        f"{ADAPTER_CONFIG} make {list(shape)}: use the adapter with the model it was trained on"
    )


def _pattern_value(
    config: JsonObject, patterns: str, default: str, module: str, label: str
) -> float:
    """Return the rank or alpha of a module: of the first pattern that its name ends with.

    Without such a pattern, it is the value of the field ``default``, or peft's default, 8.
    """
    table = config.get(patterns) or {}
    if not isinstance(table, Mapping):
        raise _bad_field(label, patterns, table)
    value = config.get(default, 8)
    for pattern, special in table.items():
        # A name that needs few repetitions is matched in a moment, whatever the pattern is.
        repeats = pattern.count("*") + pattern.count("+")
        nested = re.search(r"\)[*+]", pattern)
        unsafe = not _PATTERN.fullmatch(pattern) or repeats > 3 or nested
        if unsafe or len(module) > LONGEST_MODULE:
            raise _bad_field(label, patterns, pattern)
        try:
            matched = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise _bad_field(label, patterns, pattern) from error
        if matched:
            value = special
            break
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad_field(label, default, value)
    if not isfinite(value) or (default == "r" and value < 1):
        raise _bad_field(label, default, value)
    return value


def _bad_field(label: str, field: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{label}: {ADAPTER_CONFIG}: {field}: {legible(str(value))} is not read: use the file that "
        "peft wrote, or merge the adapter with peft (merge_and_unload)"
    )


def merge(
    adapter: Adapter,
    state: Mapping[str, Tensor],
    read: Callable[[TowerTensor, Tensor], None],
    heads: Callable[[], int],
    label: str,
) -> None:
    """Change the tower's tensors as the adapter says, in float32 or wider, rounded once.

    Args:
        adapter: the changes to make; those of tensors that ``state`` lacks are skipped.
        state: the tower's tensors by the encoder's names, changed in place.
        read: a function that fills a tensor on the CPU with the values of an adapter's tensor.
        heads: a function that returns the number of attention heads, for query and key rows that
            need reordering.
        label: name of the checkpoint in messages.
    """
    for change in adapter.changes:
        if change.slot.name not in state:
            continue
        whole, slot = state[change.slot.name], change.slot
        rows = whole.chunk(slot.chunks)[slot.chunk] if slot.chunks > 1 else whole
        dtype = torch.promote_types(rows.dtype, torch.float32)
        values: list[Tensor] = []
        for tensor in change.tensors:
            values.append(torch.empty(tensor.entry.shape, dtype=dtype, device="cpu"))
            read(tensor, values[-1])
        update = values[-1]
        if len(values) == 2:
            update = (update.flatten(1) @ values[0].flatten(1)) * change.scale
        update = update.reshape(rows.shape)
        update = (in_pairs(update, heads()) if slot.rotary_halves else update).to(rows.device)
        rows.copy_(update if len(values) == 1 else rows.to(dtype) + update)
        if not rows.isfinite().all():
            raise CheckpointError(
                f"{label}: the adapter makes values of {slot.name} that are not finite in "
                f"{rows.dtype}: use an adapter without NaN, or a wider dtype"
            )
