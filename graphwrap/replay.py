"""Running calls on captured graphs: copy inputs in, replay, and copy results out to the caller."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm

from encoders.contract import GridLike, Metadata, PartialOutput, is_library
from encoders.grids import read_grid

from .budgets import Batch, Budget, read_specs
from .buffers import Arena, BudgetGraph, Memory, MetadataFormat, without_collections
from .changes import WeightGuard
from .encoder_forms import EncoderForm, capacity_metadata
from .outputs import as_output, copy_shared, output_fields, share_storage, unit_of
from .packing import Group, Packer, Schedule, Span, Step, make_schedule, refuse_overflow
from .stats import BudgetStats, GraphStats
from .torch_internals import versions_of

Inputs: TypeAlias = tuple[Tensor, GridLike | None]
"""The pixels, [P, *row_shape], and the grid, [items, 3], of the items of one input path."""
SCHEDULE_ITEMS = 200_000
"""The most items in all schedules that are kept, so that grids seen before are not packed again. An
item takes about 130 bytes (Python 3.11), so that all of them take 26 MB."""
METADATA_BYTES = 128 * 2**20
"""The most bytes of metadata that are kept for grids seen before."""
ENTRIES = 20_000
"""The most values that a cache keeps. A value takes about 2 KiB of the host's memory besides its
own bytes: metadata of eight tiled images has 168 bytes, so 128 MiB of it would take 1.6 GB."""
Value = TypeVar("Value")


class Cache(Generic[Value]):
    """A cache of the values used last: at most ``ENTRIES``, with a sum of sizes up to ``max_size``.

    The caller passes each value's size to ``put``, in any unit, such as bytes.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.size = 0
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()

    def get(self, key: Hashable) -> Value | None:
        """Return the value kept for a key, None if there is none; it becomes the one used last."""
        entry = self._values.get(key)
        if entry is not None:
            self._values.move_to_end(key)
        return entry and entry[0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Keep a value of this size; the values unused for longest are dropped to make room.

        A value that alone is larger than ``max_size`` is not kept.
        """
        if size > self.max_size:
            return
        self.size -= self._values.pop(key, (None, 0))[1]
        while self.size + size > self.max_size or len(self._values) >= ENTRIES:
            self.size -= self._values.popitem(last=False)[1][1]
        self._values[key] = (value, size)
        self.size += size

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
        self.size = 0


class Prepared(NamedTuple):
    """The metadata of a step, and the versions that its tensors had when they were made."""

    metadata: Metadata
    versions: list[int]

    @classmethod
    def of(cls, metadata: Metadata) -> Prepared:
        """Return metadata that were made just now."""
        return cls(metadata, versions_of([*metadata.values()]))

    def is_unwritten(self) -> bool:
        """Return whether nobody, such as the encoder, has written to the tensors since."""
        return versions_of([*self.metadata.values()]) == self.versions


class CapturesBudgets(Protocol):
    """Captures budgets of one input path, also after the first capture."""

    def add(self, graphs: PathGraphs, budgets: Iterable[Budget], bar: tqdm[NoReturn]) -> None:
        """Capture some of the waiting budgets, largest first; those that fail are dropped."""
        ...


@dataclass
class PathGraphs:
    """The captured graphs of one input path ("tiles"), and the packer that divides its items."""

    arena: Arena
    packer: Packer
    capturer: CapturesBudgets
    waiting: dict[Budget, MetadataFormat]
    """The budgets that are captured at their first use, with the format of their metadata."""
    by_budget: dict[Budget, BudgetGraph] = field(default_factory=dict)
    stats: dict[Budget, BudgetStats] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    measured_here: bool = False
    """Whether the costs were measured at this capture, and not read from a table."""


@dataclass
class Executor:
    """Runs the calls with one input path ("image", "tiles"), by CUDA graphs or eagerly."""

    form: EncoderForm
    graphs: PathGraphs
    """The captured budgets of the path; there are none on the eager backend."""
    guard: WeightGuard
    counts: GraphStats
    """The counters of the whole encoder, to which this object adds its eager runs."""
    clone: bool
    """Whether results are copied, so that they belong to the caller, or are views of static
    buffers."""
    schedules: Cache[Schedule] = field(default_factory=lambda: Cache(SCHEDULE_ITEMS))
    prepared: Cache[Prepared] = field(default_factory=lambda: Cache(METADATA_BYTES))
    """The metadata of steps (groups of items) seen before: tensors by name for an eager run, one
    tensor of bytes for a replay."""
    written_key: Hashable = None
    """The key of the step whose metadata is in the static buffers; None if unknown."""

    def __post_init__(self) -> None:
        self.pads = self.form.backend != "eager"
        """Whether inputs are padded to budgets; they are not on the eager backend."""
        self.row_shape = tuple(self.graphs.arena.pixels.shape[1:])
        self.is_library = is_library(self.form.encoder)
        """Whether the encoder is of a class of the library: its metadata do not depend on weights,
        and it keeps none of its outputs. Other encoders may do both."""
        self.versions = [] if self.is_library else self.guard.versions()

    def schedule(self, grid_thw: GridLike | None, rows: int | None = None) -> Schedule:
        """Return which items of a call run together, and how; kept for later calls of these grids.

        A ValueError is raised if ``rows``, the number of pixel rows, does not match the grids.
        """
        if grid_thw is None:
            raise ValueError("grid_thw is None: pass [items, 3], one row (t, h, w) per item")
        grids = read_grid(grid_thw)
        key = tuple(grids)
        schedule = self.schedules.get(key)
        specs = [] if schedule else self.form.encoder.item_specs(grids)
        sizes = [schedule.counts["rows"]] if schedule else [spec.input_size for spec in specs]
        grid_rows = sum(sizes)
        # The number of rows is checked first, because packing would fail on a wrong grid.
        if rows is not None and rows != grid_rows:
            raise ValueError(
                f"pixel_values has {rows} rows but the grid makes {grid_rows}: pass the grid_thw "
                "that belongs to these pixels"
            )
        if schedule is not None:
            return schedule
        if specs and self.pads:
            groups = self.graphs.packer.pack(specs)
        else:
            reasons = ("eager backend",) * len(specs)
            groups = [Group(tuple(range(len(specs))), None, 0.0, reasons)]
        schedule = make_schedule(key, specs, groups)
        self.schedules.put(key, schedule, max(len(key), 1))
        return schedule

    def waiting(self, grid_thw: GridLike | None) -> list[Budget]:
        """Return the budgets that a call with this grid needs and that are not captured yet."""
        if not self.graphs.waiting:
            return []
        steps = self.schedule(grid_thw).steps
        return [step.budget for step in steps if step.budget in self.graphs.waiting]

    def capture(self, budgets: Iterable[Budget], bar: tqdm[NoReturn]) -> None:
        """Capture these waiting budgets, and forget what was packed with those that failed."""
        dropped = len(self.graphs.dropped)
        self.written_key = None  # the static buffers are overwritten
        self.graphs.capturer.add(self.graphs, set(budgets), bar)
        if len(self.graphs.dropped) > dropped:
            self.schedules.clear()

    def execute(self, schedule: Schedule, pixels: Tensor) -> dict[str, Tensor]:
        """Run every step of a schedule, and return the wanted output fields by name.

        The ``pixels`` are the rows of all items of the call, [P, *row_shape].
        """
        if not self.is_library and (versions := self.guard.versions()) != self.versions:
            self.versions, self.written_key = versions, None
            self.prepared.clear()
        # The results of a single step are not copied into tensors of the whole call.
        if len(schedule.steps) == 1:
            return self._run(schedule.steps[0], pixels, copy=self.clone)
        lent = [] if self.clone else self.graphs.arena.outputs.values()
        if any(share_storage(pixels, view) for view in lent):
            pixels = pixels.clone()  # a step must not overwrite the input of the next one
        results: dict[str, Tensor] = {}
        for step in schedule.steps:
            for name, value in self._run(step, pixels, copy=False).items():
                unit = unit_of(name)
                if name not in results:
                    results[name] = value.new_empty(schedule.counts[unit], *value.shape[1:])
                scatter(value, results[name], step.spans[unit])
        return results

    def _run(self, step: Step, pixels: Tensor, *, copy: bool) -> dict[str, Tensor]:
        run = self._replay if step.budget else self._run_eagerly
        return run(step, pixels, copy=copy)

    def _replay(self, step: Step, pixels: Tensor, *, copy: bool) -> dict[str, Tensor]:
        """Return the output fields of a replayed step by name.

        They are views of the static buffers or, if ``copy``, copies; ``pixels`` has the rows of all
        items of the call.
        """
        assert step.budget is not None
        graph = self.graphs.by_budget[step.budget]
        key = step.budget, step.grids, step.spans["rows"]
        if self.written_key != key:
            metadata_bytes = self._prepare(key, step)["metadata_bytes"]
            self._keep_for_stream(metadata_bytes)
            # An interrupt may come between the copy and the next line: the content is unknown.
            self.written_key = None
            graph.metadata_bytes.copy_(metadata_bytes, non_blocking=True)
            self.written_key = key
        gather(pixels, step.spans["rows"], graph.pixels)
        if graph.captured is None:  # without a graph, the encoder may fail on changed weights
            self.guard.check()
            graph.replay()
        else:  # weights are checked while the device works, before results are copied out
            graph.replay()
            self.guard.check()
            accelerator = self.form.accelerator
            # If weights were written, derived ones were outdated in the replay above.
            if accelerator is not None and accelerator.refresh():
                graph.replay()
        if graph.writes_metadata:
            self.written_key = None
        self.graphs.stats[step.budget].count(len(step.grids), step.counts["tokens"])
        views = {name: x[: step.counts[unit_of(name)]] for name, x in graph.outputs.items()}
        return {name: view.clone() for name, view in views.items()} if copy else views

    def _run_eagerly(self, step: Step, pixels: Tensor, *, copy: bool) -> dict[str, Tensor]:
        """Return the output fields of a step that runs eagerly, by name.

        If ``copy``, none shares memory with inputs, weights or another field; ``pixels`` has the
        rows of all items of the call.
        """
        form, rows = self.form, pixels
        if self.pads:  # on the eager backend, changed weights are allowed
            self.guard.check()
        if (count := step.counts["rows"]) != pixels.shape[0]:
            rows = pixels.new_empty(count, *pixels.shape[1:])
            gather(pixels, step.spans["rows"], rows)
        if self.pads:  # pixels are cast, as a copy into static buffers would cast them
            rows = rows.to(form.device, form.dtype, non_blocking=True)
        metadata = self._prepare(step.grids, step)
        self._keep_for_stream(*metadata.values())
        output = form.encoder(rows, encoder_metadata=dict(metadata))
        fields = output_fields(output, form.outputs)
        fields = {name: value.contiguous() for name, value in fields.items()}
        if step.grids:
            self.counts.eager_calls += 1
            self.counts.eager_items += len(step.grids)
            self.counts.eager_reasons.update(step.reasons)
        if not copy:
            return fields
        if not self.is_library:
            return {name: value.clone() for name, value in fields.items()}
        return copy_shared(fields, [pixels, *metadata.values()], self.guard.storages)

    def _prepare(self, key: Hashable, step: Step) -> Metadata:
        """Return the metadata of a step on the device, kept under ``key`` until it is written."""
        prepared = self.prepared.get(key)
        if prepared is None or not prepared.is_unwritten():
            encoder, device, grids = self.form.encoder, self.form.device, read_grid(step.grids)
            if step.budget is None:
                metadata = encoder.prepare_encoder_metadata(grids, device=device)
            else:
                # Weights are checked before metadata is kept: had the user cast the encoder to
                # another dtype, metadata would have that dtype and would not suit the graph.
                self.guard.check()
                budget, graph = step.budget, self.graphs.by_budget[step.budget]
                batch = Batch.of(read_specs(encoder, grids))
                exceeded = budget.exceeded_by(batch)
                assert exceeded is None, f"packing put {batch} into {budget}: over its {exceeded}"
                metadata = capacity_metadata(encoder, budget, grids)
                host = graph.format.to_bytes(
                    metadata, step.counts["rows"], pinned=device.type == "cuda"
                )
                metadata = {"metadata_bytes": host.to(device, non_blocking=True)}
            prepared = Prepared.of(metadata)
            self.prepared.put(key, prepared, sum(value.nbytes for value in metadata.values()))
        return prepared.metadata

    def _keep_for_stream(self, *tensors: Tensor) -> None:
        """Keep the memory of tensors from reuse until the current CUDA stream has read them."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(self.form.device))


@dataclass(frozen=True)
class Captured:
    """Everything that calls need after a capture; ``release()`` drops it as a whole."""

    paths: dict[str, Executor]
    """The executor of each input path of the encoder, by the name of the path."""
    memory: Memory
    guard: WeightGuard
    counts: GraphStats
    lends: bool
    """Whether results are views of static buffers, which the caller may still be reading."""

    def waits(self) -> bool:
        """Return whether there are budgets that are captured at their first use."""
        return any(path.graphs.waiting for path in self.paths.values())

    def capture_for(self, inputs: Mapping[str, Inputs]) -> None:
        """Capture the budgets that a call with these inputs needs and that are not captured yet."""
        for name, (pixels, grid) in inputs.items():
            path = self.paths[name]
            path.schedule(grid, pixels.shape[0])  # refuses a wrong grid
            while budgets := path.waiting(grid):  # without a dropped budget, others are needed
                self._capture(path, budgets, progress=False)

    def capture_rest(self, *, progress: bool) -> None:
        """Capture all budgets that are not captured yet, the largest first."""
        for path in self.paths.values():
            if path.graphs.waiting:
                self._capture(path, path.graphs.waiting, progress=progress)

    def _capture(self, path: Executor, budgets: Iterable[Budget], *, progress: bool) -> None:
        start_time = time.perf_counter()
        self.guard.check()
        self.memory.wait_for_last_use(reads=self.lends)
        bar = tqdm(total=0, desc="capture", unit="budget", disable=not progress)
        try:
            with without_collections(), bar:
                path.capture(budgets, bar)
        finally:
            self.finish_capture(start_time)

    def finish_capture(self, start_time: float) -> None:
        """Count what is captured since ``start_time``, and mark the memory as in use."""
        paths = [executor.graphs for executor in self.paths.values()]
        self.counts.budgets = [path.stats[key] for path in paths for key in sorted(path.stats)]
        self.counts.dropped = [name for path in paths for name in path.dropped]
        self.memory.wait_for_captures()
        self.memory.mark_use()
        self.counts.capture_seconds += time.perf_counter() - start_time

    @property
    def measured_here(self) -> bool:
        """Whether the costs of a path were measured at this capture, and not read from a table."""
        return any(path.graphs.measured_here for path in self.paths.values())

    def encode(self, inputs: Mapping[str, Inputs], *, refuses: bool) -> dict[str, PartialOutput]:
        """Return the output of each input path that has items, by the name of the path.

        Args:
            inputs: pixels and grid of each path that has items.
            refuses: raise a ValueError if an item is over every budget, instead of an eager run.
        """
        schedules = {
            k: self.paths[k].schedule(grid, pixels.shape[0]) for k, (pixels, grid) in inputs.items()
        }
        for schedule in schedules.values() if refuses else ():
            refuse_overflow(schedule)
        outputs = {}
        self.memory.wait_for_last_use(reads=self.lends)
        try:
            for name, schedule in schedules.items():
                path = self.paths[name]
                fields = path.execute(schedule, inputs[name][0])
                outputs[name] = as_output(fields, path.form.outputs)
        finally:  # memory is in use also after a call that failed half-way
            self.memory.mark_use()
        return outputs

    def measure(self, stats: GraphStats) -> None:
        """Write into ``stats`` the bytes in use now, and why an accelerator runs the reference."""
        stats.arena_bytes = sum(arena.nbytes for arena in self.memory.arenas)
        stats.pool_bytes = self.memory.pool_bytes
        stats.cache_bytes = sum(path.prepared.size for path in self.paths.values())
        # An accelerator that several paths share counts once.
        by_path = dict.fromkeys(path.form.accelerator for path in self.paths.values())
        accelerators = [accelerator for accelerator in by_path if accelerator is not None]
        stats.derived_bytes = sum(accelerator.nbytes for accelerator in accelerators)
        reasons = dict.fromkeys(
            accelerator.choices().get("reference_because") for accelerator in accelerators
        )
        stats.note = "; ".join(str(reason) for reason in reasons if reason)


def gather(call_rows: Tensor, spans: Sequence[Span], run_rows: Tensor) -> None:
    """Copy the rows of some items of a call from the tensor of all items to a tensor of their own.

    Args:
        call_rows: the rows of all items of the call.
        spans: first row in ``call_rows``, first row in ``run_rows``, and number of rows, per copy.
        run_rows: the rows of the items that run together.
    """
    for source, target, length in spans:
        _rows(run_rows, target, length).copy_(_rows(call_rows, source, length), non_blocking=True)


def scatter(run_rows: Tensor, call_rows: Tensor, spans: Sequence[Span]) -> None:
    """Copy the rows of some items of a call from a tensor of their own to the tensor of all items.

    The arguments mean the same as in :func:`gather`.
    """
    for source, target, length in spans:
        _rows(call_rows, source, length).copy_(_rows(run_rows, target, length), non_blocking=True)


def _rows(tensor: Tensor, start: int, length: int) -> Tensor:
    return tensor if length == tensor.shape[0] else tensor.narrow(0, start, length)
