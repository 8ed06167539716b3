"""The exceptions of this package, and functions that show names from checkpoints in messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

LONGEST_MESSAGE = 8000
"""The most characters of an error message; a name in a forged checkpoint may have millions."""
LONGEST_NAME = 200
MOST_LISTED = 8
"""The most names that a message lists per kind of problem; further ones are only counted."""
MOST_NEAR = 10_000
"""The most names that are searched for the one spelt most like a wrong name; searching so many
takes about half a second on a CPU core."""
LONGEST_COMPARED = 256
"""The most characters of a name in this search, whose time grows with the square of the length."""


class CheckpointError(ValueError):
    """A checkpoint cannot be found, or does not hold exactly the tower that its config describes.

    The message names the repo and revision (or folder), what is wrong with it, and what to do. It
    can be printed whatever the checkpoint holds: at most 8,000 characters, no lone surrogates.
    """

    def __init__(self, message: str) -> None:
        short = _cut(message, LONGEST_MESSAGE)
        super().__init__(short.encode("utf-8", "backslashreplace").decode())


class DamagedError(CheckpointError):
    """A fetched copy on this disk no longer has the checksums that were recorded with it.

    Loading catches this error, opens the checkpoint again and fetches the files anew.
    """


class AbsentError(CheckpointError):
    """Raised when a checkpoint does not have a file that the loader asks for by name."""


def legible(name: str) -> str:
    """Return a name from a checkpoint for a message: short, with unprintable characters escaped."""
    short = _cut(name, LONGEST_NAME)
    return short if short.isprintable() else ascii(short)


def problem_line(
    kind: str, names: list[str], candidates: Iterable[str] = (), word: str = ""
) -> str:
    """Return a line of a message that lists names with one kind of problem, at most eight of them.

    Args:
        kind: the problem, such as "missing".
        names: the names; if there are none, the line is empty.
        candidates: names to suggest: beside each listed name, the one spelt most like it is shown.
        word: the label in front of each suggestion, such as "nearest present".
    """
    if not names:
        return ""
    comparable = [name for name in islice(candidates, MOST_NEAR) if len(name) <= LONGEST_COMPARED]
    texts = []
    for name in names[:MOST_LISTED]:
        nearest = get_close_matches(name[:LONGEST_COMPARED], comparable, n=1, cutoff=0.5)
        texts.append(legible(name) + (f" ({word}: {legible(nearest[0])})" if nearest else ""))
    rest = f", and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"{kind} ({len(names)}): {', '.join(texts)}{rest}"


def _cut(text: str, max_length: int) -> str:
    """Return ``text`` without its middle if it has more than ``max_length`` characters."""
    if len(text) <= max_length:
        return text
    tail = max_length // 4
    gap = f" ... ({len(text) - max_length} more characters) ... "
    return text[: max_length - tail] + gap + text[-tail:]
