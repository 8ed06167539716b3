"""What the forward of a module depends on besides tensors, submodules and hooks.

That is its class, a ``forward`` set on the instance, and plain values: the active adapter of a LoRA
layer and its scaling, the ``eps`` of a norm, the rate of a dropout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import repeat
from typing import TypeAlias

from torch import nn

from encoders.contract import GraphableEncoder

ValueSlot: TypeAlias = tuple[str, dict[str, object], str, object]
"""A plain value of a module: the module's name, its ``__dict__``, the attribute, a copy of it."""
LIBRARY = GraphableEncoder.__module__.partition(".")[0]
"""The package whose classes read no plain value that changes after they were built."""
UNREAD = frozenset(vars(nn.Module())) | {"in_features", "out_features", "elementwise_affine"}
"""Attributes of torch's layers that no forward of theirs reads."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Torch's layers that compute otherwise in train mode."""


def is_library(module: object) -> bool:
    """Return whether a module is of a class of the package ``encoders``."""
    return type(module).__module__.partition(".")[0] == LIBRARY


def is_plain_value(value: object) -> bool:
    """Return whether a value is a string, a bool, a number, or a list, tuple or dict of these."""
    if isinstance(value, dict):
        return all(map(is_plain_value, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(is_plain_value, value))
    return isinstance(value, str | bytes | int | float | complex)


def plain_values(modules: Mapping[str, nn.Module]) -> list[ValueSlot]:
    """Return the plain values of all modules whose classes are not the library's."""
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
