"""Running plans on what was captured: inputs into the arena, replay, results out to the caller."""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor

from encoders.contract import EncoderOutput, Metadata

from .budgets import Batch, Budget, read_specs
from .capture import Graphs
from .guards import WeightGuard
from .packing import Packer
from .plans import Cache, Plan, Step, gather, scatter, views_of
from .results import is_per_row, output_fields, owned, read_out, share_storage
from .runner import Runner, Target, capacity_metadata
from .stats import BudgetStats, GraphStats

METADATA_BYTES = 64 * 2**20
"""Bytes kept for grids seen before, for replays and for eager runs each."""
VIEW_BYTES = 1024
"""Host bytes of a view of the arena; views are kept because making one takes microseconds."""


class _Use(NamedTuple):
    """Which stream used the arena last, and until when."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    numbers: tuple[int, int, int]
    """The stream's numbers: comparing them needs no stream object."""


class _Prepared(NamedTuple):
    """A step seen before: its metadata on the device, and the places of its rows in the arena."""

    block: Tensor
    views: list[Tensor]


class Captured:
    """Everything that capture makes and calls need; ``release()`` drops it whole.

    Args:
        target: what was captured, where and with which outputs.
        graphs: the runners and their memory; none on the eager backend.
        packer: decides what runs with what.
        guard: notices weights that moved.
        clone: whether results are the caller's own.
    """

    def __init__(
        self, target: Target, graphs: Graphs, packer: Packer, guard: WeightGuard, *, clone: bool
    ) -> None:
        self.target, self.graphs, self.packer, self.guard = target, graphs, packer, guard
        self.clone = clone
        self._blocks: Cache[_Prepared] = Cache(METADATA_BYTES)
        self._eager: Cache[Metadata] = Cache(METADATA_BYTES)
        self._written: object = None
        self._used: _Use | None = None
        self._like: dict[str, Tensor] | None = None
        self.reset_stats()
        self._mark_stream()

    @property
    def pads(self) -> bool:
        """Whether there are budgets at all, or everything runs eagerly as it is."""
        return self.target.backend != "eager"

    def run(self, plan: Plan, pixels: Tensor, out: EncoderOutput | None) -> dict[str, Tensor]:
        """Run every group of a plan.

        Args:
            plan: of the call.
            pixels: the rows of all items.
            out: tensors to write the results into, or None.

        Returns:
            The wanted fields by name, items in the caller's order.
        """
        given = self._read_out(plan, pixels, out) if out is not None else None
        if len(plan.steps) > 1 and any(share_storage(pixels, held) for held in self._lent()):
            pixels = pixels.clone()  # what one group writes must not be what the next one reads
        self._order_streams()
        try:
            if self.target.accelerator is not None:
                self.target.accelerator.refresh()  # on this stream: graphs read derived weights
            return self._run(plan, pixels, given)
        finally:  # a call that failed half-way has used the arena, too
            self._mark_stream()

    def _run(
        self, plan: Plan, pixels: Tensor, given: dict[str, Tensor] | None
    ) -> dict[str, Tensor]:
        alone = len(plan.steps) == 1 and given is None  # no place beside others' results
        results = given or {}
        for step in plan.steps:
            if step.budget is None:
                fields = self._run_eagerly(step, pixels, own=alone and self.clone)
            else:
                fields = self._replay(step, step.budget, pixels)
                if alone and self.clone:
                    fields = {name: field.clone() for name, field in fields.items()}
            if alone:
                return fields
            for name, field in fields.items():
                rows = is_per_row(name)
                if name not in results:
                    length = plan.rows if rows else plan.tokens
                    results[name] = field.new_empty(length, *field.shape[1:])
                scatter(field, results[name], step.rows if rows else step.tokens)
        return results

    def _read_out(self, plan: Plan, pixels: Tensor, out: EncoderOutput) -> dict[str, Tensor]:
        """Return the caller's tensors, checked before anything runs."""
        if self._like is None:
            self._like = self._example(pixels)
        lent = self._lent()
        if len(plan.steps) > 1:  # what one group writes must not be what the next one reads
            lent.append(pixels)
        return read_out(out, self.target.outputs, self._like, plan.rows, plan.tokens, lent)

    def _lent(self) -> list[Tensor]:
        """Return the buffers that earlier results are views of."""
        return [] if self.clone else list(self.graphs.arena.outputs.values())

    def _example(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return fields as they come back, but for their length: captured, or of an empty run."""
        for runner in self.graphs.runners.values():
            return runner.outputs
        encoder = self.target.encoder
        metadata = encoder.prepare_encoder_metadata([], device=self.target.device)
        output = encoder(pixels[:0], encoder_metadata=metadata)
        return output_fields(output, self.target.outputs)

    def _replay(self, step: Step, budget: Budget, pixels: Tensor) -> dict[str, Tensor]:
        runner = self.graphs.runners[budget]
        views = self._write_metadata(step, runner)
        gather(pixels, step.rows, views)
        if runner.graph is None:  # a body would trip over what has changed
            self.guard.check()
            runner.run()
        else:  # the device works meanwhile, and no result has left the arena yet
            runner.run()
            self.guard.check()
        self._entries[budget].count(len(step.grids), step.token_count)
        return {
            name: field[: step.row_count if is_per_row(name) else step.token_count]
            for name, field in runner.outputs.items()
        }

    def _write_metadata(self, step: Step, runner: Runner) -> list[Tensor]:
        """Write a step's metadata into the arena; return the places of its rows there."""
        key = (runner.budget, step.grids, step.rows)
        prepared = self._blocks.get(key)
        if prepared is None:
            self.guard.check()  # metadata in another dtype would be an error of another kind
            prepared = self._prepare(step, runner)
            size = prepared.block.numel() + VIEW_BYTES * len(prepared.views)
            self._blocks.put(key, prepared, size)
        if self._written != key:
            block = prepared.block
            if block.is_cuda:  # it may be kept since a call on another stream, and dropped any time
                block.record_stream(torch.cuda.current_stream(self.target.device))
            self._written = None  # an interrupt may come after the copy and before the next line
            runner.block.copy_(block, non_blocking=True)
            self._written = key
        return prepared.views

    def _prepare(self, step: Step, runner: Runner) -> _Prepared:
        target, budget, grids = self.target, runner.budget, list(step.grids)
        batch = Batch.of(read_specs(target.encoder, grids))
        exceeded = budget.exceeded_by(batch)
        assert exceeded is None, f"packing put {batch} into {budget}: over its {exceeded}"
        host = torch.empty(
            runner.layout.nbytes,
            dtype=torch.uint8,
            device="cpu",
            pin_memory=target.device.type == "cuda",
        )
        metadata = capacity_metadata(target.encoder, budget, grids)
        runner.layout.write(host, metadata, step.row_count)
        block = host.to(target.device, non_blocking=True)
        return _Prepared(block, views_of(runner.pixels, step.rows))

    def _run_eagerly(self, step: Step, pixels: Tensor, *, own: bool) -> dict[str, Tensor]:
        """Run a step without a graph, its results in memory of their own if ``own``."""
        target = self.target
        if self.pads:  # without budgets the encoder is followed wherever it goes
            self.guard.check()
        rows = pixels
        if step.row_count != pixels.shape[0]:
            rows = pixels.new_empty(step.row_count, *pixels.shape[1:])
            gather(pixels, step.rows, views_of(rows, step.rows))
        if self.pads:  # as the copy into the arena does
            rows = rows.to(target.device, target.dtype, non_blocking=True)
        metadata = self._eager_metadata(step)
        output = target.encoder(rows, encoder_metadata=metadata)
        fields = output_fields(output, target.outputs)
        fields = {name: field.contiguous() for name, field in fields.items()}
        if step.grids:
            self.counts.eager_calls += 1
            self.counts.eager_items += len(step.grids)
            self.counts.eager_reasons.update(step.reasons)
        lent = [pixels, *metadata.values()]
        return owned(fields, lent, self.guard.storages) if own else fields

    def _eager_metadata(self, step: Step) -> Metadata:
        """Return the metadata of an eager step, kept since it was first seen."""
        metadata = self._eager.get(step.grids)
        if metadata is None:
            encoder, device = self.target.encoder, self.target.device
            metadata = encoder.prepare_encoder_metadata(list(step.grids), device=device)
            self._eager.put(step.grids, metadata, sum(value.nbytes for value in metadata.values()))
            return metadata
        for value in metadata.values():
            if value.is_cuda:  # as in _write_metadata
                value.record_stream(torch.cuda.current_stream(self.target.device))
        return metadata

    def _order_streams(self) -> None:
        """Wait for the last call if it ran on another stream: the arena is shared."""
        if self._used is None or self._used.numbers == _stream_numbers(self.target.device):
            return
        if not self.clone:  # and for what was done with its results since
            self._used.event.record(self._used.stream)
        torch.cuda.current_stream(self.target.device).wait_event(self._used.event)

    def _mark_stream(self) -> None:
        """Note that the arena is in use by all that this stream has been given so far."""
        if self.target.device.type != "cuda":
            return
        numbers = _stream_numbers(self.target.device)
        if self._used is None or self._used.numbers != numbers:
            event = self._used.event if self._used is not None else torch.cuda.Event()
            stream = torch.cuda.current_stream(self.target.device)
            self.graphs.arena.mark_stream(stream)
            self._used = _Use(stream, event, numbers)
        self._used.event.record(self._used.stream)

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        self.counts = self.graphs.fresh_stats(self.target.backend)
        self._entries: dict[Budget, BudgetStats] = dict(
            zip(sorted(self.graphs.stats), self.counts.budgets, strict=True)
        )

    def stats(self) -> GraphStats:
        """Return a copy of the counters, with what is held now."""
        stats = deepcopy(self.counts)
        stats.cache_bytes = self._blocks.held + self._eager.held
        accelerator = self.target.accelerator
        if accelerator is not None:
            stats.derived_bytes = accelerator.nbytes
            stats.note = accelerator.choices().get("reference_because") or ""
        return stats

    def poison(self) -> None:
        """Fill every stale buffer and pool page with NaN (for tests): no result may change."""
        self._written = None
        self.graphs.arena.poison()
        if self.graphs.pool is not None:
            torch.cuda.synchronize(self.target.device)
            self.graphs.pool.poison()


def _stream_numbers(device: torch.device) -> tuple[int, int, int]:
    """Return the current stream in numbers: making the object takes several microseconds."""
    numbers: tuple[int, int, int] = torch._C._cuda_getCurrentStream(device.index)
    return numbers
