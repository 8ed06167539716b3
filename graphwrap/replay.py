"""Running calls on what was captured: inputs into the arena, replay, results out to the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from encoders.contract import EncoderOutput, GridLike, Metadata, PartialOutput
from encoders.grids import read_grid

from .budgets import Batch, Budget, read_specs
from .buffers import Arena, Memory
from .guards import WeightGuard
from .packing import Group, Packer
from .plans import Cache, Plan, Step, gather, make_plan, refuse_overflow, scatter
from .results import as_output, is_per_row, output_fields, owned, read_out, share_storage
from .runner import Runner, Target, capacity_metadata
from .stats import BudgetStats, GraphStats

Inputs: TypeAlias = tuple[Tensor, GridLike | None]
"""The pixels and the grid of one path, as a :class:`PathInputs` has them."""
Out: TypeAlias = EncoderOutput | PartialOutput
"""Tensors of the caller to write results into, None for a field that is not returned."""
PLAN_ITEMS = 200_000
"""Items of all plans kept: a call with a grid seen before costs one look-up."""
METADATA_BYTES = 128 * 2**20
"""Bytes of metadata kept for grids seen before."""


@dataclass
class Graphs:
    """What the capture of one path makes."""

    arena: Arena
    packer: Packer
    runners: dict[Budget, Runner] = field(default_factory=dict)
    stats: dict[Budget, BudgetStats] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


@dataclass
class Executor:
    """Runs the calls of one encoder, or of one path of it, on what was captured."""

    target: Target
    graphs: Graphs
    """The runners, their arena and what packs; no runners on the eager backend."""
    guard: WeightGuard
    counts: GraphStats
    """Where eager runs are counted."""
    clone: bool
    """Whether results are the caller's own."""
    plans: Cache[Plan] = field(default_factory=lambda: Cache(PLAN_ITEMS))
    prepared: Cache[Metadata] = field(default_factory=lambda: Cache(METADATA_BYTES))
    """The metadata of steps; for a replay, one block of bytes."""
    written: object = None
    """The key of the step whose metadata lie in the arena."""

    def __post_init__(self) -> None:
        self.pads = self.target.backend != "eager"
        """Whether there are budgets at all, or everything runs eagerly as it is."""
        self.row_shape = tuple(self.graphs.arena.pixels.shape[1:])
        self._like: dict[str, Tensor] = {}

    def plan(self, grid_thw: GridLike | None, rows: int | None = None) -> Plan:
        """Return the plan of a grid for so many pixel rows, kept since it was first seen."""
        if grid_thw is None:
            raise ValueError("grid_thw is None: pass [items, 3], one row (t, h, w) per item")
        key = tuple(read_grid(grid_thw))
        plan = self.plans.get(key)
        specs = [] if plan else self.target.encoder.item_specs(list(key))
        made = plan.rows if plan else sum([spec.input_size for spec in specs])
        if rows is not None and rows != made:  # packing needs sane numbers
            raise ValueError(
                f"pixel_values has {rows} rows but the grid makes {made}: pass the grid_thw that "
                "belongs to these pixels"
            )
        if plan is not None:
            return plan
        if specs and self.pads:
            groups = self.graphs.packer.pack(specs)
        else:  # also where there is nothing
            why = ("eager backend",) * len(specs)
            groups = [Group(tuple(range(len(specs))), None, 0.0, why)]
        plan = make_plan(key, specs, groups)
        self.plans.put(key, plan, max(len(key), 1))
        return plan

    def run(self, plan: Plan, pixels: Tensor, out: Out | None) -> dict[str, Tensor]:
        """Run every group of a plan; return the wanted fields by name, in the caller's order."""
        lent = [] if self.clone else list(self.graphs.arena.outputs.values())
        results = self._read_out(plan, pixels, lent, out) if out is not None else {}
        alone = len(plan.steps) == 1 and out is None  # no place beside others' results
        if len(plan.steps) > 1 and any(share_storage(pixels, view) for view in lent):
            pixels = pixels.clone()  # what one group writes must not be what the next one reads
        for step in plan.steps:
            run = self._replay if step.budget else self._run_eagerly
            fields = run(step, pixels, own=alone and self.clone)
            if alone:
                return fields
            for name, value in fields.items():
                rows = is_per_row(name)
                if name not in results:
                    length = plan.rows if rows else plan.tokens
                    results[name] = value.new_empty(length, *value.shape[1:])
                scatter(value, results[name], step.rows if rows else step.tokens)
        return results

    def _read_out(
        self, plan: Plan, pixels: Tensor, lent: list[Tensor], out: Out
    ) -> dict[str, Tensor]:
        """Return the caller's tensors, checked before anything runs."""
        for runner in self.graphs.runners.values():
            self._like = runner.outputs
        if not self._like:  # the fields of an empty run are like those of any other
            self._like = output_fields(self.target.encoder(pixels[:0], []), self.target.outputs)
        if len(plan.steps) > 1:  # what one group writes must not be what the next one reads
            lent = [*lent, pixels]
        return read_out(out, self._like, plan.rows, plan.tokens, lent)

    def _replay(self, step: Step, pixels: Tensor, *, own: bool) -> dict[str, Tensor]:
        """Return the results of a replay, copied out of the arena if ``own``."""
        assert step.budget is not None
        runner, key = self.graphs.runners[step.budget], (step.budget, step.grids, step.rows)
        if self.written != key:
            block = self._prepare(key, step)["block"]
            self._keep_for_stream(block)
            self.written = None  # an interrupt may come after the copy and before the next line
            runner.block.copy_(block, non_blocking=True)
            self.written = key
        gather(pixels, step.rows, runner.pixels)
        if runner.graph is None:  # a body would trip over what has changed
            self.guard.check()
            runner.run()
        else:  # the device works meanwhile, and no result has left the arena yet
            runner.run()
            self.guard.check()
            accelerator = self.target.accelerator
            if accelerator is not None and accelerator.refresh():  # a weight had been written
                runner.run()
        rows, tokens = step.row_count, step.token_count
        self.graphs.stats[step.budget].count(len(step.grids), tokens)
        views = {
            name: x[: rows if is_per_row(name) else tokens] for name, x in runner.outputs.items()
        }
        return {name: view.clone() for name, view in views.items()} if own else views

    def _run_eagerly(self, step: Step, pixels: Tensor, *, own: bool) -> dict[str, Tensor]:
        """Return the results of an eager run, in memory of their own if ``own``."""
        target, rows = self.target, pixels
        if self.pads:  # without budgets the encoder is followed wherever it goes
            self.guard.check()
        if step.row_count != pixels.shape[0]:
            rows = pixels.new_empty(step.row_count, *pixels.shape[1:])
            gather(pixels, step.rows, rows)
        if self.pads:  # as the copy into the arena does
            rows = rows.to(target.device, target.dtype, non_blocking=True)
        metadata = self._prepare(step.grids, step)
        self._keep_for_stream(*metadata.values())
        output = target.encoder(rows, encoder_metadata=metadata)
        fields = output_fields(output, target.outputs)
        fields = {name: value.contiguous() for name, value in fields.items()}
        if step.grids:
            self.counts.eager_calls += 1
            self.counts.eager_items += len(step.grids)
            self.counts.eager_reasons.update(step.reasons)
        return owned(fields, [pixels, *metadata.values()], self.guard.storages) if own else fields

    def _prepare(self, key: object, step: Step) -> Metadata:
        """Return the metadata of a step, kept since it was first seen."""
        prepared = self.prepared.get(key)
        if prepared is None:
            encoder, device, grids = self.target.encoder, self.target.device, list(step.grids)
            if step.budget is None:
                prepared = encoder.prepare_encoder_metadata(grids, device=device)
            else:
                self.guard.check()  # metadata in another dtype would be an error of another kind
                budget, runner = step.budget, self.graphs.runners[step.budget]
                batch = Batch.of(read_specs(encoder, grids))
                exceeded = budget.exceeded_by(batch)
                assert exceeded is None, f"packing put {batch} into {budget}: over its {exceeded}"
                metadata = capacity_metadata(encoder, budget, grids)
                host = runner.layout.pack(metadata, step.row_count, pinned=device.type == "cuda")
                prepared = {"block": host.to(device, non_blocking=True)}
            self.prepared.put(key, prepared, sum(value.nbytes for value in prepared.values()))
        return prepared

    def _keep_for_stream(self, *tensors: Tensor) -> None:
        """Note that this stream reads tensors that may be of another one, and dropped any time."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(self.target.device))


@dataclass(frozen=True)
class Captured:
    """Everything that capture makes and calls need; ``release()`` drops it whole."""

    paths: dict[str, Executor]
    """By the names of the encoder's paths, of which most encoders have one."""
    memory: Memory
    guard: WeightGuard
    lends: bool
    """Whether results are views of the memory, which others may still be reading."""

    def run(
        self, inputs: Mapping[str, Inputs], out: Out | None, *, refuses: bool
    ) -> dict[str, PartialOutput]:
        """Return the outputs of the paths that have inputs."""
        plans = {
            k: self.paths[k].plan(grid, pixels.shape[0]) for k, (pixels, grid) in inputs.items()
        }
        for plan in plans.values() if refuses else ():
            refuse_overflow(plan)
        outputs = {}
        self.memory.wait_for_last_use(reads=self.lends)
        try:
            for name, plan in plans.items():
                path = self.paths[name]
                fields = path.run(plan, inputs[name][0], out)
                outputs[name] = as_output(fields, path.target.outputs)
        finally:  # a call that failed half-way has used the memory, too
            self.memory.mark_use()
        return outputs

    def measure(self, stats: GraphStats) -> None:
        """Add the bytes that are held now, and why an accelerator runs the reference."""
        stats.arena_bytes = sum(arena.nbytes for arena in self.memory.arenas)
        stats.pool_bytes = self.memory.pool_bytes
        stats.cache_bytes = sum(path.prepared.held for path in self.paths.values())
        made = dict.fromkeys(path.target.accelerator for path in self.paths.values())  # each once
        accelerators = [one for one in made if one is not None]
        stats.derived_bytes = sum(one.nbytes for one in accelerators)
        reasons = dict.fromkeys(one.choices().get("reference_because") for one in accelerators)
        stats.note = "; ".join(filter(None, reasons))
