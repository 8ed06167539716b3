"""Encoding preprocessed items: one call or several, and one result per item.

Nothing here knows an encoder: :class:`Encoding` holds what has to be known, so that encoders and
their wrappers share the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..contract import EncoderItemSpec, EncoderOutput, Grid, GridLike, VisionInputs
from ..inputs import StagedPreprocessor
from ..pooling import check_fields, check_pool, pool

FIELDS = ("last_hidden_state", "pooler_output", "deepstack_features")


class ItemEncoder(Protocol):
    """What must be known of an encoder, besides a call, to encode items with it."""

    def preprocess(
        self,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> VisionInputs: ...

    def grid_for(self, tokens: int) -> Grid: ...

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]: ...

    def split(self, output: EncoderOutput, grid_thw: GridLike) -> list[EncoderOutput]: ...


class ItemResults(NamedTuple):
    """What is wanted of each item."""

    pool: str = "none"
    normalize: bool = False
    max_tokens_per_call: int | None = None


@dataclass(frozen=True)
class Encoding:
    """An encoder, and how it is called."""

    encoder: ItemEncoder
    call: Callable[[Tensor, GridLike], EncoderOutput]
    device: torch.device
    fields: tuple[str, ...] = FIELDS
    """The fields that the call returns."""
    stager: StagedPreprocessor | None = None
    """What leaves normalising and cutting to the device, where ``preprocess`` allows that."""
    owned: bool = True
    """Whether a result stays as it is when the next call runs."""

    def check(self, results: ItemResults) -> None:
        """Raise unless these results can be had from this encoder.

        Raises:
            ValueError: arguments of ``encode`` that are wrong or need a field that is left out.
        """
        check_pool(results.pool, results.normalize)
        limit = results.max_tokens_per_call
        if limit is not None and (isinstance(limit, bool) or limit < 1):
            raise ValueError(
                f"max_tokens_per_call={limit}: must be a positive number of output tokens, or None "
                "for one call"
            )
        grid = self.encoder.grid_for(1)
        check_fields(results.pool, self.fields, grid, self.encoder.item_specs([grid])[0])

    def run(self, inputs: VisionInputs, results: ItemResults) -> list[Any]:
        """Encode preprocessed items.

        Args:
            inputs: any number of items.
            results: what is wanted of each.

        Returns:
            One :class:`EncoderOutput` per item or, with a pool, one vector; each in memory of its
            own, unless ``owned`` is False and one call gave whole outputs.

        Raises:
            ValueError: what the call raises.
            torch.OutOfMemoryError, MemoryError: with the advice to set ``max_tokens_per_call``.
        """
        grids: list[Grid] = [(t, h, w) for t, h, w in inputs.grid_thw.tolist()]
        calls = plan_calls(grids, self.encoder.item_specs(grids), results.max_tokens_per_call)
        copied = len(calls) > 1 or (self.owned and len(grids) > 1)
        done: list[Any] = []
        held: list[EncoderOutput] = []
        row = 0
        for parts in calls:
            rows = sum(part.rows for part in parts)
            for part, piece in zip(parts, self._outputs(inputs, parts, row, rows), strict=True):
                held.append(piece if self.owned or len(calls) == 1 else piece.clone())
                if not part.last:
                    continue
                if results.pool != "none":
                    whole = join_outputs(held)
                    done.append(pool(whole, results.pool, grids[part.item], results.normalize))
                elif len(held) > 1:
                    done.append(join_outputs(held))
                else:
                    done.append(held[0].clone() if copied and self.owned else held[0])
                held = []
            row += rows
        return done

    def _outputs(
        self, inputs: VisionInputs, parts: Sequence[Part], row: int, rows: int
    ) -> list[EncoderOutput]:
        grids = [part.grid for part in parts]
        with advising_limit(sum(part.tokens for part in parts), self.device):
            output = self.call(inputs.pixel_values[row : row + rows], grids)
        return self.encoder.split(output, grids)


class Part(NamedTuple):
    """Consecutive segments of one item: all of them, unless the item exceeds the limit."""

    item: int
    grid: Grid
    rows: int
    tokens: int
    last: bool
    """Whether the item ends here."""


def plan_calls(
    grids: Sequence[Grid], specs: Sequence[EncoderItemSpec], limit: int | None
) -> list[list[Part]]:
    """Which parts of which items each call encodes, in order.

    Args:
        grids: the (t, h, w) of each item.
        specs: what ``item_specs`` says of them.
        limit: most output tokens per call. An item above it is cut between its segments, which is
            exact: no row attends outside its segment, and positions repeat in each. One segment
            alone may exceed the limit.

    Returns:
        One call if ``limit`` is None, and no call if there are no items.
    """
    calls: list[list[Part]] = []
    used = 0
    for item, ((t, h, w), spec) in enumerate(zip(grids, specs, strict=True)):
        step = t
        if limit is not None and spec.output_tokens > limit and spec.segments == t:
            step = max(limit * t // spec.output_tokens, 1)
        for start in range(0, t, step):
            count = min(step, t - start)
            tokens = spec.output_tokens * count // t
            if not calls or (limit is not None and used + tokens > limit):
                calls.append([])
                used = 0
            rows = spec.input_size * count // t
            calls[-1].append(Part(item, (count, h, w), rows, tokens, start + count == t))
            used += tokens
    return calls


def join_outputs(parts: Sequence[EncoderOutput]) -> EncoderOutput:
    """The output of an item from the outputs of its parts, in order."""
    if len(parts) == 1:
        return parts[0]
    hidden, pooled, deepstack = zip(*parts, strict=True)
    return EncoderOutput(
        None if hidden[0] is None else torch.cat(hidden),
        None if pooled[0] is None else torch.cat(pooled),
        None if deepstack[0] is None else tuple(map(torch.cat, zip(*deepstack, strict=True))),
    )


@contextmanager
def advising_limit(tokens: int, device: torch.device) -> Iterator[None]:
    """Name ``max_tokens_per_call`` where memory runs out inside.

    Raises:
        torch.OutOfMemoryError: the device ran out of memory.
        MemoryError: the host ran out of memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        kind = torch.OutOfMemoryError if device.type != "cpu" else MemoryError
        raise kind(
            f"a call of {tokens:,} output tokens ran out of memory on {device}: pass "
            f"max_tokens_per_call={max(tokens // 2, 1)} or less to encode in more calls (an item "
            "is cut between its frames or tiles); one image that is too large needs a smaller "
            "max_pixels"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python says that memory ran out; torch has no class for the CPU's."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
