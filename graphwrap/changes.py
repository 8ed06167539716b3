"""What may not change after capture, which is compared before each call.

The forward of a module depends on weights, submodules and hooks, its class, a ``forward`` set on
the instance, and plain values, such as the active adapter of a LoRA layer and its scaling, the
``eps`` of a norm, the rate of a dropout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import repeat
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor, nn

from encoders.contract import is_library

from .torch_internals import HOOKS, MODULES, SLOTS, slots_of, versions_of

TensorSlot: TypeAlias = tuple[dict[str, object], str, Tensor]
"""A tensor of a module: the ``__dict__`` that holds it, its name there, and the tensor."""
ValueSlot: TypeAlias = tuple[str, dict[str, object], str, object]
"""A plain value of a module: the module's name, its ``__dict__``, the attribute, a copy of it."""
UNREAD = frozenset(vars(nn.Module())) | {"in_features", "out_features", "elementwise_affine"}
"""Attributes of torch's layers that no forward of theirs reads."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Torch's layers that compute otherwise in train mode."""
_REQUIRES_GRAD = attrgetter("requires_grad")


def all_modules(roots: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the named roots and all modules inside them, each once.

    A key is the root's name and the module's path below it, joined by dots.
    """
    seen: set[nn.Module] = set()
    return {k: v for name, root in roots.items() for k, v in root.named_modules(seen, name)}


def plain_tensors(roots: Mapping[str, nn.Module]) -> list[TensorSlot]:
    """Return the tensors of modules in ``roots`` that are neither parameters nor buffers."""
    attribute_dicts = [vars(module) for module in all_modules(roots).values()]
    return [
        (attributes, name, value)
        for attributes in attribute_dicts
        for name, value in attributes.items()
        if isinstance(value, Tensor)
    ]


class WeightGuard:
    """Remembers all parameters, buffers, submodules and hooks of modules, and weight addresses.

    A graph reads weights at fixed addresses. A replay sees weights updated in place; after they are
    rebound (``load_state_dict(assign=True)``, ``.to()``, a submodule replaced) it would compute
    with the old ones. The old storages are kept in memory, so that the check may run during a
    replay. Hooks registered or removed after capture would have no effect on replays; ``hooks``
    says whether that is an error. The ``roots`` are the modules, by a name for messages.

    The ``attributes`` are the result of :func:`plain_tensors` before the encoder ran. Tensors that
    the run replaced are not checked: ``torch.nn.utils.prune`` and ``weight_norm`` compute a layer's
    weight in every forward from parameters, and those are checked.

    The ``values`` are the result of :func:`plain_values` before the encoder ran: they, classes and
    replaced forwards must stay as they are, because a replay would go on with the old ones. None
    checks none of them.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        attributes: Sequence[TensorSlot] = (),
        values: Sequence[ValueSlot] | None = None,
        *,
        hooks: bool,
    ) -> None:
        modules = all_modules(roots)
        self._forward_state = ForwardState({} if values is None else modules, values or ())
        self._names = [
            (name, kind) for name in modules for kind in (SLOTS + HOOKS if hooks else SLOTS)
        ]
        self._slots = [slots_of(modules[name], kind) for name, kind in self._names]
        self._captured_slots = [dict(slots) for slots in self._slots]
        everything = [(slots, *entry) for slots in self._slots for entry in slots.items()]
        tensors = [(slots, name, x) for slots, name, x in everything if isinstance(x, Tensor)]
        plain = [slot for slot in attributes if slot[0].get(slot[1]) is slot[2]]
        # Comparing dicts takes two tensors of one element for equal if their values are, so that
        # tensors of one element are compared by identity.
        self._by_identity = [slot for slot in tensors if slot[2].numel() == 1] + plain
        self._tensors = [value for _, _, value in tensors + plain]
        # A weight rebound to another view of its memory may keep its address. A slice has another
        # size. Only a square weight still fits its module when it is transposed, so strides, which
        # take longest to read, are compared only for square weights.
        self._squares = [t for t in self._tensors if t.ndim == 2 and t.shape[0] == t.shape[1]]
        self._addresses, self._counts, self._strides = self._locations()
        first_values = [slots.get(name) for slots, name, _ in attributes]
        # Detached tensors keep the storages in memory.
        tensors_read = [x for x in (*self._tensors, *first_values) if isinstance(x, Tensor)]
        self._storage_owners = [tensor.detach() for tensor in tensors_read]
        self.storages = frozenset(t.untyped_storage().data_ptr() for t in self._tensors)
        """Addresses of the storages of weights. A result that lies in one of them has to be copied
        before the caller gets it."""
        self._parameters = [t for t in self._tensors if isinstance(t, nn.Parameter)]
        self._versioned = [t for t in self._tensors if not t.is_inference()]

    def _locations(self) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
        """Return addresses and entry counts of all weights, and the strides of square ones."""
        tensors = self._tensors
        return (
            list(map(Tensor.data_ptr, tensors)),
            list(map(Tensor.numel, tensors)),
            list(map(Tensor.stride, self._squares)),
        )

    def holds(self) -> bool:
        """Return whether weights, modules, hooks and addresses are the same as at capture.

        So must be what forwards depend on besides (:class:`ForwardState`). Without that, the check
        takes only 67 us for 32 blocks on a CPU core, because whole dicts are compared. In that
        comparison identical objects are equal, and two different tensors raise a RuntimeError,
        because the result of their ``==`` has no truth value.
        """
        try:
            same_slots = self._slots == self._captured_slots
        except RuntimeError:
            return False
        return (
            same_slots
            and self._locations() == (self._addresses, self._counts, self._strides)
            and all(slots.get(name) is value for slots, name, value in self._by_identity)
            and self._forward_state.holds()
        )

    def versions(self) -> list[int]:
        """Return how often each weight was written in place, as torch counts it."""
        return versions_of(self._versioned)

    def check(self) -> None:
        """Raise a RuntimeError if weights or modules changed: replays would be outdated."""
        if not self.holds():
            raise RuntimeError(
                f"{self._changed()} after capture, and replays would go on as before: undo it, or "
                'call release() and capture() again; backend="eager" follows such changes (they '
                "come from load_state_dict with assign=True, .to(), .half(), a module, tensor, "
                "value or hook set, an adapter switched, scaled or merged)"
            )

    def _changed(self) -> str:
        """Return which weight, module or hook has changed since capture, as a clause."""
        locations = zip(self._tensors, self._addresses, self._counts, strict=True)
        moved_ids = {id(x) for x, *location in locations if [x.data_ptr(), x.numel()] != location}
        squares = zip(self._squares, self._strides, strict=True)
        moved_ids |= {id(x) for x, stride in squares if x.stride() != stride}
        all_slots = zip(self._names, self._slots, self._captured_slots, strict=True)
        for (module_name, kind), slots, captured_slots in all_slots:
            for name in {**captured_slots, **slots}:
                new, old = slots.get(name), captured_slots.get(name)
                if kind in HOOKS and new is not old:
                    return f"forward hook {new or old!r} was registered or removed"
                if new is not old or id(old) in moved_ids:
                    noun = "module" if kind == MODULES else "weight"
                    return f"{noun} {f'{module_name}.{name}'.lstrip('.')!r} was rebound or moved"
        if (change := self._forward_state.changed()) is not None:
            return change
        names = [name for slots, name, value in self._by_identity if slots.get(name) is not value]
        return f"tensor {[*names, 'attribute'][0]!r} was rebound or moved"

    def check_gradients(self, pixel_values: Tensor) -> None:
        """Raise a ValueError if a call would need gradients, which a graph does not record."""
        if not torch.is_grad_enabled():
            return
        of_pixels = pixel_values.requires_grad
        if of_pixels or any(map(_REQUIRES_GRAD, self._parameters)):
            subject = "pixel_values" if of_pixels else "encoder parameters"
            raise ValueError(
                f"{subject} require grad and grad mode is on, but a graph records no gradients: "
                "wrap the call in torch.no_grad(), or encoder.requires_grad_(False), or call the "
                "encoder itself"
            )


def is_plain_value(value: object) -> bool:
    """Return whether a value is a string, a bool, a number, or a list, tuple or dict of these."""
    if isinstance(value, dict):
        return all(map(is_plain_value, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(is_plain_value, value))
    return isinstance(value, str | bytes | int | float | complex)


def plain_values(modules: Mapping[str, nn.Module]) -> list[ValueSlot]:
    """Return the plain values of all modules whose classes are not the library's.

    The library's classes read no plain value that changes after they were built.
    """
    return [
        (name, vars(module), key, deepcopy(value))
        for name, module in modules.items()
        if not is_library(module)
        for key, value in vars(module).items()
        if _may_be_read(module, key) and is_plain_value(value)
    ]


def _may_be_read(module: nn.Module, name: str) -> bool:
    """Return whether the forward of a module may read its attribute ``name``."""
    if name == "training":  # a tower is switched between train() and eval() without other results
        drops = isinstance(module, DROPOUTS) and module.p > 0
        return drops or isinstance(module, BATCH_NORMS)
    return name not in UNREAD


class ForwardState:
    """Remembers class, replaced ``forward`` and plain values of modules, and compares them.

    For a tower of 265 modules, :meth:`holds` takes 17 us on a CPU core.

    Args:
        modules: the modules, by a name for messages.
        values: the result of :func:`plain_values` before the modules ran. Values that the run
            changed, such as a counter of calls, are not compared.
    """

    def __init__(self, modules: Mapping[str, nn.Module], values: Sequence[ValueSlot]) -> None:
        self._modules = dict(modules)
        self._attributes = [vars(module) for module in modules.values()]
        self._types = list(map(type, modules.values()))
        self._forwards = self._read_forwards()
        kept = [slot for slot in values if slot[1].get(slot[2]) == slot[3]]
        self._value_names = [f"{name}.{key}".lstrip(".") for name, _, key, _ in kept]
        self._owners, self._keys = [slot[1] for slot in kept], [slot[2] for slot in kept]
        self._values = [slot[3] for slot in kept]

    def _read_forwards(self) -> list[object]:
        return list(map(dict.get, self._attributes, repeat("forward")))

    def holds(self) -> bool:
        """Return whether classes, forwards and plain values are the same as at capture."""
        try:
            return (
                list(map(type, self._modules.values())) == self._types
                and self._read_forwards() == self._forwards
                and list(map(dict.get, self._owners, self._keys)) == self._values
            )
        except (RuntimeError, ValueError):  # a tensor or array has taken the place of a number
            return False

    def changed(self) -> str | None:
        """Return what has changed since capture, as a clause; None if nothing has."""
        forwards = self._read_forwards()
        for number, (name, module) in enumerate(self._modules.items()):
            if type(module) is not self._types[number]:
                return f"the class of module {name!r} was changed"
            if forwards[number] != self._forwards[number]:
                return f"the forward of module {name!r} was replaced"
        slots = zip(self._value_names, self._owners, self._keys, self._values, strict=True)
        for name, owner, key, value in slots:
            new = owner.get(key)
            if not is_plain_value(new) or new != value:
                return f"{name!r} was changed from {value!r}"
        return None
