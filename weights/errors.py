"""The exceptions of this package, and names of checkpoints as error messages show them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

LONGEST_MESSAGE = 8000
"""Limit for the characters of a message; names in a forged checkpoint have millions."""
LONGEST_NAME = 200
MOST_LISTED = 8
"""Names that a message lists per kind of problem; it always says how many there are."""
MOST_NEAR = 10_000
"""Names that are compared to find the nearest one, which takes 0.1 s per listed name."""
LONGEST_COMPARED = 256
"""The most characters of a name that are compared; the time grows with their square."""


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
    """Raised when a checkpoint has no file of the name that was asked for."""


def shown(name: str) -> str:
    """Return a name of a checkpoint as messages show it: cut, and escaped if it does not print."""
    short = _cut(name, LONGEST_NAME)
    return short if short.isprintable() else ascii(short)


def listed(kind: str, names: list[str], near: Iterable[str] = (), word: str = "") -> str:
    """List names that have one kind of problem, each with the nearest of the names ``near``."""
    if not names:
        return ""
    pool = [name for name in islice(near, MOST_NEAR) if len(name) <= LONGEST_COMPARED]
    texts = []
    for name in names[:MOST_LISTED]:
        nearest = get_close_matches(name[:LONGEST_COMPARED], pool, n=1, cutoff=0.5)
        texts.append(shown(name) + (f" ({word}: {shown(nearest[0])})" if nearest else ""))
    more = f", and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"{kind} ({len(names)}): {', '.join(texts)}{more}"


def _cut(text: str, most: int) -> str:
    """Return ``text`` without its middle if it is longer than ``most``; the end holds the fix."""
    if len(text) <= most:
        return text
    tail = most // 4
    left = f" ... ({len(text) - most} more characters) ... "
    return text[: most - tail] + left + text[-tail:]
