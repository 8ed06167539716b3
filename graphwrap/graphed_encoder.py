"""An encoder that replays CUDA graphs, one a token budget, and answers as it would eagerly."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from encoders.contract import Accelerator, EncoderOutput, GraphableEncoder, GridLike
from encoders.streams import EncodesItems, Encoding, ItemEncoder

from .budgets import plan_ladder
from .buffers import as_output
from .costs import Costs, RowCosts
from .executor import Executor
from .forward import Asked, captured_forward, fast_form
from .guards import (
    BACKENDS,
    WeightGuard,
    check_alone,
    check_pixels,
    check_rows,
    find_preprocess,
    find_weights,
    require_contract,
    read_outputs,
    require_choice,
    resolve_backend,
    settled,
)
from .packing import Packer, eager_bound
from .plans import Cache, Plan, make_plan, quick_key, read_key, refuse_overflow
from .session import Capturer, Session
from .stats import GraphStats
from .tables import SavedTable, fingerprint

CAPTURES = threading.RLock()
"""One capture at a time in a process: waiting for the device breaks another's."""
PLAN_ITEMS = 200_000
"""Items of all plans kept: a call with a grid seen before costs one look-up."""


class GraphedEncoder(EncodesItems):
    """Wraps any encoder that keeps the contract of :class:`encoders.contract.GraphableEncoder`.

    Args:
        encoder: the module; its weights say device and dtype. Updated in place, the next replay
            sees it; rebound after capture, the next call raises.
        budgets: output tokens of each graph, any order; None infers a ladder. A budget may be
            captured in two shapes: few long segments, and many short ones.
        max_batch_size: items a replay; by default min(64, smallest budget).
        max_frames_per_batch: attention segments a replay; by default 8 long or 64 short ones.
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
            "reference" for the encoder as it is, bit for bit. One that is accelerated already
            keeps its own: leave "auto".
        precision: of the accelerated form; "bf16" is the encoder's own half or full precision.
        compile: for encoders without an accelerated form: replay what ``torch.compile`` makes of
            the encoder as it is. A tower takes about 30 seconds per budget. Eager runs stay eager.
        on_overflow: an item over every budget runs eagerly ("eager") or raises ("raise").
        clone: results are the caller's own; False returns views that the next call overwrites.

    Attributes:
        encoder: the module.
        ladder: the budgets to capture, and how many items a replay takes.
        backend: what "auto" came to.
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
        self.ladder = plan_ladder(
            self._contract,
            budgets,
            max_batch_size=max_batch_size,
            max_frames_per_batch=max_frames_per_batch,
            min_budget=min_budget,
            max_budget=max_budget,
            max_graphs=max_graphs,
        )
        self._row_shape = tuple(self._contract.row_shape)
        self._bounded = self.ladder.inferred and max_budget is None
        self._asked_backend = backend
        self._asked = Asked(kernels, precision, compile)
        self.on_overflow, self.clone = on_overflow, clone
        self._lock = threading.RLock()
        self._table: SavedTable | None = None
        self._plans: Cache[Plan] = Cache(PLAN_ITEMS)
        self._clear()
        self._locate()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a GraphedEncoder cannot be copied or pickled, its graphs belong to this process: wrap "
            "a copy of its encoder: GraphedEncoder(copy.deepcopy(graphed.encoder), ...)"
        )

    def _clear(self) -> None:
        self._plans.clear()
        self._session: Session | None = None
        self._packer: Packer | None = None
        self._guard: WeightGuard | None = None
        self._executor: Executor | None = None
        self._place: tuple[torch.device, torch.dtype] | None = None
        self._form = self._contract  # derived weights go with the accelerated form
        self._accelerator: Accelerator | None = None

    def _locate(self) -> None:
        """Where the weights are, and in which dtype: read again until they are captured."""
        place = find_weights(self.encoder)
        self.backend = resolve_backend(self._asked_backend, place[0])
        if place != self._place:
            self._form, self._accelerator = fast_form(self.encoder, self._asked)
        self.device, self.dtype = self._place = place

    def capture(self, progress: bool = True) -> GraphedEncoder:
        """Capture the whole ladder, largest first, and measure it; does nothing if that is done.

        Runs without autocast, gradients and inference mode, whatever is set around it.

        Args:
            progress: show a bar with budgets, seconds and MiB.

        Returns:
            self.

        Raises:
            ValueError: a table loaded that was measured on something else, or metadata that
                depends on more than the capacities.
            RuntimeError: every budget failed, and not for want of memory: the encoder's own error.

        Warns:
            UserWarning: the largest budget was lowered to fit memory, or a budget was dropped.
        """
        check_alone(self._lock, self.device)
        with self._lock:
            self._capture_once(progress)
        return self

    def _capture_once(self, progress: bool) -> None:
        if self._packer is not None:
            return
        self._locate()
        try:
            with CAPTURES, settled(self.device):
                self._capture(progress)
        except BaseException as error:  # an interrupt too: leave it as it was before
            traceback.clear_frames(error.__traceback__)  # they hold the buffers
            self.release()
            raise

    def _capture(self, progress: bool) -> None:
        self._guard = WeightGuard(self.encoder, attributes=self.backend != "eager")
        if self.backend == "eager":
            self._start(Packer((), RowCosts(), self.ladder.max_batch_size), None)
            return
        graphs = self.backend == "cudagraph"
        if self._table is not None and (graphs or self._accelerator is not None):
            self._table.check(self._fingerprint())
        if self._table is not None and self._accelerator is not None:
            self._table.choose(self._accelerator)
        compiled = self._asked.compiled
        capturer = Capturer(
            self._form, captured_forward(self._form, compiled, len(self.ladder.budgets)),
            self.device, self.dtype, self.outputs, graphs, progress,
            self._table if graphs else None, self._bounded, self._accelerator, compiled,
        )  # fmt: skip
        session = capturer.run(self.ladder)
        self._guard.forget_rewritten()
        costs: Costs = session.costs or RowCosts()
        budgets = list(session.runners)
        bound = eager_bound(budgets, self.ladder, self._contract.budget_range[1])
        self._start(Packer(budgets, costs, self.ladder.max_batch_size, bound), session)

    def _start(self, packer: Packer, session: Session | None) -> None:
        self._session, self._packer = session, packer
        self._executor = Executor(
            self._form, self.device, self.dtype, self.outputs, self.clone, session,
            self._fresh_stats(), self._guard if session is not None else None,
            self._guard.storages if self._guard is not None else frozenset(), self._accelerator,
        )  # fmt: skip
        self._executor.mark_stream()

    def release(self) -> None:
        """Give back graphs, pool, buffers, derived weights and times; the next call captures."""
        with self._lock, CAPTURES:
            on_cuda = self.device.type == "cuda"
            if on_cuda:
                torch.cuda.synchronize(self.device)  # first: replays may be writing there
            self._clear()
            if on_cuda:
                torch.cuda.empty_cache()

    def save_table(self, path: str | os.PathLike[str]) -> None:
        """Write measured times and chosen kernels as JSON: another process makes the same choices.

        Raises:
            ValueError: nothing was measured (no capture yet, or a backend without graphs).
        """
        with self._lock:
            session = self._session
            if session is None or session.costs is None:
                raise ValueError("there are no measured times: capture() with backend='cudagraph'")
            chosen = None if self._accelerator is None else self._accelerator.choices()
            session.saved_table(os.fspath(path), self._fingerprint(), chosen).write()

    def load_table(self, path: str | os.PathLike[str] | None) -> None:
        """Use saved times and kernels instead of measuring; call it before capture.

        The file is read here, once; what it says serves every capture of this object, also after
        ``release()``, until another is loaded. An inferred ladder ends where the table does.

        Args:
            path: what ``save_table`` wrote; None forgets a table loaded before.

        Raises:
            ValueError: already captured, or no such table; at capture, before anything is
                captured, a table for other budgets or measured on something else, or with a kernel
                that cannot run here.
        """
        with self._lock:
            if self._packer is not None:
                raise ValueError("already captured: release() first, then load_table, then capture")
            self._table = None if path is None else SavedTable.read(path)

    def _fingerprint(self) -> dict[str, str]:
        return fingerprint(self.encoder, self.device, self.dtype, self.outputs, self._asked)

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
            out: tensors to write the results into, instead of new ones; None where ``outputs`` has
                no such field.

        Returns:
            :class:`EncoderOutput`, items in the caller's order; fields not in ``outputs`` are None.

        Raises:
            TypeError: pixels that are no tensor, or an ``out`` that is no :class:`EncoderOutput`.
            ValueError: pixels, a grid or an ``out`` that cannot be, gradients wanted, or (with
                ``on_overflow="raise"``) an item over every budget.
            RuntimeError: weights were rebound after capture, or this was called from inside its own
                encoder, or inside a CUDA graph that is being captured.
        """
        check_alone(self._lock, self.device)
        with self._lock:
            self._follow()
            check_pixels(pixel_values, self._row_shape, self.device)
            self._ready().check_gradients(pixel_values)
            return self._call(pixel_values, grid_thw, out)

    def _follow(self) -> None:
        """Go where the weights are, as long as nothing is captured that reads them elsewhere."""
        if self._packer is None:
            self._locate()
        elif self.backend == "eager" and self._guard is not None and not self._guard.holds():
            counts = self.stats()
            self._clear()
            self._locate()
            if self.backend == "eager":
                self._ready()
                assert self._executor is not None
                self._executor.counts = counts

    def _ready(self) -> WeightGuard:
        if self._guard is None or self._executor is None:
            self._capture_once(progress=False)
        assert self._guard is not None
        return self._guard

    def _call(
        self, pixel_values: Tensor, grid_thw: GridLike, out: EncoderOutput | None
    ) -> EncoderOutput:
        with settled(self.device):
            assert self._executor is not None
            plan = self._plan(grid_thw, len(pixel_values))
            check_rows(len(pixel_values), plan.rows)
            fields = self._executor.run(plan, pixel_values, out)
        return as_output(fields, self.outputs)

    def encoding(self) -> Encoding:
        """This encoder, and how ``encode`` and ``encode_many`` call it."""
        find_preprocess(self.encoder)
        encoder = cast(ItemEncoder, self.encoder)
        inner = self.encoder.encoding() if isinstance(self.encoder, EncodesItems) else None
        stager = inner.stager if inner else None
        return Encoding(encoder, self, self.device, self.outputs, stager, self.clone)

    def _plan(self, grid_thw: GridLike, rows: int | None = None) -> Plan:
        plan = self._plans.get(quick_key(grid_thw))
        if plan is None:
            key = read_key(grid_thw)
            plan = self._plans.get(key)
        if plan is None:
            assert self._packer is not None
            specs = self._contract.item_specs(list(key))
            if rows is not None:  # before packing: sizes that nothing has are no numbers to add
                check_rows(rows, sum([spec.input_size for spec in specs]))
            pack = self._packer.pack if specs and self.backend != "eager" else self._packer.whole
            plan = make_plan(key, specs, pack(specs))
            self._plans.put(key, plan, max(len(key), 1))
        if self.on_overflow == "raise":
            refuse_overflow(plan, bool(self._packer and self._packer.budgets))
        return plan

    def stats(self) -> GraphStats:
        """A copy of the counters; prints as a table, ``.to_dict()`` is plain data."""
        with self._lock:
            return self._executor.stats() if self._executor else GraphStats(self.backend)

    def reset_stats(self) -> None:
        """Set the counters to zero; what capture measured stays."""
        with self._lock:
            if self._executor is not None:
                self._executor.counts = self._fresh_stats()

    def _fresh_stats(self) -> GraphStats:
        session = self._session
        return session.fresh_stats(self.backend) if session else GraphStats(self.backend)

    def _poison(self) -> None:
        """Fill every stale buffer and pool page with NaN (for tests): no result may change."""
        if self._executor is not None:
            self._executor.poison()
