"""Features and attention of one image in cells, which are squares of patches.

The page of ``vitgraph maps`` shows cells, because the attention between all pairs of patches of a
large image would be too much for it.

Shapes: (h, w) rows and columns of cells, G = h*w cells, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from encoders import Encoder
from encoders.contract import VisionInputs

from .attention import PathRun, weights_of_block


class CellStates(NamedTuple):
    """Features and attention of one block in the cells of an image; a cell is f x f patches."""

    block: int

    features: Tensor
    """The mean hidden state after the block, [h, w, D]."""
    attention: Tensor
    """The attention weight on each cell [h, w] (last two axes) from each cell, [G, h, w]: the
    mean over the patches and heads of the asking cell, the sum over those that it attends to."""


@torch.no_grad()
def states_of_cells(
    encoder: Encoder,
    inputs: VisionInputs,
    *,
    blocks: int | Sequence[int] | None,
    path: str = "image",
    most_cells: int,
) -> tuple[int, tuple[int, int], list[CellStates]]:
    """Return features and attention of the cells of one image, after several blocks.

    Args:
        encoder: an encoder of one input path or of several.
        inputs: the result of ``encoder.preprocess`` for one image.
        blocks, path: as :func:`vitgraph.attention_maps` takes them.
        most_cells: the most cells; a cell is one patch if there are no more patches.

    Returns:
        The side f of a cell in patches, the height and width of the image in patches, and per block
        its states, in float32 on the CPU. Cells at the right and the bottom may be cut off.

    Raises:
        ValueError: an accelerated encoder, blocks or a path that do not exist, or an image that
            does not use the path.
    """
    run = PathRun(encoder, inputs, blocks, path)
    if run.is_empty:
        raise ValueError(f"path={path!r}: this image has no views of this path; leave path out")
    cells = _Cells(run, most_cells)
    factors: dict[torch.Size, Tensor] = {}
    states = {}
    for number, block, call, hidden in run.steps():
        shape = hidden.shape[:-1]
        if shape not in factors:
            factors[shape] = cells.query_weights(shape)
        weights = weights_of_block(block, call, factors[shape], "mean")
        weights = weights / run.patches_per_row(hidden)
        attention = cells.sums(weights.squeeze(-2).float()).T
        states[number] = CellStates(
            number,
            cells.in_place(cells.sums(hidden.float()) / cells.sizes, 0),
            cells.in_place(attention, 1),
        )
    return cells.side, cells.grid, [states[number] for number in run.indices]


class _Cells:
    """The division of an image into cells.

    Args:
        run: the run of the blocks, on one image.
        most: the most cells.

    Attributes:
        side: the side f of a cell in patches, the smallest that makes at most ``most`` cells.
        grid: the height and width of the image in patches.
        sizes: the number of patches of each cell, [G, 1].
    """

    def __init__(self, run: PathRun, most: int) -> None:
        (numbers,) = run.rows.values()
        _, height, width, _ = numbers.shape
        self._run, self.grid = run, (height, width)
        self.side = next(f for f in count(1) if -(-height // f) * -(-width // f) <= most)
        self._shape = -(-height // self.side), -(-width // self.side)
        row, column = torch.arange(height) // self.side, torch.arange(width) // self.side
        cells = row[:, None] * self._shape[1] + column
        self._cell_of_patch = cells.flatten().to(numbers.device)
        self.sizes = self._cell_of_patch.bincount(minlength=self._shape[0] * self._shape[1])[
            :, None
        ]

    def sums(self, rows: Tensor) -> Tensor:
        """Return the sum of the patches of each cell, [G, ..]."""
        (maps,) = self._run.arrange(rows).values()
        flat = maps[0].flatten(0, 1)
        sums = flat.new_zeros(len(self.sizes), flat.shape[1])
        return sums.index_add_(0, self._cell_of_patch, flat)

    def query_weights(self, shape: torch.Size) -> Tensor:
        """Return the factor of each row in the mean over the patches of a cell, [.., G].

        ``shape`` [..] is that of the rows.
        """
        (numbers,) = self._run.row_maps(shape).values()
        factors = torch.zeros(shape.numel(), len(self.sizes), device=numbers.device)
        parts = 1 / self.sizes[self._cell_of_patch, 0].to(factors.dtype)
        factors.index_put_((numbers.flatten(), self._cell_of_patch), parts, accumulate=True)
        return factors.view(*shape, -1)

    def in_place(self, values: Tensor, axis: int) -> Tensor:
        """Return values on the CPU, with the cells along ``axis`` as rows and columns."""
        placed: Tensor = values.unflatten(axis, self._shape)
        return placed.cpu()
