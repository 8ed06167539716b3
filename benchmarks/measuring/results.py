"""Writes the results of a benchmark as JSON: six digits a number, one record a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGITS = 6
"""The significant digits of a float. Pages show up to four of them; with fewer here, some of these
would be rounded twice."""
WIDTH = 200
"""The longest line in characters, except that a record without lists in it is always one line."""


def write_results(path: Path, body: Mapping[str, Any]) -> None:
    """Write the results of a benchmark to a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(rounded(body), "") + "\n")


def rounded(value: Any) -> Any:
    """Return results with every float in them rounded to ``DIGITS`` significant digits."""
    if isinstance(value, Mapping):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _text(value: Any, indent: str) -> str:
    """Return ``value`` as JSON: on one line if it is short or flat, else with an entry a line."""
    line = json.dumps(value)
    is_record = isinstance(value, dict)
    pairs = [*value.items()] if is_record else [*enumerate(value if type(value) is list else ())]
    is_flat = not any(isinstance(entry, dict | list) for _, entry in pairs)
    if is_flat or len(indent) + len(line) <= WIDTH:
        return line
    entries = [
        f"{indent} {json.dumps(name) + ': ' if is_record else ''}{_text(entry, indent + ' ')}"
        for name, entry in pairs
    ]
    return line[0] + "\n" + ",\n".join(entries) + f"\n{indent}{line[-1]}"
