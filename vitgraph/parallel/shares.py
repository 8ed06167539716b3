"""The assignment of items to ranks, and the places of their outputs in the gathered tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from encoders.contract import EncoderItemSpec, Grid, VisionInputs, is_of_prefix
from encoders.grids import read_grid
from encoders.streams import ItemPath

ATTENTION_ROWS = 7000
"""The length of a sequence whose attention takes as long as all other work on its rows (patches).

Times of 8 images of 448x448 and of one of 1024x1024 in ``benchmarks/results/speed_h200.json`` make
it 6,900 for Qwen3-VL-8B and 8,700 for Qwen2-VL-7B; the times of Qwen2.5-VL-7B, whose attention
stays in windows, are proportional to the number of rows.
"""


def cost_of(spec: EncoderItemSpec) -> float:
    """Return an estimate of the relative time that encoding an item takes.

    It is the number of patches and class tokens, times 1 + s / ``ATTENTION_ROWS``, where s is the
    number of them that attend to one another. With window attention, the factor is 1.
    """
    rows = spec.segments * spec.longest_segment
    return rows if spec.windows else rows * (1 + spec.longest_segment / ATTENTION_ROWS)


def costs_of_items(inputs: VisionInputs, paths: Mapping[str, ItemPath]) -> list[float]:
    """Return the cost of each item, summed over all its input paths (such as "image" and "tiles").

    The unit is the time of a row in a short attention sequence; a row in a long one costs more.

    Args:
        inputs: the result of ``preprocess``.
        paths: the input paths of the encoder by name.

    Raises:
        ValueError: it cannot be told which rows of an input path belong to which item.
    """
    costs = [0.0] * len(inputs.grid_thw)
    inputs.check(paths)
    for name, (_, grid_thw, items) in inputs.paths.items():
        for item, spec in zip(items, paths[name].item_specs(read_grid(grid_thw)), strict=True):
            costs[item] += cost_of(spec)
    return costs


def assign_items(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign items to ranks: the costliest first, each to the rank with the lowest total so far.

    Args:
        costs: cost of each item.
        ranks: number of ranks.

    Returns:
        The items of each rank in ascending order; equal ``costs`` give the same result everywhere.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = heappop(loads)
        shares[rank].append(item)
        heappush(loads, (load + costs[item], rank))
    return [sorted(share) for share in shares]


class Shares(NamedTuple):
    """The assignment of the items of one call to ranks."""

    grids: list[Grid]
    """The grid (t, h, w) of each item in the input path "image"."""
    specs: list[EncoderItemSpec]
    """The sizes of each item; empty for an encoder with several input paths."""
    by_rank: list[list[int]]
    """The indexes of the items of each rank, ascending."""
    own_items: list[int]
    """The indexes of this rank's items."""

    @property
    def own_grids(self) -> list[Grid]:
        """The grids of this rank's items."""
        return [self.grids[item] for item in self.own_items]

    def select(self, pixel_values: Tensor) -> Tensor:
        """Return the rows of this rank's items from ``pixel_values``, the rows of all items.

        Raises:
            ValueError: the number of rows does not fit the grids.
        """
        ends = list(accumulate(spec.input_size for spec in self.specs))
        if len(pixel_values) != (total := ends[-1] if ends else 0):
            raise ValueError(
                f"pixel_values has {len(pixel_values)} rows, grid_thw describes {total}: pass the "
                "rows of the items that grid_thw lists, and no others"
            )
        if len(self.own_items) == len(self.grids):
            return pixel_values
        parts = [
            pixel_values[ends[item] - self.specs[item].input_size : ends[item]]
            for item in self.own_items
        ]
        return torch.cat(parts) if parts else pixel_values[:0]

    def counts(self, field: str) -> list[int]:
        """Return each item's number of rows in an output field; 1 for the field "vectors"."""
        if field == "vectors":
            return [1] * len(self.grids)
        if is_of_prefix(field):
            return [spec.segments for spec in self.specs]
        merged = field in ("pooler_output", "deepstack_features")
        if field == "last_hidden_state":
            return [spec.hidden_rows for spec in self.specs]
        return [spec.output_tokens if merged else spec.input_size for spec in self.specs]

    def max_rows(self, counts: Sequence[int]) -> int:
        """Return the largest sum of ``counts``, one number per item, over the items of one rank."""
        return max(sum(counts[item] for item in share) for share in self.by_rank)

    def row_indices(self, counts: Sequence[int]) -> Tensor:
        """Return where each row of the result lies in the tensor of all rows sent, joined by rank.

        Args:
            counts: number of rows of each item.

        Returns:
            int64 on the CPU, one index per row, in the order of the items. The rows of rank r's
            items begin at r times :meth:`max_rows`.
        """
        max_rows, starts = self.max_rows(counts), [0] * len(counts)
        for rank, share in enumerate(self.by_rank):
            starts_of_share = accumulate((counts[item] for item in share), initial=rank * max_rows)
            for item, start in zip(share, starts_of_share, strict=False):
                starts[item] = start
        sizes = torch.tensor(counts, dtype=torch.int64)
        shifts = torch.tensor(starts, dtype=torch.int64) - (sizes.cumsum(0) - sizes)
        return torch.arange(sum(counts)) + shifts.repeat_interleave(sizes)


def select_share(inputs: VisionInputs, shares: Shares) -> VisionInputs:
    """Return the inputs of this rank's items, of an encoder with one input path."""
    items = shares.own_items
    return inputs._replace(
        pixel_values=shares.select(inputs.pixel_values),
        grid_thw=inputs.grid_thw[torch.tensor(items, dtype=torch.int64)],
        tiles=inputs.tiles and [inputs.tiles[item] for item in items],
        image_sizes=inputs.image_sizes and [inputs.image_sizes[item] for item in items],
    )
