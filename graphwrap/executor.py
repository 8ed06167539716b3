"""Running a plan: inputs and metadata into the arena, replay, results out to the caller."""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from encoders.contract import Accelerator, EncoderOutput, GraphableEncoder, Metadata

from .budgets import Budget, Load, read_specs
from .buffers import output_fields
from .capture import Runner, capacity_metadata
from .guards import WeightGuard
from .plans import Cache, Plan, Step, gather_runs, places_of, scatter_runs
from .results import Face, by_row, face_of, overlap, own, read_out
from .session import Session
from .stats import GraphStats

METADATA_BYTES = 64 * 2**20
"""Metadata kept on the device for grids seen before, for replays and for eager runs each."""
PLACES = 8192
"""Views of the arena kept, a run each: after a wait, making one takes as long as a launch."""


class Use(NamedTuple):
    """Who used the arena last, and until when."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    numbers: tuple[int, int, int]
    """The stream's: comparing them takes no object."""


@dataclass
class Executor:
    """Runs plans on one session; ``session`` is None where nothing is ever padded."""

    encoder: GraphableEncoder
    device: torch.device
    dtype: torch.dtype
    wanted: tuple[str, ...]
    clone: bool
    session: Session | None
    counts: GraphStats
    guard: WeightGuard | None
    weights: frozenset[int]
    """Where the storages of weights start."""
    accelerator: Accelerator | None = None
    """Of the encoder, if it is accelerated."""
    _blocks: Cache[Tensor] = dataclasses.field(default_factory=lambda: Cache(METADATA_BYTES))
    _eager: Cache[Metadata] = dataclasses.field(default_factory=lambda: Cache(METADATA_BYTES))
    _places: Cache[tuple[Tensor, ...]] = dataclasses.field(default_factory=lambda: Cache(PLACES))
    _written: object = None
    _used: Use | None = None
    _face: Face | None = None

    def run(self, plan: Plan, pixels: Tensor, out: EncoderOutput | None) -> dict[str, Tensor]:
        """Every group of a plan; the wanted fields by name, items in the caller's order."""
        given = self._read_out(plan, pixels, out) if out is not None else None
        if len(plan.steps) > 1:  # what one group writes must not be what the next one reads
            pixels = self._apart(pixels)
        self._order_streams()
        try:
            if self.accelerator is not None:
                self.accelerator.refresh()  # on this stream: a graph reads derived weights in place
            return self._run(plan, pixels, given)
        finally:  # a call that failed half-way has used the arena, too
            self.mark_stream()

    def _run(
        self, plan: Plan, pixels: Tensor, given: dict[str, Tensor] | None
    ) -> dict[str, Tensor]:
        alone = len(plan.steps) == 1 and given is None  # results need no place beside others'
        results: dict[str, Tensor] = {}
        for step in plan.steps:
            if step.budget is None:
                fields = self._eager_step(step, pixels, owned=alone and self.clone)
            else:
                fields = self._replay_step(step, step.budget, pixels)
                if alone and self.clone:
                    fields = {name: field.clone() for name, field in fields.items()}
            if alone:
                return fields
            self._collect(step, plan, fields, results, given)
        return results

    def _collect(
        self,
        step: Step,
        plan: Plan,
        fields: dict[str, Tensor],
        results: dict[str, Tensor],
        given: dict[str, Tensor] | None,
    ) -> None:
        """Copy a group's results to their places in the caller's order."""
        for name, field in fields.items():
            rows = by_row(name)
            if given is not None:
                results[name] = given[name]
            elif name not in results:
                length = plan.rows if rows else plan.tokens
                results[name] = field.new_empty(length, *field.shape[1:])
            scatter_runs(field, results[name], step.rows if rows else step.tokens)

    def _read_out(self, plan: Plan, pixels: Tensor, out: EncoderOutput) -> dict[str, Tensor]:
        """The caller's tensors, checked before anything runs."""
        if self._face is None:
            self._face = self._learn_face(pixels)
        lent = []
        if len(plan.steps) > 1:  # what one group writes must not be what the next one reads
            lent.append(pixels)
        lent += self._lent()
        return read_out(out, self.wanted, self._face, (plan.rows, plan.tokens), lent)

    def _lent(self) -> list[Tensor]:
        """Buffers that earlier results are views of."""
        if self.clone or self.session is None:
            return []
        return list(self.session.arena.outputs.values())

    def _apart(self, pixels: Tensor) -> Tensor:
        """Pixels that no group writes over: an earlier result may have been passed back."""
        return pixels.clone() if any(overlap(pixels, held) for held in self._lent()) else pixels

    def _learn_face(self, pixels: Tensor) -> Face:
        """What results look like: as captured, else as an empty run shows."""
        for runner in self.session.runners.values() if self.session else ():
            return face_of(runner.outputs)
        metadata = self.encoder.prepare_encoder_metadata([], device=self.device)
        output = self.encoder(pixels[:0], encoder_metadata=metadata)
        return face_of(output_fields(output, self.wanted))

    def _replay_step(self, step: Step, budget: Budget, pixels: Tensor) -> dict[str, Tensor]:
        assert self.session is not None
        runner = self.session.runners[budget]
        self._write_block(step, budget)
        self._write_rows(step, runner, pixels)
        self._replay(runner)
        self._count_replay(step, budget)
        return {
            name: field[: step.row_count if by_row(name) else step.token_count]
            for name, field in runner.outputs.items()
        }

    def _replay(self, runner: Runner) -> None:
        """A graph is checked while the device works (no result has left the arena yet).

        A body without a graph is checked first: it would trip over what has changed.
        """
        if runner.graph is not None:
            runner.run()
            self._check()
        else:
            self._check()
            runner.run()

    def _check(self) -> None:
        if self.guard is not None:
            self.guard.check()

    def _write_block(self, step: Step, budget: Budget) -> None:
        """Bring the group's metadata into the arena: nothing if it is there, else one copy."""
        assert self.session is not None
        key = (budget, step.grids)
        if self._written == key:
            return
        runner = self.session.runners[budget]
        block = self._blocks.get(key)
        if block is None:
            self._check()  # metadata in another dtype would be an error of another kind
            load = Load.of(read_specs(self.encoder, list(step.grids)))
            refused = budget.refuses(load)
            assert refused is None, f"packing put {load} into {budget}: over its {refused}"
            on_cuda = self.device.type == "cuda"
            nbytes = runner.layout.nbytes
            host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=on_cuda)
            metadata = capacity_metadata(self.encoder, budget, list(step.grids))
            runner.layout.write(host, metadata, step.row_count)
            block = host.to(self.device, non_blocking=True)
            self._blocks.put(key, block, block.numel())
        if block.is_cuda:  # kept since a call on another stream, perhaps, and evicted at any time
            block.record_stream(torch.cuda.current_stream(self.device))
        self._written = None  # an interrupt may come after the copy, and before what is noted
        runner.block.copy_(block, non_blocking=True)
        self._written = key

    def _write_rows(self, step: Step, runner: Runner, pixels: Tensor) -> None:
        key = (runner.budget, step.rows)
        places = self._places.get(key)
        if places is None:
            places = places_of(runner.pixels, step.rows)
            self._places.put(key, places, len(places))
        gather_runs(pixels, places, step.rows)

    def _eager_step(self, step: Step, pixels: Tensor, owned: bool) -> dict[str, Tensor]:
        """Results in memory of their own if ``owned``, else perhaps in what the encoder holds."""
        self._check()
        rows = pixels
        if step.row_count != pixels.shape[0]:
            rows = pixels.new_empty(step.row_count, *pixels.shape[1:])
            gather_runs(pixels, places_of(rows, step.rows), step.rows)
        if self.session is not None:  # as the copy into the arena does
            rows = rows.to(self.device, self.dtype, non_blocking=True)
        metadata = self._eager_metadata(step)
        if step.items:
            self.counts.eager_calls += 1
            self.counts.eager_items += step.items
            self.counts.eager_reasons.update(step.reasons)
        output = self.encoder(rows, encoder_metadata=metadata)
        fields = {n: f.contiguous() for n, f in output_fields(output, self.wanted).items()}
        return own(fields, [pixels, *metadata.values()], self.weights) if owned else fields

    def _eager_metadata(self, step: Step) -> Metadata:
        metadata = self._eager.get(step.grids)
        if metadata is None:
            metadata = self.encoder.prepare_encoder_metadata(list(step.grids), device=self.device)
            size = sum(value.numel() * value.element_size() for value in metadata.values())
            self._eager.put(step.grids, metadata, size)
            return metadata
        for value in metadata.values():
            if value.is_cuda:  # as in _write_block
                value.record_stream(torch.cuda.current_stream(self.device))
        return metadata

    def _order_streams(self) -> None:
        """The arena is shared: work on another stream waits for the last call's."""
        if self._used is None or self._used.numbers == _stream_numbers(self.device):
            return
        if not self.clone:  # and for what was done with its results since
            self._used.event.record(self._used.stream)
        torch.cuda.current_stream(self.device).wait_event(self._used.event)

    def mark_stream(self) -> None:
        """Note that the arena is in use by all that this stream has been given so far."""
        if self.device.type != "cuda":
            return
        numbers = _stream_numbers(self.device)
        if self._used is None or self._used.numbers != numbers:
            event = self._used.event if self._used is not None else torch.cuda.Event()
            stream = torch.cuda.current_stream(self.device)
            if self.session is not None:
                self.session.arena.mark_stream(stream)
            self._used = Use(stream, event, numbers)
        self._used.event.record(self._used.stream)

    def _count_replay(self, step: Step, budget: Budget) -> None:
        assert self.session is not None
        entry = self.counts.budgets[self.session.places[budget]]
        entry.hits += 1
        entry.items += step.items
        entry.real_tokens += step.token_count
        entry.padded_tokens += budget.tokens

    def stats(self) -> GraphStats:
        """A copy of the counters, with what is held now."""
        stats = deepcopy(self.counts)
        stats.cache_bytes = self._blocks.held + self._eager.held
        if self.accelerator is not None:
            stats.derived_bytes = self.accelerator.nbytes
            stats.note = self.accelerator.choices().get("reference_because") or ""
        return stats

    def poison(self) -> None:
        """Fill every stale buffer and pool page with NaN (for tests): no result may change."""
        self._written = None
        if self.session is None:
            return
        self.session.arena.poison()
        if self.session.pool is not None:
            torch.cuda.synchronize(self.device)
            self.session.pool.poison()


def _stream_numbers(device: torch.device) -> tuple[int, int, int]:
    """The current stream in numbers: the object takes several microseconds to make."""
    numbers: tuple[int, int, int] = torch._C._cuda_getCurrentStream(device.index)
    return numbers
