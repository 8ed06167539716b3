"""The exceptions of this package, of which users catch one, and how messages show names."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

LONGEST_MESSAGE = 8000
"""Limit for the characters of a message; names in a forged checkpoint have millions."""
LONGEST_NAME = 200
LONGEST_COMPARED = 200
"""Characters of a name that are compared; the time grows with their square."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, or that does not hold exactly the tower it says it holds.

    The message names the repo and revision (or folder), what is wrong with it, and what to do. It
    can be printed whatever the checkpoint holds: at most 8,000 characters, no lone surrogates.
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            _cut(message, LONGEST_MESSAGE).encode("utf-8", "backslashreplace").decode()
        )


class DamagedError(CheckpointError):
    """A kept copy is no longer what was recorded of it, so the checkpoint is opened again."""


class AbsentError(CheckpointError):
    """A checkpoint has no file of this name."""


def shown(name: str) -> str:
    """Return a name of a checkpoint as messages show it: cut, and escaped if it does not print."""
    short = _cut(name, LONGEST_NAME)
    return short if short.isprintable() else ascii(short)


def published_ids() -> list[str]:
    """Return the repo ids of all published checkpoints, sorted.

    They are those of ``weights.PUBLISHED``, which takes seconds to import because of torch; a test
    compares the two.
    """
    return (Path(__file__).parent / "published.txt").read_text("utf-8").split()


def similar_names(repo_id: str) -> str:
    """Return what an error adds about published repo ids that are spelt like an unknown one.

    Args:
        repo_id: what was asked for, with or without the owner; case does not matter.

    Returns:
        A clause that begins with a semicolon; nothing if no id is near or it is one of them.
    """
    ids = published_ids()
    spelt = {name: x for x in ids for name in (x.lower(), x.partition("/")[2].lower())}
    text = repo_id[:LONGEST_COMPARED].lower()
    longer = sorted((name for name in spelt if text and name.startswith(text)), key=len)
    near = [*longer, *get_close_matches(text, spelt, n=6)]
    found = list(dict.fromkeys(spelt[name] for name in near))[:3]
    return f"; published names like it: {', '.join(found)}" if found and repo_id not in ids else ""


def _cut(text: str, most: int) -> str:
    """Return ``text`` without its middle if it is longer than ``most``; the end holds the fix."""
    if len(text) <= most:
        return text
    tail = most // 4
    left = f" ... ({len(text) - most} more characters) ... "
    return text[: most - tail] + left + text[-tail:]
