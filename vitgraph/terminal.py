"""Printing to a terminal: safe output streams, messages of one line, and tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import TextIO
from unicodedata import category


def make_streams_safe() -> None:
    """Make sure that printing to stdout and stderr raises no error.

    A stream that the shell closed (``>&-``) is None in Python; it is replaced by the null device. A
    character that the stream's encoding cannot represent is printed as an escape sequence.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_terminal() -> bool:
    """Return whether stderr is a terminal, on which progress bars can be shown."""
    return sys.stderr is not None and sys.stderr.isatty()


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning to stderr as one line; this function replaces ``warnings.showwarning``."""
    print(f"vitgraph: warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)


def one_line(error: BaseException) -> str:
    """Return the message of an error, or its class name if it has none, as one line of text."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return printable(f"{error.filename}: {error.strerror.lower()}")
    return printable(" ".join(str(error).split())) or type(error).__name__


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, as "1 file" or "1,000 files"; the plural ends in "s"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def printable(text: str) -> str:
    """Return ``text`` with control characters as escape sequences, so that a line stays one line.

    Args:
        text: any text, such as a file name, which may hold line breaks, terminal codes, and
            surrogates in place of bytes that are not UTF-8.

    Returns:
        The same text with "\\n" for a line break, "\\x1b" for ESC, and so on.
    """
    return "".join(
        character.encode("unicode_escape").decode() if category(character) in _UNSAFE else character
        for character in text
    )


_UNSAFE = ("Cc", "Cs", "Zl", "Zp")
"""The Unicode categories that are escaped: control characters, surrogates, line and paragraph
separators."""


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table whose columns are as wide as their widest cell.

    Columns whose cells are all numbers or empty are aligned to the right, the others to the left.

    Args:
        header: one title per column.
        rows: the cells of each row, as many as the header has titles.

    Returns:
        The lines of the table, joined by line breaks; control characters in cells are escaped.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(map(_is_number, cells)) and bool(cells) for _, *cells in columns]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(_line(cells, widths, right) for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _is_number(cell: str) -> bool:
    return not cell or cell.replace(",", "").replace(".", "", 1).isdigit()


def readable(count: float) -> str:
    """Return a number of bytes as text in kB, MB, GB or TB, with one decimal."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"
