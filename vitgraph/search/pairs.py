"""Near-duplicates: all pairs of vectors whose cosine is at least a threshold, or groups of them.

Every pair is compared, in blocks, by matrix products in float32 on one device. As many vectors as
fit a budget of memory are held on the device, and the others pass by; for more vectors than that,
they pass by once per budget. More pairs than are wanted are not kept but joined to groups: two
vectors are in one group if a chain of pairs leads from one to the other.

Shapes: n vectors of the job, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .vectors import Floats

BLOCK = {"cpu": 2048, "cuda": 8192}
"""The rows of a block, by the kind of device; other kinds take the CPU's."""
HELD_BYTES = 1 << 30
"""The most bytes of vectors that are held on a device other than CUDA, of which half the free
memory is taken."""
_JOINED = 1 << 22
"""The most pairs that are joined to groups at once."""


class Rows(Protocol):
    """What is read of the vectors of a job: see :class:`vitgraph.search.vectors.Vectors`."""

    count: int
    left_out: int

    def scan(self) -> Floats:
        """Set ``count`` and ``left_out``, and return one vector, [D]."""
        ...

    def rows(self, width: int, label: str, first: int = 0) -> Iterator[tuple[int, Floats]]:
        """Yield the vectors from row ``first`` on in parts, with the number of each first row."""
        ...


class Duplicates(NamedTuple):
    """The near-duplicates among the vectors of a job."""

    found: int
    """The number of pairs, listed or not."""
    pairs: Tensor | None
    """The rows of each pair, int64 [pairs, 2], largest cosine first; None if there are too many."""
    cosines: Tensor
    """The cosine of each of ``pairs``, float32 [pairs]; empty without them."""
    groups: list[Tensor]
    """The rows of each group, ascending, the largest group first; empty if pairs are listed."""


def find_duplicates(
    vectors: Rows, threshold: float, most_pairs: int, device: torch.device
) -> Duplicates:
    """Find all pairs of vectors with a cosine of at least ``threshold``.

    Vectors with a NaN or an infinity are in no pair; ``vectors.left_out`` counts them. Cosines are
    those of the vectors as they are: no mean is subtracted.

    Args:
        vectors: the vectors of the job.
        threshold: the least cosine of a pair, between 0 and 1.
        most_pairs: the most pairs to list; of more pairs, groups are made.
        device: the device that computes the cosines.

    Raises:
        ValueError: the job wrote no finite vectors, or a shard is damaged.
    """
    width = len(vectors.scan())
    total = vectors.count + vectors.left_out
    found = _Found(total, most_pairs, device)
    block = BLOCK.get(device.type, BLOCK["cpu"])
    held_rows = max(_held_bytes(device) // (4 * width) // block, 1) * block
    for first in range(0, total, held_rows):
        held = torch.empty(min(held_rows, total - first), width, device=device)
        for start, rows in _blocks(vectors, width, first, block, device):
            begin = start - first  # rows before the block are held, or the block is beyond them
            if begin < len(held):
                held[begin : begin + len(rows)] = rows[: len(held) - begin]
            for column in range(0, min(begin + len(rows), len(held)), block):
                columns = held[column : min(column + block, begin + len(rows))]
                cosines = rows @ columns.T
                near = cosines >= threshold
                if column + len(columns) > begin:  # each pair once, and no row with itself
                    near = near.tril(begin - column - 1)
                found.add(cosines, near, start, first + column)
    return found.result()


class _Found:
    """The pairs that were found: listed up to a number, then joined to groups.

    Args:
        total: n.
        most: the most pairs to list.
        device: the device of all tensors.
    """

    def __init__(self, total: int, most: int, device: torch.device) -> None:
        self.count, self._most = 0, most
        self._pairs = [torch.empty(0, 2, dtype=torch.int64)]
        self._cosines = [torch.empty(0)]
        self._labels = torch.arange(total, device=device)
        """The first row of the group of each row, as far as it is known, int64 [n]."""

    def add(self, cosines: Tensor, near: Tensor, row: int, column: int) -> None:
        """Add the pairs of two blocks.

        Args:
            cosines: those of the rows of the first block and of the second, [rows, rows].
            near: bool [rows, rows], which of them are a pair.
            row: the number of the first row of the first block.
            column: the number of the first row of the second block.
        """
        count = int(near.count_nonzero())
        listed = self.count <= self._most
        self.count += count
        if self.count <= self._most:
            if count:
                places = near.nonzero()
                self._cosines.append(cosines[near].cpu())
                self._pairs.append((places.flip(1) + places.new_tensor([column, row])).cpu())
            return
        if listed:  # the first block with too many
            for pairs in self._pairs:
                self._join(*pairs.to(self._labels.device).T)
            self._pairs, self._cosines = [], []
        step = max(_JOINED // near.shape[1], 1)
        for begin in range(0, len(near) if count else 0, step):
            part = near[begin : begin + step]
            mine = self._labels[row + begin : row + begin + len(part)]
            others = self._labels[column : column + near.shape[1]]
            first, second = (part & (mine[:, None] != others)).nonzero().T
            self._join(first + row + begin, second + column)

    def _join(self, first: Tensor, second: Tensor) -> None:
        """Join the groups of the rows ``first`` and ``second``, int64 [pairs] each."""
        labels = self._labels
        while True:
            one, other = labels[first], labels[second]
            apart = one != other
            if not apart.any():
                return
            one, other = one[apart], other[apart]
            first, second = first[apart], second[apart]
            # The label of a group is its first row, whose own label is itself. It takes the least
            # label of all groups that it is joined with, and every row then that of its label.
            labels.scatter_reduce_(0, one.maximum(other), one.minimum(other), "amin")
            while not torch.equal(further := labels[labels], labels):
                labels.copy_(further)

    def result(self) -> Duplicates:
        """Return the pairs or groups that were found."""
        if self.count <= self._most:
            cosines, order = torch.cat(self._cosines).sort(descending=True, stable=True)
            return Duplicates(self.count, torch.cat(self._pairs)[order], cosines, [])
        labels, order = self._labels.cpu().sort(stable=True)
        sizes = labels.unique_consecutive(return_counts=True)[1]
        groups = [rows for rows in order.split(sizes.tolist()) if len(rows) > 1]
        groups.sort(key=len, reverse=True)
        return Duplicates(self.count, None, torch.empty(0), groups)


def _blocks(
    vectors: Rows, width: int, first: int, block: int, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Yield the vectors from row ``first`` on, of length 1, [rows, D], each with its row's number.

    A vector with a NaN or an infinity becomes zeros. Only the last block has fewer rows.
    """
    parts: list[Floats] = []
    start, label = first, f"pairs from {first:,} on" if first else "pairs"
    for _, rows in vectors.rows(width, label, first):
        parts.append(rows)
        while sum(map(len, parts)) >= block:
            joined = np.concatenate(parts)
            yield start, _unit(joined[:block], device)
            start, parts = start + block, [joined[block:]]
    if rest := sum(map(len, parts)):
        assert rest < block
        yield start, _unit(np.concatenate(parts), device)


def _unit(rows: Floats, device: torch.device) -> Tensor:
    """Return vectors as a tensor on a device, of length 1; those that are not finite are zeros."""
    moved = torch.from_numpy(rows).to(device)
    finite = moved.isfinite().all(1, keepdim=True)
    # Divided by the largest number first, so that no square overflows or vanishes.
    moved = torch.where(finite, moved, 0)
    return F.normalize(moved / moved.abs().amax(1, keepdim=True).clamp_min(1e-38), dim=1)


def _held_bytes(device: torch.device) -> int:
    """Return the bytes of vectors that are held on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return HELD_BYTES
