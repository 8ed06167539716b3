"""Choose the byte ranges of a tower: neighbours merged, long stretches cut, small gaps bridged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from ..snapshot import TowerTensor
from ..tensor_file import Header

MOST_BYTES = 64 << 20
"""Largest request; longer stretches are cut, so that several connections share them."""
WASTE = 200  # one byte in so many of the wanted bytes may be fetched in vain to save requests
Segments: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of each stretch of wanted bytes in a remote file, in rising order."""
_Stretch: TypeAlias = tuple[str, int, int]  # name of the file, begin and end of the bytes


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
        """The number of the requested bytes that are kept, without those between wanted parts."""
        return sum(end - begin for begin, end in self.segments)


def clip(segments: Iterable[tuple[int, int]], begin: int, end: int) -> Segments:
    """Return the parts of segments that lie between the offsets ``begin`` and ``end``."""
    clipped = ((max(first, begin), min(last, end)) for first, last in segments)
    return tuple((first, last) for first, last in clipped if first < last)


def in_order(tensors: Iterable[TowerTensor]) -> list[TowerTensor]:
    """Return the tensors in the order of our own file: by shard, and as they lie in it."""
    return sorted(tensors, key=lambda tensor: (tensor.file, tensor.entry.begin, tensor.name))


def plan_requests(
    tensors: Sequence[TowerTensor], headers: Mapping[str, Header], data_start: int
) -> list[RangeRequest]:
    """Return the requests that bring sorted ``tensors`` into a file with this ``data_start``."""
    stretches = _stretches(tensors, headers)
    bridged = _bridged(stretches, sum(tensor.entry.nbytes for tensor in tensors) // WASTE)
    joined: list[tuple[str, list[tuple[int, int]]]] = []
    for number, (file, begin, end) in enumerate(stretches):
        if number not in bridged:
            joined.append((file, []))
        joined[-1][1].append((begin, end))
    requests: list[RangeRequest] = []
    for file, segments in joined:
        begin, end = segments[0][0], segments[-1][1]
        # One request is at most MOST_BYTES long, so a longer stretch is cut evenly.
        count = -(-(end - begin) // MOST_BYTES)
        cuts = [begin + (end - begin) * number // count for number in range(count + 1)]
        for start, stop in pairwise(cuts):
            request = RangeRequest(file, start, stop, clip(segments, start, stop), data_start)
            requests.append(request)
            data_start += request.kept
    return requests


def _stretches(tensors: Sequence[TowerTensor], headers: Mapping[str, Header]) -> list[_Stretch]:
    """Return file, begin and end of each run of tensors that lie next to each other."""
    stretches: list[_Stretch] = []
    for tensor in tensors:
        start = headers[tensor.file].data_start
        begin, end = start + tensor.entry.begin, start + tensor.entry.end
        if stretches and (stretches[-1][0], stretches[-1][2]) == (tensor.file, begin):
            stretches[-1] = (tensor.file, stretches[-1][1], end)
        elif begin < end:
            stretches.append((tensor.file, begin, end))
    return stretches


def _bridged(stretches: Sequence[_Stretch], budget: int) -> set[int]:
    """Return which stretches join the one before: the smallest gaps, ``budget`` bytes in all."""
    gaps = sorted(
        (after[1] - before[2], number)
        for number, (before, after) in enumerate(pairwise(stretches), 1)
        if before[0] == after[0]
    )
    spent = accumulate(gap for gap, _ in gaps)
    return {number for (_, number), sum_ in zip(gaps, spent, strict=True) if sum_ <= budget}
