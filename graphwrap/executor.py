"""Running a plan: inputs and metadata into the arena, replay, results out to the caller."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from encoders.contract import EncoderOutput, GraphableEncoder, Metadata

from .budgets import Budget
from .buffers import output_fields
from .capture import capacity_metadata, poison_pool
from .guards import WeightGuard
from .plans import Cache, Plan, Step, copy_runs
from .session import Session
from .stats import GraphStats

METADATA_BYTES = 64 * 2**20
"""Metadata kept on the device for grids seen before, for replays and for eager runs each."""


@dataclass
class Executor:
    """Runs plans on one session; ``session`` is None where nothing is ever padded."""

    encoder: GraphableEncoder
    device: torch.device
    wanted: tuple[str, ...]
    clone: bool
    session: Session | None
    counts: GraphStats
    guard: WeightGuard | None
    _blocks: Cache[Tensor] = dataclasses.field(default_factory=lambda: Cache(METADATA_BYTES))
    _eager: Cache[Metadata] = dataclasses.field(default_factory=lambda: Cache(METADATA_BYTES))
    _written: object = None
    _used: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    def run(self, plan: Plan, pixels: Tensor, out: EncoderOutput | None) -> dict[str, Tensor]:
        """Every group of a plan; the wanted fields by name, items in the caller's order."""
        self._order_streams()
        fields = self._run(plan, pixels, out)
        self._mark_stream()
        return fields

    def _run(self, plan: Plan, pixels: Tensor, out: EncoderOutput | None) -> dict[str, Tensor]:
        given = output_fields(out, self.wanted) if out is not None else None
        results: dict[str, Tensor] = {}
        for step in plan.steps:
            fields = self._eager_step(step, pixels)
            if step.budget is not None:
                fields = self._replay_step(step, step.budget, pixels)
            if len(plan.steps) == 1 and given is None:
                own = step.budget is None or not self.clone
                return {name: field if own else field.clone() for name, field in fields.items()}
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
            by_row = name == "last_hidden_state"
            shape = (plan.rows if by_row else plan.tokens, *field.shape[1:])
            if name not in results:
                results[name] = _target(name, given, shape, field)
            copy_runs(field, results[name], step.rows if by_row else step.tokens, back=True)

    def _replay_step(self, step: Step, budget: Budget, pixels: Tensor) -> dict[str, Tensor]:
        assert self.session is not None
        runner = self.session.runners[budget]
        self._write_block(step, budget)
        copy_runs(pixels, runner.pixels, step.rows)
        runner.run()
        if self.guard is not None:
            self.guard.check()  # while the device works; no result has left the arena yet
        self._count_replay(step, budget)
        return {
            name: field[: step.row_count if name == "last_hidden_state" else step.token_count]
            for name, field in runner.outputs.items()
        }

    def _write_block(self, step: Step, budget: Budget) -> None:
        """Bring the group's metadata into the arena: nothing if it is there, else one copy."""
        assert self.session is not None
        key = (budget, step.grids)
        if self._written == key:
            return
        runner = self.session.runners[budget]
        block = self._blocks.get(key)
        if block is None:
            host = torch.empty(
                runner.layout.nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
            )
            metadata = capacity_metadata(self.encoder, budget, list(step.grids))
            runner.layout.write(host, metadata, step.row_count)
            block = host.to(self.device, non_blocking=True)
            self._blocks.put(key, block, block.numel())
        if block.is_cuda:  # kept since a call on another stream, perhaps, and evicted at any time
            block.record_stream(torch.cuda.current_stream(self.device))
        runner.block.copy_(block, non_blocking=True)
        self._written = key

    def _eager_step(self, step: Step, pixels: Tensor) -> dict[str, Tensor]:
        if step.budget is not None:
            return {}
        rows = pixels
        if step.row_count != pixels.shape[0]:
            rows = pixels.new_empty(step.row_count, *pixels.shape[1:])
            copy_runs(pixels, rows, step.rows)
        metadata = self._eager.get(step.grids)
        if metadata is None:
            metadata = self.encoder.prepare_encoder_metadata(list(step.grids), device=self.device)
            size = sum(value.numel() * value.element_size() for value in metadata.values())
            self._eager.put(step.grids, metadata, size)
        self.counts.eager_calls += 1
        self.counts.eager_items += step.items
        self.counts.eager_reasons[step.reason or "eager"] += step.items
        output = self.encoder(rows, encoder_metadata=metadata)
        if self.guard is not None:
            self.guard.check()
        return {n: f.contiguous() for n, f in output_fields(output, self.wanted).items()}

    def _order_streams(self) -> None:
        """The arena is shared: work on another stream waits for the last call's."""
        if self.device.type != "cuda" or self._used is None:
            return
        stream, event = self._used
        current = torch.cuda.current_stream(self.device)
        if current != stream:
            current.wait_event(event)

    def _mark_stream(self) -> None:
        if self.device.type == "cuda":
            current = torch.cuda.current_stream(self.device)
            event = self._used[1] if self._used is not None else torch.cuda.Event()
            event.record(current)
            self._used = (current, event)

    def _count_replay(self, step: Step, budget: Budget) -> None:
        assert self.session is not None
        entry = self.counts.budgets[self.session.places[budget]]
        entry.hits += 1
        entry.items += step.items
        entry.real_tokens += step.token_count
        entry.padded_tokens += budget.tokens

    @property
    def cache_bytes(self) -> int:
        """Bytes of metadata kept."""
        return self._blocks.held + self._eager.held

    def poison(self) -> None:
        """Fill every stale buffer and pool page with NaN (for tests): no result may change."""
        self._written = None
        if self.session is None:
            return
        self.session.arena.poison()
        if self.session.pool is not None:
            torch.cuda.synchronize(self.device)
            poison_pool(self.session.pool, self.device)


def _target(
    name: str, given: dict[str, Tensor] | None, shape: tuple[int, ...], like: Tensor
) -> Tensor:
    """Where a field goes: the caller's tensor, checked, or a new one."""
    if given is None:
        return like.new_empty(shape)
    if name not in given:
        raise ValueError(f"out has no {name}: pass a tensor of shape {shape} for it")
    target = given[name]
    if tuple(target.shape) != shape or target.dtype != like.dtype or target.device != like.device:
        raise ValueError(
            f"out.{name} is {target.dtype} {tuple(target.shape)} on {target.device}: must be "
            f"{like.dtype} {shape} on {like.device}"
        )
    return target
