"""Read the ``config.json`` of a checkpoint: sections, aliases, defaults, unsupported values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Choice = TypeVar("Choice")


def find_section(config: Mapping[str, object], *names: str) -> Mapping[str, object]:
    """Return the first section among ``names`` that exists ("a.b" is b in a), else ``config``."""
    for dotted in names:
        section: object = config
        for name in dotted.split("."):
            section = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping):
            return section
    return config


def find_type(config: Mapping[str, object], section: Mapping[str, object]) -> str:
    """Return the model type of the tower's ``section``, else of the whole ``config``, else ""."""
    return str(section.get("model_type") or config.get("model_type") or "")


def read_field(section: Mapping[str, object], *names: str, default: object = None) -> object:
    """Return the value in ``section`` under one of ``names`` (aliases), or ``default``.

    Raises:
        ValueError: no name is there and ``default`` is None, or two names have different values.
    """
    present = {name: section[name] for name in names if section.get(name) is not None}
    values = list(present.values())
    if any(value != values[0] for value in values[1:]):
        fields = " and ".join(f"{name}={value!r}" for name, value in present.items())
        raise ValueError(f"config fields {fields} are names of one thing: give it one value")
    if present:
        return values[0]
    if default is None:
        raise ValueError(
            f"the vision config has no {' or '.join(names)} and there is no published default: "
            "use the config.json of the original repo"
        )
    return default


def _bad_value(
    section: Mapping[str, object], names: tuple[str, ...], value: object, rule: str
) -> ValueError:
    """Return the error for a value that breaks ``rule``, by the one of ``names`` that is there."""
    name = next((name for name in names if section.get(name) is not None), names[0])
    return ValueError(f"config field {name}={value!r}: must be {rule}")


def read_size(
    section: Mapping[str, object], *names: str, default: object = None, limit: int = 1 << 20
) -> int:
    """Return the integer, 1 to ``limit``, under one of ``names`` (aliases); [14, 14] means 14."""
    value = read_field(section, *names, default=default)
    if isinstance(value, (list, tuple)) and value and value.count(value[0]) == len(value):
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
        raise _bad_value(section, names, value, f"an integer from 1 to {limit}")
    return value


def read_count(section: Mapping[str, object], name: str, default: int) -> int:
    """Return the integer, 0 to 1024, under ``name``, such as a number of registers."""
    value = read_field(section, name, default=default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1024:
        raise ValueError(f"config field {name}={value!r}: must be an integer from 0 to 1024")
    return value


def read_indices(
    section: Mapping[str, object], name: str, default: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the list of integers under ``name``, such as indices of blocks, or ``default``."""
    value = read_field(section, name, default=default)
    if not isinstance(value, (list, tuple)) or any(type(number) is not int for number in value):
        raise ValueError(f"config field {name}={value!r}: must be a list of integers")
    return tuple(value)


def read_layer(section: Mapping[str, object], *names: str, default: int) -> int:
    """Return the number of a layer, negative from the end, under one of ``names``, or ``default``.

    Raises:
        ValueError: a value that is not an integer.
    """
    value = read_field(section, *names, default=default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad_value(section, names, value, "an integer")
    return value


def read_flag(section: Mapping[str, object], *names: str, default: bool) -> bool:
    """Return the boolean under one of ``names`` (aliases), or ``default``."""
    value = read_field(section, *names, default=default)
    if not isinstance(value, bool):
        raise _bad_value(section, names, value, "true or false")
    return value


def read_epsilon(section: Mapping[str, object], *names: str, default: float | None) -> float:
    """Return the epsilon of a norm under one of ``names``, 1e-12 to 1: 0 could divide by 0."""
    value = read_field(section, *names, default=default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-12 <= value <= 1:
        raise _bad_value(section, names, value, "a number from 1e-12 to 1")
    return float(value)


def read_ratio(section: Mapping[str, object], *names: str, default: float) -> float:
    """Return a number above 0 and up to 64, such as ``mlp_ratio``, under one of ``names``."""
    value = read_field(section, *names, default=default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 64:
        raise _bad_value(section, names, value, "a number above 0 and at most 64")
    return float(value)


def read_rope_theta(section: Mapping[str, object]) -> float:
    """Return the base of the rotary angles: ``rope_theta``, at most 10^12.

    ``rope_theta`` in ``rope_parameters`` (``rope_scaling`` in older configs) has precedence.

    Raises:
        ValueError: a number out of range, or a kind of rotary positions that is not supported.
    """
    require_value(section, "head_dim", None)  # angles are for hidden_size / num_heads columns
    name = "rope_parameters" if section.get("rope_scaling") in (None, {}) else "rope_scaling"
    rope = {} if section.get(name) is None else section[name]
    if not isinstance(rope, Mapping):
        raise ValueError(f"config field {name}={rope!r}: must be an object with rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    require_value({"rope_type": kind}, "rope_type", "axial", "default")
    theta = read_field(rope, "rope_theta", default=read_field(section, "rope_theta", default=1e4))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1 <= theta <= 1e12:
        raise ValueError(f"config field rope_theta={theta!r}: must be a number from 1 to 10^12")
    return float(theta)


def read_choice(
    section: Mapping[str, object], name: str, *choices: Choice, default: Choice
) -> Choice:
    """Return the field ``name``, which must be one of ``choices``; ``default`` if it is missing."""
    value = section.get(name, default)
    for choice in choices:
        if value == choice:
            return choice
    allowed = " or ".join(map(repr, choices))
    given = f"field {name}={value!r}" if name in section else f"has no {name}; its default {value}"
    raise ValueError(f"config {given} is not implemented: must be {allowed}")


def require_value(
    section: Mapping[str, object], name: str, *allowed: object, default: object = None
) -> None:
    """Raise a ValueError unless the value of the field ``name`` is one of ``allowed``.

    A missing field counts as ``default``; if that is None, as the first of ``allowed``.
    """
    read_choice(section, name, *allowed, default=allowed[0] if default is None else default)


def require_divisible(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise a ValueError, with the names of both numbers, unless ``divisor`` divides ``value``."""
    if value % divisor:
        raise ValueError(f"config: {name}={value} must be a multiple of {divisor_name}={divisor}")


def require_sizes(fields: Mapping[str, object], signed: str | None = None) -> None:
    """Raise a ValueError unless the sizes of a config are positive and its heads divide its width.

    Sizes are all integers in ``fields``, the config's fields by name, but the field ``signed``. If
    there is a ``head_size``, the heads need not divide the width.
    """
    sizes = {name: value for name, value in fields.items() if type(value) is int}
    for name, value in sizes.items():
        if value < 1 and name != signed:
            raise ValueError(f"config: {name}={value} must be at least 1")
    if "num_heads" in sizes and "head_size" not in sizes:
        require_divisible("hidden_size", sizes["hidden_size"], "num_heads", sizes["num_heads"])
