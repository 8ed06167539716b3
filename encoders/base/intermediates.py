"""Helpers of ``feature_maps`` and ``forward_intermediates``: arguments and block outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol, TypeGuard

import torch
from torch import Tensor

from ..data import EncoderOutput, GridLike, PartialOutput, VisionInputs
from ..grids import plain_values
from .configs import VisionConfig


class BlockTower(Protocol):
    """An encoder of one input path, as far as the outputs of its blocks concern it."""

    @property
    def config(self) -> VisionConfig: ...

    def block_outputs(
        self, pixel_values: Tensor, grid_thw: GridLike, numbers: Sequence[int]
    ) -> Iterator[Tensor]:
        """Yield the hidden state after each block in ``numbers``."""
        ...

    def feature_maps(self, features: Tensor, inputs: GridLike) -> list[Tensor]:
        """Arrange the rows of all items as one map per item."""
        ...


def check_arguments(
    pixel_values: Tensor | VisionInputs, grid_thw: GridLike | None, output_fmt: str
) -> None:
    """Check the arguments of ``forward_intermediates`` besides ``indices``.

    Raises:
        ValueError: a format that does not exist, a grid with the result of ``preprocess``, or
            tensors without a grid.
    """
    if output_fmt not in ("NLC", "NCHW"):
        raise ValueError(f'output_fmt={output_fmt!r}: must be "NLC" or "NCHW"')
    has_grid = isinstance(pixel_values, VisionInputs)
    if has_grid and grid_thw is not None:
        raise ValueError(
            "grid_thw was given with the result of preprocess, which has it: pass that alone, "
            "and numbers of blocks as indices=[...]"
        )
    if not has_grid and grid_thw is None:
        raise ValueError(
            f"pixel_values is of type {type(pixel_values).__name__}, without grid_thw: "
            "pass the result of preprocess, or pixel_values with grid_thw"
        )


def states_of_blocks(
    tower: BlockTower,
    pixel_values: Tensor,
    grid_thw: GridLike,
    indices: int | Sequence[int] | None,
    output_fmt: Literal["NLC", "NCHW"],
) -> list[Tensor] | list[list[Tensor]]:
    """Return the hidden states after blocks of an encoder of one input path.

    Args:
        tower: an encoder of one input path.
        pixel_values: the rows of all items.
        grid_thw: [items, 3], (t, h, w) per item, h and w in patches.
        indices: n for the last n blocks, block numbers from 0, None for all.
        output_fmt: "NLC" for rows, "NCHW" for maps.

    Returns:
        Per block one tensor [P, D] or [tiles, n, D], or with "NCHW" one map [t, D, h, w] per item.
    """
    block_numbers = block_indices(indices, tower.config.depth)
    numbers = sorted(set(block_numbers))
    states = tower.block_outputs(pixel_values, grid_thw, numbers)
    state_of = dict(zip(numbers, states, strict=True))
    if output_fmt == "NLC":
        return [state_of[number] for number in block_numbers]
    maps = {
        number: [x.permute(0, 3, 1, 2) for x in tower.feature_maps(state, grid_thw)]
        for number, state in state_of.items()
    }
    return [maps[number] for number in block_numbers]


def rows_of_all(features: object) -> Tensor:
    """Return the features of all items as one tensor.

    Args:
        features: one tensor, or a list with one tensor or one output per item; of an output,
            ``last_hidden_state`` is taken.

    Raises:
        ValueError: ``features`` are neither of these, or outputs without ``last_hidden_state``.
    """
    if isinstance(features, Tensor):
        return features
    if isinstance(features, list | tuple) and not isinstance(features, EncoderOutput):
        rows = [x[0] if isinstance(x, EncoderOutput | PartialOutput) else x for x in features]
        tensors = [x for x in rows if isinstance(x, Tensor)]
        if tensors and len(tensors) == len(rows):
            return torch.cat(tensors)
        if any(isinstance(x, PartialOutput) and x[0] is None for x in features):
            raise ValueError(
                "these outputs have no last_hidden_state, which feature_maps reads: name it in "
                "outputs= of the graphed encoder, or pass another field per item, as "
                "[output.pooler_output for output in outputs]"
            )
    raise ValueError(
        f"features is of type {type(features).__name__}: feature_maps takes one tensor (pass "
        "output.last_hidden_state, output.pooler_output or one of output.deepstack_features), "
        "or a list with one tensor or output per item"
    )


def block_indices(indices: int | Sequence[int] | None, depth: int) -> list[int]:
    """Return the 0-based numbers of the blocks that ``indices`` selects.

    Args:
        indices: None for all blocks, n for the last n, or numbers (negatives count from the end).
        depth: number of blocks of the tower.

    Returns:
        Block numbers in the order of ``indices``.

    Raises:
        ValueError: a block that does not exist.
    """
    if indices is None:
        return list(range(depth))
    values = plain_values(indices)
    if not isinstance(values, Iterable):
        if not _is_number(values) or not 0 < values <= depth:
            raise ValueError(f"indices={values}: the last n blocks, with n from 1 to {depth}")
        return list(range(depth - values, depth))
    numbers = []
    for number in map(plain_values, values):
        if not _is_number(number) or not -depth <= number < depth:
            rule = f"the tower has blocks 0 to {depth - 1}"
            raise ValueError(f"block {number!r} does not exist: {rule}")
        numbers.append(number % depth)
    return numbers


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
