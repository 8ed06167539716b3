"""The parts of items that run in one call of an encoder, if calls are limited to some tokens.

A large item is divided between its frames or tiles, runs in several calls, and its outputs are
joined again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..data import EncoderItemSpec, Grid, Output, output_like


class ItemPart(NamedTuple):
    """Consecutive frames or tiles of an item that run in one call of the encoder: all, or some."""

    item: int
    """Number of the item, from 0."""
    grid: Grid
    """(t, h, w) of this part: t frames or tiles of h x w patches."""
    rows: int
    """The number of rows of ``pixel_values`` in this part."""
    tokens: int
    """The number of output tokens of this part."""
    last: bool
    """Whether this part is the last one of its item."""


def plan_calls(
    grids: Sequence[Grid],
    item_specs: Callable[[Sequence[Grid]], list[EncoderItemSpec]],
    limit: int,
) -> list[list[ItemPart]]:
    """Return, for each call of the encoder, the parts of items that it encodes, in order.

    Args:
        grids: the (t, h, w) of each item.
        item_specs: the encoder's method of that name, which gives the sizes of items.
        limit: most output tokens per call. A larger item is split between attention segments, not
            between frames that are merged into tokens. That is exact: no row attends outside its
            segment, and positions repeat in each. One segment alone may exceed the limit.

    Returns:
        The calls in order; none if there are no items.
    """
    calls: list[list[ItemPart]] = []
    call_tokens = 0
    for item, ((t, h, w), spec) in enumerate(zip(grids, item_specs(grids), strict=True)):
        step, step_tokens = t, spec.output_tokens
        if spec.output_tokens > limit:
            frames, step_tokens = _frames_together((t, h, w), item_specs)
            if spec.segments in (t, -(-t // frames)):
                step = max(limit // step_tokens, 1) * frames
        for start in range(0, t, step):
            count = min(step, t - start)
            tokens = spec.output_tokens if step >= t else step_tokens * -(-count // frames)
            if not calls or call_tokens + tokens > limit:
                calls.append([])
                call_tokens = 0
            rows = spec.input_size * count // t
            calls[-1].append(ItemPart(item, (count, h, w), rows, tokens, start + count == t))
            call_tokens += tokens
    return calls


def _frames_together(
    grid: Grid, item_specs: Callable[[Sequence[Grid]], list[EncoderItemSpec]]
) -> tuple[int, int]:
    """Return how many frames are merged into one set of tokens, and how many tokens it has."""
    t, h, w = grid
    tokens = item_specs([(1, h, w)])[0].output_tokens
    for frames in range(1, t):
        if item_specs([(frames + 1, h, w)])[0].output_tokens > tokens:
            return frames, tokens
    return t, tokens


def join_outputs(parts: Sequence[Output]) -> Output:
    """Concatenate the outputs of the parts of one item, in order, to the output of the item."""
    if len(parts) == 1:
        return parts[0]
    hidden, pooled, deepstack, extras = zip(*parts, strict=True)
    return output_like(
        parts[0],
        None if hidden[0] is None else torch.cat(hidden),
        None if pooled[0] is None else torch.cat(pooled),
        None if deepstack[0] is None else tuple(map(torch.cat, zip(*deepstack, strict=True))),
        {name: torch.cat([part[name] for part in extras]) for name in extras[0]},
    )
