"""Captures graphs, one per budget, the largest first, and times their replays.

Where a table has the times, a first call captures only the largest budgets and what it needs: the
pool then has room for every other budget, which is captured at its first use.

An encoder may have several input paths, such as one for whole images and one for tiles; each has
static buffers and budgets of its own, and the graphs of all compute in one pool.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import NoReturn

import torch
from torch import nn
from tqdm.auto import tqdm

from encoders.contract import is_library, warn_caller

from .budgets import Budget, BudgetSet, largest_first
from .buffers import Arena, BudgetGraph, Memory, MetadataFormat, without_collections
from .changes import WeightGuard, all_modules, plain_tensors, plain_values
from .costs import Costs, CostTable
from .encoder_forms import EncoderForm, capacity_metadata
from .measuring import checked_budgets, fingerprint, measure, still_hold
from .outputs import Unit
from .packing import Packer
from .replay import Captured, Executor, PathGraphs
from .settings import as_module
from .stats import BudgetStats, GraphStats

MEMORY_DIVISOR = 3
"""If budgets are inferred, static buffers and pool may fill 1/MEMORY_DIVISOR of free memory."""
MEMORY_WORDS = ("out of memory", "Allocator", "alloc_cpu", "ALLOC_FAILED", "NVML")
"""The message of a RuntimeError has at least one of these words if memory ran out."""


def capture_encoder(
    encoder: nn.Module,
    forms: Mapping[str, EncoderForm],
    budget_sets: Mapping[str, BudgetSet],
    tables: Mapping[str, CostTable],
    counts: GraphStats,
    *,
    bounded: bool,
    clone: bool,
    everything: bool,
    progress: bool,
) -> Captured:
    """Capture the budgets of every input path of an encoder into one pool.

    Args:
        encoder: the module as the user gave it.
        forms: the form of the encoder to capture, by input path.
        budget_sets: the budgets to capture, by input path.
        tables: loaded or kept tables of costs by path; empty if times are to be measured.
        counts: statistics to which the captured and the dropped budgets are added.
        bounded: leave out inferred budgets that do not fit memory; paths get equal shares of it.
        clone: calls will return copies; else views of the static buffers.
        everything: capture all budgets, and leave none to its first use.
        progress: show a progress bar.

    Raises:
        ValueError: a table that was measured on another encoder or device.
        RuntimeError: every budget of a path failed, and not for want of memory.
    """
    start_time, several = time.perf_counter(), len(forms) > 1
    form = next(iter(forms.values()))
    pads, roots = form.backend != "eager", {"": encoder}
    if several:
        roots |= {f"path {name}": as_module(path_form.encoder) for name, path_form in forms.items()}
    attributes, values = (
        (plain_tensors(roots), plain_values(all_modules(roots))) if pads else ([], None)
    )
    for name, path_form in forms.items() if tables and pads else ():
        if path_form.has_graphs or path_form.accelerator is not None:
            tables[name].apply(fingerprint(encoder, path_form), path_form.accelerator)
    memory = Memory(form.device, form.has_graphs)
    divisor = MEMORY_DIVISOR * len(forms) if bounded else 0
    bar = tqdm(total=0, desc="capture", unit="budget", disable=not (progress and pads))
    with without_collections(), bar:
        capturers = {
            name: Capturer(
                path_form,
                budget_sets[name],
                memory,
                tables.get(name),
                divisor,
                label=name if several else "",
            )
            for name, path_form in forms.items()
        }
        path_graphs = {
            name: capturer.capture(bar, everything=everything)
            for name, capturer in capturers.items()
        }
    guard = WeightGuard(roots, attributes, values, hooks=form.has_graphs)
    paths = {}
    for name, graphs in path_graphs.items():
        paths[name] = Executor(forms[name], graphs, guard, counts, clone)
    captured = Captured(paths, memory, guard, counts, lends=not clone)
    captured.finish_capture(start_time)
    return captured


@dataclass
class Capturer:
    """Captures the CUDA graphs of one input path ("image", "tiles"), one per size."""

    form: EncoderForm
    budget_set: BudgetSet
    memory: Memory
    table: CostTable | None = None
    memory_divisor: int = 0
    """Inferred budgets may fill 1/memory_divisor of free memory; 0: there is no bound."""
    label: str = ""
    """The name of the input path for messages, empty if there is only one."""

    def __post_init__(self) -> None:
        self._errors: dict[Budget, Exception] = {}
        if self.form.has_graphs and self.table is not None and not self.table.kept:
            self.budget_set = self.table.restrict(self.budget_set)
        if self.form.has_graphs and self.memory_divisor and self.budget_set.inferred:
            self.budget_set = self._fit_memory(self.budget_set, self.memory_divisor)
        # A table kept by a process with less memory lacks the largest budgets.
        if self.table is not None and self.table.kept and not self.table.covers(self.budget_set):
            self.table = None

    def capture(self, bar: tqdm[NoReturn], *, everything: bool) -> PathGraphs:
        """Capture every budget, largest first, and show each on ``bar``.

        A budget that fails is dropped with a warning; if all fail, and not for want of memory, the
        last error is raised. Unless ``everything`` is asked for, only the budgets that a kept table
        is checked with are captured, if a table has the times of all. An encoder of another package
        may keep tensors that its next run replaces, so all its budgets are captured together.
        """
        arena, formats = self._prepare()
        graphs = PathGraphs(arena, self._packer(Costs.unmeasured(())), self, formats)
        self.memory.arenas.append(graphs.arena)
        may_wait = not everything and self.memory.stream and is_library(self.form.encoder)
        first: Iterable[Budget] = formats
        if formats and self.table is not None and may_wait:
            first = checked_budgets(formats) if self.table.kept else largest_first(formats)[:1]
        self.add(graphs, first, bar)
        costs = Costs.unmeasured(graphs.by_budget)
        if self.memory.stream is not None and graphs.by_budget:
            costs = self._cost(graphs, bar)
            graphs.measured_here = self.table is None
            torch.cuda.empty_cache()  # returns the memory of warm-ups and timings
        self._price(graphs, costs)
        return graphs

    def add(self, graphs: PathGraphs, budgets: Iterable[Budget], bar: tqdm[NoReturn]) -> None:
        """Capture some of the waiting budgets into ``graphs``, largest first.

        A budget that fails is dropped with a warning; see :meth:`capture`.
        """
        order = largest_first(budgets)
        bar.total = bar.n + len(order)
        for budget in order:
            self._capture(graphs, budget, graphs.waiting[budget])
            del graphs.waiting[budget]
            pool_mib = self.memory.pool_bytes / 2**20
            bar.set_postfix_str(f"{budget.tokens} tokens, {pool_mib:.0f} MiB")
            bar.update()
        self.memory.wait_for_captures()
        self._report(graphs)
        self._price(graphs, graphs.packer.costs)

    def _price(self, graphs: PathGraphs, costs: Costs) -> None:
        """Let packing compare these costs from now on, without those of dropped budgets."""
        usable = graphs.by_budget.keys() | graphs.waiting.keys()
        times = {budget: cost for budget, cost in costs.replays.items() if budget in usable}
        for budget, stats in graphs.stats.items():
            stats.replay_ms = times.get(budget) if costs.measured else None
        graphs.packer = self._packer(replace(costs, replays=times))

    def _packer(self, costs: Costs) -> Packer:
        """Return a packer that compares ``costs``, and that bounds the tokens of an eager run.

        The bound is twice the largest captured budget, or twice the end of the encoder's
        ``budget_range`` if that is more: beyond it, splitting a run costs next to nothing. If the
        largest budgets could not be captured, only those that were captured count.
        """
        largest = max((budget.tokens for budget in costs.replays), default=0)
        if largest in (0, self.budget_set.budgets[-1].tokens):
            largest = max(largest, index(self.form.encoder.budget_range[1]))
        return Packer(costs, self.budget_set.max_batch_size, 2 * largest)

    def _cost(self, graphs: PathGraphs, bar: tqdm[NoReturn]) -> Costs:
        """Return the costs of the budgets in ``graphs``: from a table if one was loaded or kept.

        Otherwise, or if a kept table no longer holds, all are captured and measured. Without memory
        for an eager run beside the graphs, a warning is given, and the returned costs have every
        item replayed that fits a budget.
        """
        form, by_budget = self.form, graphs.by_budget
        try:
            if self.table is not None:
                times = {b: self.table.costs.replays[b] for b in (*by_budget, *graphs.waiting)}
                costs = replace(self.table.costs, replays=times)
                if not self.table.kept or still_hold(form.encoder, by_budget, costs, form.device):
                    return costs
                self.table = None
                self.add(graphs, graphs.waiting, bar)
            return measure(form.encoder, by_budget, form.device)
        except RuntimeError as error:
            _raise_bugs(error)
        warn_caller(
            "eager runs could not be timed, because too little memory is left beside the graphs: "
            "every item that fits a budget is replayed; give a smaller max_budget or smaller "
            "budgets to have them timed"
        )
        return Costs.unmeasured(by_budget)

    def _prepare(self) -> tuple[Arena, dict[Budget, MetadataFormat]]:
        """Allocate the static buffers, and return them with the metadata format of each budget.

        A budget is the size of a graph. Budgets that do not fit in memory are left out, the largest
        first. The eager backend, which captures no graphs, has no budgets.
        """
        formats = {}
        for budget in self.budget_set.budgets if self.form.backend != "eager" else ():
            try:
                empty = capacity_metadata(self.form.encoder, budget, [])
                formats[budget] = MetadataFormat(empty, budget.rows)
            except (RuntimeError, MemoryError) as error:
                self._drop(budget, error)
        while formats:
            try:
                return self._arena(formats), formats
            except RuntimeError as error:
                self._drop(largest := max(formats), error)
                del formats[largest]
        return self._arena(formats), formats

    def _arena(self, formats: dict[Budget, MetadataFormat]) -> Arena:
        form, rows = self.form, max((budget.rows for budget in formats), default=0)
        spec = form.encoder.item_specs([form.encoder.grid_for(1)])[0]
        counts: dict[Unit, int] = {
            "rows": rows,
            "hidden": rows * spec.hidden_rows // spec.input_size,
            "tokens": max((budget.tokens for budget in formats), default=0),
            "segments": max((budget.segments for budget in formats), default=0),
        }
        metadata_size = max((format.nbytes for format in formats.values()), default=0)
        return Arena(counts, form.encoder.row_shape, form.dtype, form.device, metadata_size)

    def _capture(self, graphs: PathGraphs, budget: Budget, format: MetadataFormat) -> None:
        start_time, memory, accelerator = time.perf_counter(), self.memory, self.form.accelerator
        graph = BudgetGraph(budget, format, self.form.encoder, graphs.arena, self.form.outputs)
        try:
            self._record(graph, graphs)
        except (RuntimeError, MemoryError) as error:
            # On a MIG slice of a GPU, a lack of memory fails an assertion inside torch's allocator,
            # which is a RuntimeError and no OutOfMemoryError.
            self._drop(budget, error)
            if memory.stream is not None and memory.empty:  # no graph is using the pool
                memory.renew()
            return
        graphs.by_budget[budget] = graph
        graphs.stats[budget] = BudgetStats(
            *(budget.tokens, budget.segments, budget.longest_segment, budget.windows),
            path=self.label or "image",
            capture_seconds=time.perf_counter() - start_time,
            graph_bytes=memory.growth(),
            kernel=accelerator.kernels_used if accelerator is not None else "reference",
        )

    def _record(self, graph: BudgetGraph, graphs: PathGraphs) -> None:
        """Capture a graph, after a run of the encoder where that may choose or prepare something.

        The first run pads weights and allocates the static buffers of outputs; an encoder of
        another package may do more in every run. Other budgets are captured without a run before,
        and again after one if that fails, as cuDNN allocates memory in its first run, or if a
        kernel was guessed that is not the fastest.
        """
        if self.memory.stream is None or not graphs.by_budget or not is_library(self.form.encoder):
            return self._run_and_capture(graph)
        accelerator = self.form.accelerator
        try:
            graph.capture(self.memory, warms_up=False)
        except RuntimeError as error:
            if is_memory_error(error):
                raise
        else:
            if accelerator is None or accelerator.settle():
                return None
        return self._run_and_capture(graph)

    def _run_and_capture(self, graph: BudgetGraph) -> None:
        """Capture a graph after a run on padding; a capture alone reads no metadata."""
        empty = capacity_metadata(self.form.encoder, graph.budget, [])
        self.memory.wait_for_captures()  # the last warm-up may still be reading its metadata
        graph.metadata_bytes.copy_(graph.format.to_bytes(empty, rows=0))
        graph.capture(self.memory, warms_up=True)

    def _drop(self, budget: Budget, error: Exception) -> None:
        """Record that capturing ``budget`` failed, and free tensors that the traceback holds."""
        traceback.clear_frames(error.__traceback__)
        self._errors[budget] = error.with_traceback(None) if is_memory_error(error) else error
        if self.form.device.type == "cuda":
            torch.cuda.synchronize(self.form.device)
            torch.cuda.empty_cache()

    def _report(self, graphs: PathGraphs) -> None:
        """Warn of every budget that failed, and list it in ``graphs.dropped``.

        If no budget was captured, and one failed for another reason than memory, the error of that
        one is raised instead.
        """
        bugs = [error for error in self._errors.values() if not is_memory_error(error)]
        if bugs and not graphs.by_budget:
            raise bugs[-1]
        for budget, error in self._errors.items():
            graphs.dropped.append(f"{self.label} {budget.name}".lstrip())
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            warn_caller(
                f"budget {graphs.dropped[-1]} could not be captured and is dropped ({reason}); "
                "smaller ones still serve, larger items run eagerly"
            )
        self._errors.clear()

    def _fit_memory(self, budget_set: BudgetSet, divisor: int) -> BudgetSet:
        """Return ``budget_set`` without the budgets too large for their buffers and pool to fit.

        Buffers and pool may fill 1/``divisor`` of free memory; memory that torch holds without
        using it counts as free. If no budget fits, those with the fewest rows are kept. A warning
        is given if any budget is left out.
        """
        device = self.form.device
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
        limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
        available = max(min(free + reserved - allocated, limit - allocated), 0) // divisor
        row_bytes = self._bytes_per_row(budget_set)
        fitting = tuple(
            budget for budget in budget_set.budgets if budget.rows * row_bytes <= available
        )
        if len(fitting) == len(budget_set.budgets):
            return budget_set
        change = f"largest budget lowered from {budget_set.budgets[-1].tokens} to"
        if not fitting:
            fitting = tuple(b for b in budget_set.budgets if b.rows == budget_set.budgets[0].rows)
            change = "no budget fits, and only the smallest is captured:"
        warn_caller(
            f"{change} {fitting[-1].tokens} tokens, because graphs and their buffers may take "
            f"1/{divisor} of the free memory ({available / 2**20:.0f} MiB); give max_budget to "
            "choose another"
        )
        return replace(budget_set, budgets=fitting)

    def _bytes_per_row(self, budget_set: BudgetSet) -> float:
        """Return the bytes of GPU memory that a run takes per input row (a patch or a tile).

        It is measured as the peak of an eager run and its static buffers. It is infinite if memory
        does not suffice for a run of the smallest graph size in ``budget_set``.
        """
        for budget in (budget_set.budgets[len(budget_set.budgets) // 4], budget_set.budgets[0]):
            try:
                return self._probe(budget)
            except RuntimeError as error:
                _raise_bugs(error)
        return math.inf

    def _probe(self, budget: Budget) -> float:
        device, empty = self.form.device, capacity_metadata(self.form.encoder, budget, [])
        format = MetadataFormat(empty, budget.rows)
        arena = self._arena({budget: format})
        graph = BudgetGraph(budget, format, self.form.encoder, arena, self.form.outputs)
        # Not measured: the first run of an accelerated encoder pads weights and chooses kernels.
        if self.form.accelerator is not None:
            graph.body()
        torch.cuda.reset_peak_memory_stats(device)
        bytes_before = torch.cuda.memory_allocated(device)
        graph.body()
        return (torch.cuda.max_memory_allocated(device) - bytes_before + arena.nbytes) / budget.rows


def _raise_bugs(error: RuntimeError) -> None:
    """Raise ``error`` again, unless memory ran out: then free the tensors its traceback holds."""
    if not is_memory_error(error):
        raise error
    traceback.clear_frames(error.__traceback__)


def is_memory_error(error: Exception) -> bool:
    """Return whether an error says, by its type or its message, that memory ran out."""
    has_memory_type = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return has_memory_type or any(word in str(error) for word in MEMORY_WORDS)
