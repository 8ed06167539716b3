"""The exceptions of this package, of which users catch one, and how messages show names."""

from __future__ import annotations

LONGEST_MESSAGE = 8000
"""Limit for the characters of a message; names in a forged checkpoint have millions."""
LONGEST_NAME = 200


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, or that does not hold exactly the tower it says it holds.

    The message names the repo and revision (or folder), what is wrong with it, and what to do. It
    can be printed whatever the checkpoint holds: at most 8,000 characters, no lone surrogates.
    """

    def __init__(self, message: str) -> None:
        short = _cut(message, LONGEST_MESSAGE)
        super().__init__(short.encode("utf-8", "backslashreplace").decode())


class DamagedError(CheckpointError):
    """A kept copy is no longer what was recorded of it, so the checkpoint is opened again."""


class AbsentError(CheckpointError):
    """A checkpoint has no file of this name."""


def shown(name: str) -> str:
    """Return a name of a checkpoint as messages show it: cut, and escaped if it does not print."""
    short = _cut(name, LONGEST_NAME)
    return short if short.isprintable() else ascii(short)


def _cut(text: str, most: int) -> str:
    """Return ``text`` without its middle if it is longer than ``most``; the end holds the fix."""
    if len(text) <= most:
        return text
    tail = most // 4
    left = f" ... ({len(text) - most} more characters) ... "
    return text[: most - tail] + left + text[-tail:]
