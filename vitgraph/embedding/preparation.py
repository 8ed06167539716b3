"""A digest of what turns images into features besides weights: class, config and preprocessor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from functools import partial

from torch import Tensor

from encoders import Encoder


def preparation_digest(encoder: Encoder) -> str:
    """Return a digest of an encoder's class, config and preprocessor, the same in every process.

    The preprocessor has the values of the checkpoint's processor files, or was set by hand.
    """
    parts = [type(encoder), encoder.config, encoder.preprocessor]
    return hashlib.sha256(_describe(parts, ()).encode()).hexdigest()[:40]


def _describe(value: object, inside: tuple[int, ...]) -> str:
    """Return a string that is equal for equal values, and that holds no address in memory.

    ``inside`` has the ids of the objects that contain ``value``, so that cycles end.
    """
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.tolist()}"
    if id(value) in inside:
        return "..."

    def inner(part: object) -> str:
        return _describe(part, (*inside, id(value)))

    name = inner(type(value))
    if isinstance(value, Mapping):
        return f"{name}{sorted((inner(key), inner(part)) for key, part in value.items())}"
    if isinstance(value, Set):
        return f"{name}{sorted(map(inner, value))}"
    if isinstance(value, Sequence):
        return f"{name}{[*map(inner, value)]}"
    if isinstance(value, BaseException):
        return f"{name}{inner(value.args)}"
    if isinstance(value, partial):
        return f"{name}{inner([value.func, value.args, value.keywords])}"
    try:
        return f"{name}{inner(vars(value))}" if vars(value) else _repr(value, name)
    except TypeError:  # an object without attributes, such as a dtype or a built-in function
        return _repr(value, name)


def _repr(value: object, name: str) -> str:
    """Return the text of a value whose attributes say nothing, or its class if that has an address.

    A function has its name.
    """
    text = repr(value)
    if " at 0x" not in text:
        return text
    return f"{name}{getattr(value, '__qualname__', '')}"
