"""Which byte ranges bring the tower: neighbours merged, long runs cut, small gaps bridged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from ..snapshot import Piece
from ..tensor_file import Header

MOST_BYTES = 64 << 20
"""Largest request; longer runs are cut, so that several connections share them."""
WASTE = 200  # one part in so many of the wanted bytes may be fetched in vain to save requests
Segments: TypeAlias = tuple[tuple[int, int], ...]
"""Where wanted bytes begin and end in a remote file, in rising order."""


@dataclass(frozen=True)
class Part:
    """One request: bytes ``begin`` to ``end`` of ``file``, of which the segments are kept."""

    file: str
    begin: int
    end: int
    segments: Segments
    target: int
    """Where the first kept byte goes in our file; the others follow it without gaps."""

    @property
    def kept(self) -> int:
        """Bytes that are kept."""
        return sum(end - begin for begin, end in self.segments)


def clip(segments: Iterable[tuple[int, int]], begin: int, end: int) -> Segments:
    """Return what of ``segments`` lies within the bytes ``begin`` to ``end``."""
    clipped = ((max(first, begin), min(last, end)) for first, last in segments)
    return tuple((first, last) for first, last in clipped if first < last)


def in_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the tensors in the order of our own file: by shard, and as they lie in it."""
    return sorted(pieces, key=lambda piece: (piece.file, piece.entry.begin, piece.name))


def plan_parts(
    pieces: Sequence[Piece], headers: Mapping[str, Header], data_start: int
) -> list[Part]:
    """Return the requests that bring ``pieces`` (in order) into a file whose data start there."""
    runs = _runs(pieces, headers)
    bridged = _bridged(runs, sum(piece.entry.nbytes for piece in pieces) // WASTE)
    requests: list[tuple[str, list[tuple[int, int]]]] = []
    for place, (file, begin, end) in enumerate(runs):
        if place not in bridged:
            requests.append((file, []))
        requests[-1][1].append((begin, end))
    parts: list[Part] = []
    for file, segments in requests:
        begin, end = segments[0][0], segments[-1][1]
        count = -(-(end - begin) // MOST_BYTES)  # requests of equal length
        cuts = [begin + (end - begin) * number // count for number in range(count + 1)]
        for start, stop in pairwise(cuts):
            parts.append(Part(file, start, stop, clip(segments, start, stop), data_start))
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


def _bridged(runs: Sequence[tuple[str, int, int]], budget: int) -> set[int]:
    """Return the runs that join the one before: the smallest gaps, of ``budget`` bytes in all."""
    gaps = sorted(
        (after[1] - before[2], place)
        for place, (before, after) in enumerate(pairwise(runs), 1)
        if before[0] == after[0]
    )
    spent = accumulate(gap for gap, _ in gaps)
    return {place for (_, place), sum_ in zip(gaps, spent, strict=True) if sum_ <= budget}
