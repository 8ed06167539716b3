"""Writes the results of a benchmark as JSON: four digits a number, one record a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGITS = 4
"""The significant digits of a float. Pages show at most as many."""
WIDTH = 200
"""The longest line in characters, except that a record is always one line."""


def write_results(path: Path, body: Mapping[str, Any]) -> None:
    """Write the results of a benchmark to a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_written(body))


def as_written(body: Mapping[str, Any]) -> str:
    """Return the text of a file of results."""
    return _text(_rounded(body), "", is_entry=False) + "\n"


def _rounded(value: Any) -> Any:
    """Return results with every float in them rounded to ``DIGITS`` significant digits."""
    if isinstance(value, Mapping):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _text(value: Any, indent: str, is_entry: bool) -> str:
    """Return ``value`` as JSON: on one line if it is short or a record, else with an entry a line.

    A record is an entry of a list, or a value without lists and mappings in it.
    """
    line = json.dumps(value)
    is_table = _has_lists_of_records(value) if is_entry else _is_nested(value)
    if not is_table or len(indent) + len(line) <= WIDTH:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{json.dumps(name)}: {_text(v, inner, False)}" for name, v in value.items()]
    else:
        lines = [_text(entry, inner, True) for entry in value]
    return line[0] + "\n" + ",\n".join(inner + one for one in lines) + f"\n{indent}{line[-1]}"


def _is_nested(value: Any) -> bool:
    """Return whether lists or mappings are entries of ``value``."""
    entries = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and any(isinstance(e, dict | list) for e in entries)


def _has_lists_of_records(value: Any) -> bool:
    """Return whether ``value`` is or holds, at any depth, a list of lists or mappings."""
    if isinstance(value, dict):
        return any(_has_lists_of_records(entry) for entry in value.values())
    return isinstance(value, list) and _is_nested(value)
