"""JSON as checkpoints hold it: objects without doubled names, of a size that can be parsed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from .errors import CheckpointError, legible

JsonObject: TypeAlias = Mapping[str, object]
"""The type of a parsed JSON object that is only read; code that reads a value checks its type."""
JsonDict: TypeAlias = dict[str, object]
"""The type of a parsed JSON object that may be changed and written."""
LFS_POINTER = b"version https://git-lfs"
"""The first bytes of the small text file that stands for each large file in a clone made without
Git LFS."""
MOST_CONTAINERS = 1_500_000
"""The most objects and lists in a JSON file. A header has three per tensor, so that half a million
tensors may lie in one file. Published checkpoints have a fifth of that in all their files."""
MOST_VALUES = 6_000_000
"""The most commas and colons in a JSON file, which bound the number of values in it. At both
limits, 100 MB of JSON took 2.4 s and 0.4 GB to parse on a CPU core; 100 MB of ``[],``, which the
limits refuse, take Python's parser 10.7 s and 1.8 GB."""
MOST_WIDE_BYTES = 16_000_000
"""The most bytes of JSON that is not all ASCII, because one wide character makes Python hold four
bytes for every character."""


def parse_json(raw: bytes, label: str) -> JsonDict:
    """Parse a JSON object in which no name occurs twice.

    A CheckpointError, which names the file by ``label``, is raised for all else, and for JSON so
    large that parsing would take gigabytes of memory.
    """
    refuse_pointer(raw, label)
    _refuse_bulk(raw, label)
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except CheckpointError as error:
        raise CheckpointError(f"{label}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{label}: not valid JSON ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{label}: a JSON {type(value).__name__}, must be an object")
    return value


def refuse_pointer(raw: bytes, label: str) -> None:
    """Raise a :class:`CheckpointError` if ``raw`` begins a Git LFS pointer, not the file itself.

    The error names the file by ``label``.
    """
    if raw.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{label}: a Git LFS pointer, not the file itself: run git lfs pull in the clone, or "
            "pass the repo id instead of the folder"
        )


def _refuse_bulk(raw: bytes, label: str) -> None:
    """Raise a :class:`CheckpointError` if ``raw``, the file ``label``, has too many JSON values.

    Brackets, commas and colons are counted in the bytes, which takes 0.1 s for 100 MB.
    """
    if len(raw) > MOST_WIDE_BYTES and not raw.isascii():
        raise CheckpointError(
            f"{label}: {len(raw)} bytes that are not all ASCII, at most {MOST_WIDE_BYTES} of such "
            "are read: not the file of a published checkpoint"
        )
    containers = raw.count(b"[") + raw.count(b"{")
    values = raw.count(b",") + raw.count(b":")
    if containers > MOST_CONTAINERS or values > MOST_VALUES:
        raise CheckpointError(
            f"{label}: some {containers} objects and lists of {values} values, at most "
            f"{MOST_CONTAINERS} of {MOST_VALUES} are read: not the file of a published checkpoint"
        )


def _unique(pairs: list[tuple[str, object]]) -> JsonDict:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise CheckpointError(f"the name {legible(twice)!r} occurs twice")
    return table
