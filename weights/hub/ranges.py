"""Chooses the byte ranges by which a tower is fetched.

Neighbouring tensors are fetched by one request, long stretches are divided among several, and
small gaps between wanted bytes are fetched, too, where that saves a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from ..files.checkpoint import TowerTensor
from ..files.tensor_file import Header

MOST_BYTES = 64 << 20
"""The most bytes of one request; longer stretches are divided among several connections."""
WASTE = 200
"""The number of wanted bytes per unwanted byte that may be fetched to save requests."""
Segments: TypeAlias = tuple[tuple[int, int], ...]
"""Stretches of wanted bytes in a remote file, in rising order: the offset of the first byte, and
the offset after the last."""
_Stretch: TypeAlias = tuple[str, int, int]
"""The name of a file, and the offsets of the first byte and after the last."""


@dataclass(frozen=True)
class RangeRequest:
    """One request: the bytes of ``file`` from ``begin`` up to ``end``.

    Only bytes in ``segments`` are written to the disk; others lie in gaps between wanted tensors.
    """

    file: str
    begin: int
    end: int
    segments: Segments
    target: int
    """The offset in the tower's file on this disk at which the first byte of ``segments`` is
    written; the others follow without gaps."""

    @property
    def kept(self) -> int:
        """The number of requested bytes that are written to the disk: those in ``segments``."""
        return sum(end - begin for begin, end in self.segments)


def within(segments: Iterable[tuple[int, int]], begin: int, end: int) -> Segments:
    """Return the parts of ``segments`` that lie between the offsets ``begin`` and ``end``.

    A segment is the offset of its first byte and the offset after its last byte.
    """
    parts = ((max(first, begin), min(last, end)) for first, last in segments)
    return tuple((first, last) for first, last in parts if first < last)


def in_order(tensors: Iterable[TowerTensor]) -> list[TowerTensor]:
    """Return the tensors in the order in which the tower's file on this disk has them.

    The order is by shard, and by the place in the shard.
    """
    return sorted(tensors, key=lambda tensor: (tensor.file, tensor.entry.begin, tensor.name))


def plan_requests(
    tensors: Sequence[TowerTensor], headers: Mapping[str, Header], data_start: int
) -> list[RangeRequest]:
    """Return the requests that fetch the tensors of a tower.

    Args:
        tensors: the tensors, as :func:`in_order` sorts them.
        headers: headers of the remote files that hold them, by name.
        data_start: offset of the first tensor in the tower's file on this disk.
    """
    stretches = _stretches(tensors, headers)
    bridged = _bridged(stretches, sum(tensor.entry.nbytes for tensor in tensors) // WASTE)
    stretches_of_requests: list[tuple[str, list[tuple[int, int]]]] = []
    for number, (file, begin, end) in enumerate(stretches):
        if number not in bridged:
            stretches_of_requests.append((file, []))
        stretches_of_requests[-1][1].append((begin, end))
    requests: list[RangeRequest] = []
    for file, segments in stretches_of_requests:
        begin, end = segments[0][0], segments[-1][1]
        # One request has at most MOST_BYTES, so that a longer stretch is divided evenly.
        count = -(-(end - begin) // MOST_BYTES)
        cuts = [begin + (end - begin) * number // count for number in range(count + 1)]
        for start, stop in pairwise(cuts):
            request = RangeRequest(file, start, stop, within(segments, start, stop), data_start)
            requests.append(request)
            data_start += request.kept
    return requests


def _stretches(tensors: Sequence[TowerTensor], headers: Mapping[str, Header]) -> list[_Stretch]:
    """Return file, first offset and end offset of each run of tensors that lie without gaps.

    ``tensors`` are in the order of :func:`in_order`; ``headers`` are the remote files', by name.
    """
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
    """Return the indices of the ``stretches`` to fetch in one request with the stretch before.

    Each follows one of the smallest gaps; these gaps have at most ``budget`` bytes together.
    """
    gaps = sorted(
        (after[1] - before[2], number)
        for number, (before, after) in enumerate(pairwise(stretches), 1)
        if before[0] == after[0]
    )
    total_bytes = accumulate(gap for gap, _ in gaps)
    return {number for (_, number), sum_ in zip(gaps, total_bytes, strict=True) if sum_ <= budget}
