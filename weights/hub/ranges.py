"""Which byte ranges bring the tower: neighbours merged, long runs cut, small gaps bridged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from ..snapshot import Piece
from ..tensor_file import Header

MOST_BYTES = 64 << 20
"""Largest request; longer runs are cut, so that several connections share them."""
WASTE = 200
"""One part in so many of the wanted bytes may be fetched in vain to save requests."""


@dataclass(frozen=True)
class Part:
    """One request: bytes ``begin`` to ``end`` of ``file``, of which the segments are kept."""

    file: str
    begin: int
    end: int
    segments: tuple[tuple[int, int], ...]
    """Where the kept bytes begin and end in the remote file."""
    target: int
    """Where the first kept byte goes in our file; the others follow it without gaps."""

    @property
    def kept(self) -> int:
        """Bytes that are kept."""
        return sum(end - begin for begin, end in self.segments)

    def clip(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        """Return those of the bytes ``begin`` to ``end`` of the remote file that are kept."""
        clipped = ((max(first, begin), min(last, end)) for first, last in self.segments)
        return ((first, last) for first, last in clipped if first < last)


def in_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the tensors in the order of our own file: by shard, and as they lie in it."""
    return sorted(pieces, key=lambda piece: (piece.file, piece.entry.begin, piece.name))


def plan_parts(
    pieces: Sequence[Piece], headers: Mapping[str, Header], data_start: int
) -> list[Part]:
    """Return the requests that bring ``pieces`` (in order) into a file whose data start there."""
    runs = _runs(pieces, headers)
    allowed = _request_ids(runs, sum(piece.entry.nbytes for piece in pieces) // WASTE)
    parts: list[Part] = []
    grouped = groupby(zip(runs, allowed, strict=True), key=lambda pair: (pair[0][0], pair[1]))
    for (file, _), group in grouped:
        for begin, end, segments in _cut([(begin, end) for (_, begin, end), _ in group]):
            parts.append(Part(file, begin, end, segments, data_start))
            data_start += parts[-1].kept
    return parts


def _runs(pieces: Sequence[Piece], headers: Mapping[str, Header]) -> list[tuple[str, int, int]]:
    """Return file, begin and end of each run of neighbouring tensors."""
    runs: list[tuple[str, int, int]] = []
    for piece in pieces:
        start = headers[piece.file].data_start
        begin, end = start + piece.entry.begin, start + piece.entry.end
        if runs and (runs[-1][0], runs[-1][2]) == (piece.file, begin):
            runs[-1] = (piece.file, runs[-1][1], end)
        elif begin < end:
            runs.append((piece.file, begin, end))
    return runs


def _request_ids(runs: Sequence[tuple[str, int, int]], budget: int) -> list[int]:
    """Return a request id per run.

    Runs with equal ids share one request; the smallest gaps are bridged first, within ``budget``
    bytes.
    """
    gaps = sorted(
        (after[1] - before[2], place)
        for place, (before, after) in enumerate(pairwise(runs), 1)
        if before[0] == after[0]
    )
    bridged = set()
    for gap, place in gaps:
        budget -= gap
        if budget < 0:
            break
        bridged.add(place)
    ids, current = [], 0
    for place in range(len(runs)):
        current += place not in bridged
        ids.append(current)
    return ids


def _cut(
    segments: Sequence[tuple[int, int]],
) -> Iterable[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """Cut what one request would bring into equal requests of at most ``MOST_BYTES``."""
    begin, end = segments[0][0], segments[-1][1]
    count = -(-(end - begin) // MOST_BYTES)
    cuts = [begin + (end - begin) * number // count for number in range(count + 1)]
    for start, stop in pairwise(cuts):
        clipped = ((max(first, start), min(last, stop)) for first, last in segments)
        yield start, stop, tuple((first, last) for first, last in clipped if first < last)
