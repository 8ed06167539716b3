"""An encoder that replays CUDA graphs, one per token budget, and answers as it would eagerly."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from encoders.contract import EncoderOutput, GraphableEncoder, GridLike
from encoders.streams import EncodesItems, Encoding, ItemEncoder

from .budgets import choose_budgets
from .buffers import Arena
from .capture import Capturer, Graphs
from .guards import (
    BACKENDS,
    WeightGuard,
    check_alone,
    check_pixels,
    check_rows,
    find_preprocess,
    find_weights,
    read_outputs,
    require_choice,
    require_contract,
    resolve_backend,
    settled,
)
from .packing import Group, Packer, eager_tokens
from .plans import Cache, Plan, make_plan, quick_key, read_key, refuse_overflow
from .prices import Prices, Table, fingerprint
from .replay import Captured
from .results import as_output
from .runner import FormSettings, Target, captured_forward, choose_form
from .stats import GraphStats

CAPTURES = threading.RLock()
"""One capture at a time in a process: waiting for the device breaks another's."""
PLAN_ITEMS = 200_000
"""Items of all plans kept: a call with a grid seen before costs one look-up."""


class GraphedEncoder(EncodesItems):
    """Wraps any encoder that keeps the contract of :class:`encoders.contract.GraphableEncoder`.

    Args:
        encoder: the module; its weights say device and dtype. Weights updated in place are seen by
            the next replay; after weights were rebound, the next call raises.
        budgets: output tokens of each graph, in any order; None infers them. A budget may be
            captured in two shapes: few long segments, and many short ones.
        max_batch_size: items per replay; by default min(64, smallest budget).
        max_frames_per_batch: attention segments per replay; by default 8 long or 64 short ones.
        min_budget: smallest inferred budget; by default the smallest of ``encoder.budget_range``.
        max_budget: largest inferred budget, taken as it is; by default the largest of
            ``encoder.budget_range``, lowered (with a warning) to fit a third of free memory.
        max_graphs: how many graphs at most.
        outputs: fields of :class:`EncoderOutput` to return, by default ``pooler_output`` [N, out]
            and ``deepstack_features``, a tuple of [N, out], for N tokens; ``last_hidden_state`` is
            [P, D] for P rows. The others are None and cost no memory.
        backend: "cudagraph", "static" (same buffers, padding and packing, no graph, any device),
            "eager" (no padding), or "auto": cudagraph on CUDA, eager elsewhere.
        kernels: attention kernels of the encoder's accelerated form, which replays and eager runs
            take where the encoder has one: "auto" for the fastest of all, a name for one, or
            "reference" for the encoder as it is, bit for bit. An encoder that is accelerated
            already keeps its own: leave "auto".
        precision: of the accelerated form; "bf16" is the encoder's own half or full precision.
        compile: for encoders without an accelerated form: replay what ``torch.compile`` makes of
            the encoder as it is. A tower takes about 30 seconds per budget. Eager runs stay eager.
        on_overflow: an item over every budget runs eagerly ("eager") or raises ("raise").
        clone: results are the caller's own; False returns views that the next call overwrites.

    Attributes:
        encoder: the module.
        budgets: the budgets to capture, ascending.
        max_batch_size: items per replay.
        backend: what "auto" means for this encoder.
        device, dtype: where graphs run, and in what.
        outputs, on_overflow, clone: as given.

    Raises:
        TypeError: no module, or one without the contract's members.
        ValueError: a configuration that cannot work, before anything is allocated.
    """

    def __init__(
        self,
        encoder: nn.Module,
        budgets: Sequence[int] | None = None,
        *,
        max_batch_size: int | None = None,
        max_frames_per_batch: int | None = None,
        min_budget: int | None = None,
        max_budget: int | None = None,
        max_graphs: int = 48,
        outputs: Sequence[str] = ("pooler_output", "deepstack_features"),
        backend: str = "auto",
        kernels: str = "auto",
        precision: str = "bf16",
        compile: bool = False,
        on_overflow: str = "eager",
        clone: bool = True,
    ) -> None:
        require_choice("backend", backend, BACKENDS)
        require_choice("on_overflow", on_overflow, ("eager", "raise"))
        require_choice("clone", clone, (True, False))
        require_choice("compile", compile, (True, False))
        self.outputs = read_outputs(outputs)
        require_contract(encoder)
        self.encoder = encoder
        self._contract = cast(GraphableEncoder, encoder)
        self._wanted = choose_budgets(
            self._contract,
            budgets,
            max_batch_size=max_batch_size,
            max_frames_per_batch=max_frames_per_batch,
            min_budget=min_budget,
            max_budget=max_budget,
            max_graphs=max_graphs,
        )
        self.budgets, self.max_batch_size = self._wanted.budgets, self._wanted.max_batch_size
        self.on_overflow, self.clone = on_overflow, clone
        self._row_shape = tuple(self._contract.row_shape)
        self._bounded = self._wanted.inferred and max_budget is None
        self._backend = backend
        self._settings = FormSettings(kernels, precision, compile)
        self._lock = threading.RLock()
        self._table: Table | None = None
        self._plans: Cache[Plan] = Cache(PLAN_ITEMS)
        self._captured: Captured | None = None
        self._target: Target | None = None
        self._locate()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a GraphedEncoder cannot be copied or pickled, its graphs belong to this process: wrap "
            "a copy of its encoder: GraphedEncoder(copy.deepcopy(graphed.encoder), ...)"
        )

    def _locate(self) -> Target:
        """Return the target where the weights are now, with a form of the encoder made there."""
        device, dtype = place = find_weights(self.encoder)
        target = self._target
        if target is None or (target.device, target.dtype) != place:
            self.backend = resolve_backend(self._backend, device)
            form, accelerator = choose_form(self.encoder, self._settings)
            target = Target(
                form, accelerator, device, dtype, self.outputs, self.backend, self._settings
            )
            self.device, self.dtype, self._target = device, dtype, target
        return target

    def capture(self, progress: bool = True) -> GraphedEncoder:
        """Capture all budgets, largest first, and time them; does nothing if that is done.

        Runs without autocast, gradients and inference mode, whatever is set around it.

        Args:
            progress: show a bar with budgets, seconds and MiB.

        Returns:
            self.

        Raises:
            ValueError: a loaded table that was measured on something else, or metadata that
                depends on more than the capacities.
            RuntimeError: every budget failed, and not for want of memory: the encoder's own error.

        Warns:
            UserWarning: the largest budget was lowered to fit memory, or a budget was dropped.
        """
        check_alone(self._lock, self.device)
        with self._lock:
            self._ready(progress)
        return self

    def _ready(self, progress: bool = False) -> Captured:
        """Return what is captured, and capture it if that has not been done."""
        if self._captured is None:
            target = self._locate()
            try:
                with CAPTURES, settled(target.device):
                    self._captured = self._capture(target, progress)
            except BaseException as error:  # an interrupt too: leave it as it was before
                traceback.clear_frames(error.__traceback__)  # they hold the buffers
                self.release()
                raise
        return self._captured

    def _capture(self, target: Target, progress: bool) -> Captured:
        table = self._table
        pads = target.backend != "eager"
        guard = WeightGuard(self.encoder, attributes=pads, hooks=target.has_graphs)
        if not pads:
            arena = Arena(0, self._row_shape, target.dtype, target.device, 0)
            return self._start(target, Graphs(arena), guard)
        if table is not None and (target.has_graphs or target.accelerator is not None):
            table.check(fingerprint(self.encoder, target))
            table.choose_kernels(target.accelerator)
        forward = captured_forward(target, len(self.budgets))
        capturer = Capturer(target, forward, table, bounded=self._bounded, progress=progress)
        graphs = capturer.run(self._wanted)
        guard.forget_rewritten()
        return self._start(target, graphs, guard)

    def _start(self, target: Target, graphs: Graphs, guard: WeightGuard) -> Captured:
        """Return what calls need to run on captured graphs."""
        prices = graphs.prices or Prices.unmeasured(graphs.runners)
        eager = eager_tokens(graphs.runners, self.budgets, self._contract.budget_range[1])
        packer = Packer(prices, self.max_batch_size, eager)
        return Captured(target, graphs, packer, guard, clone=self.clone)

    def release(self) -> None:
        """Give back graphs, pool, buffers, derived weights and times; the next call captures."""
        with self._lock, CAPTURES:
            on_cuda = self.device.type == "cuda"
            if on_cuda:
                torch.cuda.synchronize(self.device)  # first: replays may be writing there
            self._plans.clear()
            self._captured = self._target = None  # derived weights go with the accelerated form
            if on_cuda:
                torch.cuda.empty_cache()

    def save_table(self, path: str | os.PathLike[str]) -> None:
        """Write measured times and chosen kernels as JSON: another process makes the same choices.

        Raises:
            ValueError: nothing was measured (no capture yet, or a backend without graphs).
        """
        with self._lock:
            captured = self._captured
            graphs = captured.graphs if captured is not None else None
            if captured is None or graphs is None or graphs.prices is None:
                raise ValueError("there are no measured times: capture() with backend='cudagraph'")
            accelerator = captured.target.accelerator
            full_ms = {budget: stats.replay_ms or 0.0 for budget, stats in graphs.stats.items()}
            kernels = None if accelerator is None else dict(accelerator.choices())
            made_on = fingerprint(self.encoder, captured.target)
            Table(os.fspath(path), made_on, graphs.prices, full_ms, kernels).write()

    def load_table(self, path: str | os.PathLike[str] | None) -> None:
        """Use saved times and kernels instead of measuring; call it before capture.

        The file is read here, once. It serves every capture of this object, also after
        ``release()``, until another is loaded. Inferred budgets end where the table does.

        Args:
            path: what ``save_table`` wrote; None forgets a table loaded before.

        Raises:
            ValueError: already captured, or no such table; at capture, before anything is
                captured, a table for other budgets or measured on something else, or with a kernel
                that cannot run here.
        """
        with self._lock:
            if self._captured is not None:
                raise ValueError("already captured: release() first, then load_table, then capture")
            self._table = None if path is None else Table.read(path)

    def __call__(
        self, pixel_values: Tensor, grid_thw: GridLike, *, out: EncoderOutput | None = None
    ) -> EncoderOutput:
        """Encode a batch of items.

        Runs without autocast, whatever is set around it: eager runs give what replays give.

        Args:
            pixel_values: the rows of all items, [P, *row_shape], any floating dtype, on the CPU or
                the encoder's device. A pinned CPU tensor is read asynchronously: do not overwrite
                it before the device has done the work.
            grid_thw: [items, 3], as the encoder takes it; read on the host.
            out: tensors to write the results into instead of new ones, each with a storage of its
                own; None where ``outputs`` has no such field.

        Returns:
            :class:`EncoderOutput`, items in the caller's order; fields not in ``outputs`` are None.

        Raises:
            ValueError: pixels, a grid or an ``out`` that cannot be, gradients wanted, or (with
                ``on_overflow="raise"``) an item over every budget.
            RuntimeError: weights were rebound or (with graphs) a hook was registered after capture,
                or this was called from inside its own encoder, or inside a CUDA graph that is being
                captured.
        """
        check_alone(self._lock, self.device)
        with self._lock:
            self._follow_weights()
            check_pixels(pixel_values, self._row_shape, self.device)
            captured = self._ready()
            captured.guard.check_gradients(pixel_values)
            with settled(self.device):
                plan = self._plan(grid_thw, len(pixel_values))
                check_rows(len(pixel_values), plan.rows)
                fields = captured.run(plan, pixel_values, out)
            return as_output(fields, self.outputs)

    def _follow_weights(self) -> None:
        """Go where the weights are, as long as nothing is captured that reads them elsewhere."""
        captured = self._captured
        if captured is None:
            self._locate()
        elif not captured.pads and not captured.guard.holds():
            self._plans.clear()
            self._captured = self._target = None
            if self._locate().backend == "eager":
                self._ready().counts = captured.counts

    def encoding(self) -> Encoding:
        """This encoder, and how ``encode`` and ``encode_many`` call it."""
        find_preprocess(self.encoder)
        encoder = cast(ItemEncoder, self.encoder)
        inner = self.encoder.encoding() if isinstance(self.encoder, EncodesItems) else None
        stager = inner.stager if inner else None
        return Encoding(encoder, self, self.device, self.outputs, stager, self.clone)

    def _plan(self, grid_thw: GridLike, rows: int | None = None) -> Plan:
        """Return the plan of a grid, kept since it was first seen.

        Args:
            grid_thw: of the call.
            rows: input rows of the call, if they are known.
        """
        captured = self._ready()
        plan = self._plans.get(quick_key(grid_thw))
        if plan is None:
            key = read_key(grid_thw)
            plan = self._plans.get(key)
        if plan is None:
            specs = self._contract.item_specs(list(key))
            if rows is not None:  # before packing, whose arrays hold no numbers of absurd sizes
                check_rows(rows, sum([spec.input_size for spec in specs]))
            if specs and captured.pads:
                groups = captured.packer.pack(specs)
            else:  # everything at once, also where there is nothing
                groups = [
                    Group(tuple(range(len(specs))), None, 0.0, ("eager backend",) * len(specs))
                ]
            plan = make_plan(key, specs, groups)
            self._plans.put(key, plan, max(len(key), 1))
        if self.on_overflow == "raise":
            refuse_overflow(plan, bool(captured.graphs.runners))
        return plan

    def stats(self) -> GraphStats:
        """Return a copy of the counters; it prints as a table, ``.to_dict()`` is plain data."""
        with self._lock:
            return self._captured.stats() if self._captured else GraphStats(self.backend)

    def reset_stats(self) -> None:
        """Set the counters to zero; what capture measured stays."""
        with self._lock:
            if self._captured is not None:
                self._captured.reset_stats()

    def _poison(self) -> None:
        """Fill every stale buffer and pool page with NaN (for tests): no result may change."""
        if self._captured is not None:
            self._captured.poison()
