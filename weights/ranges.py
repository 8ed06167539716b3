"""Which byte ranges hold the wanted tensors: neighbours merged, long runs cut, traffic counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from .snapshot import Piece
from .tensor_file import Header

MOST_BYTES = 64 << 20
"""Of one request; longer runs are cut, so that several connections share them."""
WASTE = 200
"""One part in so many of the wanted bytes may be fetched in vain to save requests."""


@dataclass(frozen=True)
class Segment:
    """Bytes to keep: where they begin in the remote file, how many, where they go in ours."""

    begin: int
    length: int
    target: int


@dataclass(frozen=True)
class Part:
    """One request: bytes ``begin`` to ``end`` of ``file``, of which the segments are kept."""

    file: str
    begin: int
    end: int
    segments: tuple[Segment, ...]

    @property
    def kept(self) -> int:
        """Bytes that are kept."""
        return sum(segment.length for segment in self.segments)


def in_order(pieces: Iterable[Piece]) -> list[Piece]:
    """The order of tensors in our own file: by shard, and as they lie in it."""
    return sorted(pieces, key=lambda piece: (piece.file, piece.entry.begin, piece.name))


def plan_parts(
    pieces: Sequence[Piece], headers: Mapping[str, Header], data_start: int
) -> list[Part]:
    """The requests that bring ``pieces`` (in order) into a file whose data start there."""
    runs = _runs(pieces, headers, data_start)
    allowed = _bridged(runs, sum(piece.entry.nbytes for piece in pieces) // WASTE)
    parts: list[Part] = []
    for (file, _), group in groupby(
        zip(runs, allowed, strict=True), key=lambda pair: (pair[0][0], pair[1])
    ):
        parts += _cut(file, [segment for (_, segment), _ in group])
    return parts


def _runs(
    pieces: Sequence[Piece], headers: Mapping[str, Header], target: int
) -> list[tuple[str, Segment]]:
    """Neighbouring tensors as one."""
    runs: list[tuple[str, Segment]] = []
    for piece in pieces:
        begin = headers[piece.file].data_start + piece.entry.begin
        length = piece.entry.nbytes
        if runs and runs[-1][0] == piece.file and _end(runs[-1][1]) == begin:
            last = runs.pop()[1]
            runs.append((piece.file, Segment(last.begin, last.length + length, last.target)))
        elif length:
            runs.append((piece.file, Segment(begin, length, target)))
        target += length
    return runs


def _bridged(runs: Sequence[tuple[str, Segment]], budget: int) -> list[int]:
    """A number a run; runs of one number are fetched in one go, the smallest gaps bridged first."""
    gaps = sorted(
        (after.begin - _end(before), place)
        for place, ((file, before), (next_file, after)) in enumerate(pairwise(runs), 1)
        if file == next_file
    )
    joined = set()
    for gap, place in gaps:
        budget -= gap
        if budget < 0:
            break
        joined.add(place)
    numbers, number = [], 0
    for place in range(len(runs)):
        number += place not in joined
        numbers.append(number)
    return numbers


def _cut(file: str, segments: list[Segment]) -> Iterable[Part]:
    begin, end = segments[0].begin, _end(segments[-1])
    count = -(-(end - begin) // MOST_BYTES)
    cuts = [begin + (end - begin) * number // count for number in range(count + 1)]
    for start, stop in pairwise(cuts):
        kept = (_clip(segment, start, stop) for segment in segments)
        yield Part(file, start, stop, tuple(segment for segment in kept if segment.length > 0))


def _clip(segment: Segment, start: int, stop: int) -> Segment:
    skipped = max(start - segment.begin, 0)
    length = min(_end(segment), stop) - segment.begin - skipped
    return Segment(segment.begin + skipped, length, segment.target + skipped)


def _end(segment: Segment) -> int:
    return segment.begin + segment.length
