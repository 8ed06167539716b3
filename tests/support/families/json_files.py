"""The one form in which the JSON files of the families are written.

``python tests/support/families/json_files.py`` rewrites all of ``weights/families/facts/*.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from weights.published import FOLDER

WIDTH = 100  # columns
STEP = 2  # columns per level


def formatted(value: Any, indent: int = 0, taken: int = 0) -> str:
    """Write a value as JSON that people read and compare line by line.

    A value that fits into the rest of its line stays there. Otherwise its members stand between
    brackets of their own lines: as many per line as fit, but one member of several lines, and one
    object of a list, stands alone. An object without lists and objects in it, of a list of
    objects, is never broken.

    Args:
        value: anything that JSON can hold.
        indent: columns before the line that the value begins in.
        taken: columns of that line that are used already, before and after the value.
    """
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or indent + taken + len(line) <= WIDTH:
        return line
    first, last = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([first, *_lines(value, indent + STEP), " " * indent + last])


def _lines(value: dict[str, Any] | list[Any], indent: int) -> Iterator[str]:
    """Write the members of an object or a list, each line with its indent and its comma."""
    rows: list[list[str]] = []
    alone = isinstance(value, list) and any(isinstance(member, dict) for member in value)
    for member in _members(value, indent):
        full = bool(rows) and len(", ".join([*rows[-1], member])) + indent + 1 > WIDTH
        if not rows or alone or full or "\n" in member or "\n" in rows[-1][-1]:
            rows.append([])
        rows[-1].append(member)
    for number, row in enumerate(rows, 1):
        yield " " * indent + ", ".join(row) + ("," if number < len(rows) else "")


def _members(value: dict[str, Any] | list[Any], indent: int) -> Iterator[str]:
    if isinstance(value, dict):
        for name, member in value.items():
            start = f"{json.dumps(name)}: "
            yield start + formatted(member, indent, len(start) + 1)
        return
    for member in value:
        parts = member.values() if isinstance(member, dict) else [member]
        flat = isinstance(member, dict) and not any(isinstance(x, dict | list) for x in parts)
        yield json.dumps(member, ensure_ascii=False) if flat else formatted(member, indent, 1)


def main() -> None:
    for path in sorted(FOLDER.glob("*.json")):
        text = formatted(json.loads(path.read_text("utf-8"))) + "\n"
        if text != path.read_text("utf-8"):
            path.write_text(text, "utf-8")
            print(path.name)


if __name__ == "__main__":
    main()
