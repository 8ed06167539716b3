"""An encoder that replays CUDA graphs, one a token budget, and answers as it would eagerly."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from encoders.contract import EncoderOutput, GraphableEncoder, GridLike

from .budgets import plan_ladder
from .buffers import as_output
from .capture import Forward
from .costs import Costs, CostTable, RowCosts
from .guards import WeightGuard, check_pixels
from .executor import Executor
from .packing import Packer
from .plans import Cache, Key, Plan, make_plan
from .session import Capturer, Session
from .stats import GraphStats

FIELDS = ("last_hidden_state", "pooler_output", "deepstack_features")
BACKENDS = ("auto", "cudagraph", "static", "eager")
PLAN_ITEMS = 200_000
"""Items of all plans kept: a call with a grid seen before costs one look-up."""


class GraphedEncoder:
    """Wraps any encoder that keeps the contract of :class:`encoders.contract.GraphableEncoder`.

    Args:
        encoder: the module; its parameters say device and dtype. Updated in place, the next replay
            sees it; rebound after capture, the next call raises.
        budgets: output tokens of each graph, any order; None infers a ladder.
        max_batch_size: items a replay; by default min(64, smallest budget).
        max_frames_per_batch: attention segments a replay; by default 8 long or 64 short ones.
        min_budget: smallest inferred budget.
        max_budget: largest inferred budget; lowered (with a warning) to fit a third of free memory.
        max_graphs: how many graphs at most.
        outputs: fields of :class:`EncoderOutput` to return; the others are None.
        backend: "cudagraph", "static" (same buffers, padding and packing, no graph, any device),
            "eager" (no padding), or "auto": cudagraph on CUDA, eager elsewhere.
        compile: capture what ``torch.compile`` makes of the encoder, compiled once a budget.
        on_overflow: an item over every budget runs eagerly ("eager") or raises ("raise").
        clone: results are the caller's own; False returns views that the next call overwrites.

    Raises:
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
        compile: bool = False,
        on_overflow: str = "eager",
        clone: bool = True,
    ) -> None:
        _require_choice("backend", backend, BACKENDS)
        _require_choice("on_overflow", on_overflow, ("eager", "raise"))
        for name in outputs:
            _require_choice("outputs entry", name, FIELDS)
        if not outputs:
            raise ValueError(f"outputs is empty: name at least one of {', '.join(FIELDS)}")
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
        self._asked_backend = backend
        self._locate()
        self.outputs = tuple(outputs)
        self.on_overflow, self.clone = on_overflow, clone
        self._compile = compile
        self._lock = threading.RLock()
        self._table: str | os.PathLike[str] | None = None
        self._plans: Cache[Plan] = Cache(PLAN_ITEMS)
        self._clear()

    def _locate(self) -> None:
        """Where the weights are, and in which dtype: read again until they are captured."""
        weight = next(self.encoder.parameters(), None)
        if weight is None:
            raise ValueError(
                f"{type(self.encoder).__name__} has no parameters: they say on which device and in "
                "which dtype its graphs run"
            )
        self.device, self.dtype = weight.device, weight.dtype
        self.backend = _resolve_backend(self._asked_backend, self.device)

    def _clear(self) -> None:
        self._session: Session | None = None
        self._packer: Packer | None = None
        self._guard: WeightGuard | None = None
        self._executor: Executor | None = None

    def capture(self, progress: bool = True) -> GraphedEncoder:
        """Capture the whole ladder, largest first, and measure it; does nothing if that is done.

        Args:
            progress: show a bar with budgets, seconds and MiB.

        Returns:
            self.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._packer is not None:
                return self
            self._locate()
            try:
                self._capture(progress)
            except BaseException:  # an interrupt too: leave it as it was before
                self.release()
                raise
        return self

    def _capture(self, progress: bool) -> None:
        self._guard = WeightGuard(self.encoder)
        if self.backend == "eager":
            self._start(Packer((), RowCosts(), self.ladder.max_batch_size), None)
            return
        capturer = Capturer(
            self._contract, self._captured_forward(), self.device, self.dtype, self.outputs,
            graphs=self.backend == "cudagraph", progress=progress,
        )  # fmt: skip
        session = capturer.run(self.ladder, measure=self._table is None)
        costs: Costs = session.costs or RowCosts()
        if self._table is not None and self.backend == "cudagraph":
            session.costs = costs = CostTable.load(
                self._table, self._fingerprint(), list(session.runners)
            )
        self._start(Packer(list(session.runners), costs, self.ladder.max_batch_size), session)

    def _captured_forward(self) -> Forward:
        """What graphs are captured from: the encoder, compiled once a budget if asked."""
        if not self._compile:
            return self._contract
        many = 2 * len(self.ladder.budgets)  # torch gives up compiling one function after eight
        limits = torch._dynamo.config.patch(recompile_limit=many, accumulated_recompile_limit=many)
        compiled = torch.compile(self.encoder, dynamic=False)
        return cast(Forward, limits(compiled))

    def _start(self, packer: Packer, session: Session | None) -> None:
        self._session, self._packer = session, packer
        self._executor = Executor(
            self._contract, self.device, self.outputs, self.clone, session,
            self._fresh_stats(), self._guard if session is not None else None,
        )  # fmt: skip

    def release(self) -> None:
        """Give back graphs, pool, buffers and measured times; the next call captures again."""
        with self._lock:
            self._plans.clear()
            self._clear()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()

    def save_table(self, path: str | os.PathLike[str]) -> None:
        """Write the measured times as JSON, so that another process makes the same choices.

        Raises:
            ValueError: nothing was measured (no capture yet, or a backend without graphs).
        """
        with self._lock:
            costs = self._session.costs if self._session is not None else None
            if costs is None:
                raise ValueError("there are no measured times: capture() with backend='cudagraph'")
            costs.save(path, self._fingerprint())

    def load_table(self, path: str | os.PathLike[str]) -> None:
        """Use saved times instead of measuring; call it before capture.

        Raises:
            ValueError: already captured; at capture, a table for other budgets or another device.
        """
        with self._lock:
            if self._packer is not None:
                raise ValueError("already captured: release() first, then load_table, then capture")
            self._table = path

    def _fingerprint(self) -> dict[str, str]:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        rows = "x".join(map(str, self._contract.row_shape))
        kind = type(self.encoder).__name__
        return {"encoder": kind, "rows": rows, "dtype": str(self.dtype), "device": name}

    def __call__(
        self, pixel_values: Tensor, grid_thw: GridLike, *, out: EncoderOutput | None = None
    ) -> EncoderOutput:
        """Encode a batch of items.

        Args:
            pixel_values: the rows of all items, any floating dtype, on the CPU or the encoder's
                device. A pinned CPU tensor is read asynchronously.
            grid_thw: [items, 3], as the encoder takes it; read on the host.
            out: tensors to write the results into, instead of new ones.

        Returns:
            :class:`EncoderOutput`, items in the caller's order; fields not in ``outputs`` are None.

        Raises:
            ValueError: pixels or a grid that the encoder would refuse, gradients wanted, or (with
                ``on_overflow="raise"``) an item over every budget.
            RuntimeError: weights were rebound after capture.
        """
        with self._lock:
            if self._packer is None:
                self._locate()
            check_pixels(pixel_values, self._contract.row_shape, self.device)
            self._ready().check_gradients(pixel_values)
            return self._call(pixel_values, grid_thw, out)

    def _ready(self) -> WeightGuard:
        if self._guard is None or self._executor is None:
            self.capture(progress=False)
        assert self._guard is not None
        return self._guard

    def _call(
        self, pixel_values: Tensor, grid_thw: GridLike, out: EncoderOutput | None
    ) -> EncoderOutput:
        with torch.inference_mode(False), torch.no_grad():
            assert self._executor is not None
            plan = self._plan(grid_thw)
            if pixel_values.shape[0] != plan.rows:
                raise ValueError(
                    f"pixel_values has {pixel_values.shape[0]} rows but the grid makes "
                    f"{plan.rows}: pass the grid_thw that belongs to these pixels"
                )
            fields = self._executor.run(plan, pixel_values, out)
        return as_output(fields, self.outputs)

    def encode(
        self,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> list[EncoderOutput]:
        """Encode images and videos: one :class:`EncoderOutput` an item, images first.

        Takes the keywords of ``encoder.preprocess``.
        """
        preprocess = cast(Any, self.encoder).preprocess
        inputs = preprocess(
            images, videos, min_pixels=min_pixels, max_pixels=max_pixels, max_tiles=max_tiles,
            fps=fps, num_frames=num_frames,
        )  # fmt: skip
        output = self(inputs.pixel_values, inputs.grid_thw)
        return self._contract.split(output, inputs.grid_thw)

    def _plan(self, grid_thw: GridLike) -> Plan:
        key = _read_key(grid_thw)
        plan = self._plans.get(key)
        if plan is None:
            assert self._packer is not None
            specs = self._contract.item_specs(list(key))
            groups = self._packer.pack(specs) if self.backend != "eager" else []
            if self.backend == "eager" or not specs:
                groups = self._packer.whole(specs)
            plan = make_plan(key, specs, groups)
            self._plans.put(key, plan, max(len(key), 1))
        if self.on_overflow == "raise":
            self._refuse_overflow(plan)
        return plan

    def _refuse_overflow(self, plan: Plan) -> None:
        for step in plan.steps:
            if step.reason is not None and step.reason.startswith("over "):
                raise ValueError(
                    f"item with grid {step.grids[0]} is over every budget ({step.reason[5:]}): "
                    'raise max_budget or max_frames_per_batch, or use on_overflow="eager"'
                )

    def stats(self) -> GraphStats:
        """A copy of the counters; prints as a table, ``.to_dict()`` is plain data."""
        with self._lock:
            if self._executor is None:
                return GraphStats(self.backend)
            stats = deepcopy(self._executor.counts)
            stats.cache_bytes = self._executor.cache_bytes
            return stats

    def reset_stats(self) -> None:
        """Set the counters to zero; what capture measured stays."""
        with self._lock:
            if self._executor is not None:
                self._executor.counts = self._fresh_stats()

    def _fresh_stats(self) -> GraphStats:
        session = self._session
        if session is None:
            return GraphStats(self.backend)
        return GraphStats(
            self.backend,
            [type(budget)(**{**vars(budget), **_ZERO}) for budget in session.stats],
            arena_bytes=session.arena.nbytes,
            pool_bytes=session.pool_bytes,
            capture_seconds=session.seconds,
            dropped=list(session.dropped),
            eager_reasons=Counter(),
        )

    def _poison(self) -> None:
        """Fill every stale buffer and pool page with NaN (for tests): no result may change."""
        if self._executor is not None:
            self._executor.poison()


_ZERO = {"hits": 0, "items": 0, "real_tokens": 0, "padded_tokens": 0}


def _read_key(grid_thw: GridLike) -> Key:
    """The grid as it is looked up; one flat ``(t, h, w)`` is one item, as it is for the encoder."""
    raw = cast(Any, grid_thw.tolist() if isinstance(grid_thw, Tensor) else grid_thw)
    rows = [raw] if len(raw) == 3 and isinstance(raw[0], int) else raw
    return cast(Key, tuple([tuple(map(int, row)) for row in rows]))


def _resolve_backend(backend: str, device: torch.device) -> str:
    if backend == "cudagraph" and device.type != "cuda":
        raise ValueError(
            f'backend="cudagraph" needs the encoder on CUDA, it is on {device}: move it, or use '
            '"static" or "eager"'
        )
    if backend == "auto":
        return "cudagraph" if device.type == "cuda" else "eager"
    return backend


def _require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices)}")
