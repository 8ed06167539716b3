"""Choose the byte ranges of a tower: neighbours merged, long runs cut, small gaps bridged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from ..snapshot import TowerTensor
from ..tensor_file import Header

MOST_BYTES = 64 << 20
"""Largest request; longer runs are cut, so that several connections share them."""
WASTE = 200  # one byte in so many of the wanted bytes may be fetched in vain to save requests
Segments: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of each run of wanted bytes in a remote file, in rising order."""
_Run: TypeAlias = tuple[str, int, int]  # file, begin and end


@dataclass(frozen=True)
class RangeRequest:
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
    """Cut segments down to those bytes that lie between ``begin`` and ``end``."""
    clipped = ((max(first, begin), min(last, end)) for first, last in segments)
    return tuple((first, last) for first, last in clipped if first < last)


def in_order(tensors: Iterable[TowerTensor]) -> list[TowerTensor]:
    """Return the tensors in the order of our own file: by shard, and as they lie in it."""
    return sorted(tensors, key=lambda tensor: (tensor.file, tensor.entry.begin, tensor.name))


def plan_requests(
    tensors: Sequence[TowerTensor], headers: Mapping[str, Header], data_start: int
) -> list[RangeRequest]:
    """Return the requests that bring sorted ``tensors`` into a file with this ``data_start``."""
    runs = _runs(tensors, headers)
    bridged = _bridged(runs, sum(tensor.entry.nbytes for tensor in tensors) // WASTE)
    joined: list[tuple[str, list[tuple[int, int]]]] = []
    for number, (file, begin, end) in enumerate(runs):
        if number not in bridged:
            joined.append((file, []))
        joined[-1][1].append((begin, end))
    requests: list[RangeRequest] = []
    for file, segments in joined:
        begin, end = segments[0][0], segments[-1][1]
        count = -(-(end - begin) // MOST_BYTES)  # requests of equal length
        cuts = [begin + (end - begin) * number // count for number in range(count + 1)]
        for start, stop in pairwise(cuts):
            request = RangeRequest(file, start, stop, clip(segments, start, stop), data_start)
            requests.append(request)
            data_start += request.kept
    return requests


def _runs(tensors: Sequence[TowerTensor], headers: Mapping[str, Header]) -> list[_Run]:
    """Return file, begin and end of each run of neighbouring tensors."""
    runs: list[_Run] = []
    for tensor in tensors:
        start = headers[tensor.file].data_start
        begin, end = start + tensor.entry.begin, start + tensor.entry.end
        if runs and (runs[-1][0], runs[-1][2]) == (tensor.file, begin):
            runs[-1] = (tensor.file, runs[-1][1], end)
        elif begin < end:
            runs.append((tensor.file, begin, end))
    return runs


def _bridged(runs: Sequence[_Run], budget: int) -> set[int]:
    """Return the runs that join the one before: the smallest gaps, of ``budget`` bytes in all."""
    gaps = sorted(
        (after[1] - before[2], number)
        for number, (before, after) in enumerate(pairwise(runs), 1)
        if before[0] == after[0]
    )
    spent = accumulate(gap for gap, _ in gaps)
    return {number for (_, number), sum_ in zip(gaps, spent, strict=True) if sum_ <= budget}
