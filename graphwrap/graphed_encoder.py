"""A wrapper that runs an encoder by replaying CUDA graphs of several sizes."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NoReturn, Protocol, cast, get_args, overload

import torch
from torch import Tensor, nn

from encoders.contract import (
    EncoderConfig,
    FeatureMaps,
    GridLike,
    PartialOutput,
    Precision,
    Preprocess,
    VisionInputs,
)
from encoders.streams import EncodesItems, ItemEncoder

from . import calling, encoder_forms, settings
from .budgets import budgets_by_path, choose_budgets
from .capture import capture_encoder
from .costs import CostTable, read_tables, write_tables
from .kept_tables import AUTO, keep, kept_file, read_kept
from .measuring import fingerprint
from .replay import Captured, Inputs
from .stats import GraphStats

CAPTURE_LOCK = threading.RLock()
"""Held while graphs are captured or freed: a synchronising thread would break another's capture.
All encoders of the process share the lock, because they share the device's context and memory."""


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    E = TypeVar("E", bound=nn.Module, covariant=True, default=nn.Module)
else:
    from typing import TypeVar

    E = TypeVar("E")


class Described(Protocol):
    """The members that a graphed encoder passes on, where its encoder has them."""

    config: EncoderConfig
    num_features: int
    out_features: int
    preprocess: Preprocess
    feature_maps: FeatureMaps


class GraphedEncoder(EncodesItems[PartialOutput], Generic[E]):
    """Runs an encoder, any with the members of :class:`GraphableEncoder`, by replaying CUDA graphs.

    Args:
        encoder: the module; its weights determine device and dtype. Weights updated in place are
            seen by the next replay; after weights were rebound, or an adapter switched or merged,
            the next call raises.
        budgets: output tokens of each graph, in any order; None infers them. A budget may be
            captured in two shapes: few long attention segments, and many short ones. For an encoder
            of several input paths, a mapping from each path's name ("image", "tiles") to its
            budgets (or None); all other numbers apply to each path.
        max_batch_size: most items per replay; by default min(64, smallest budget).
        max_frames_per_batch: attention segments per replay; by default 8 long or 64 short ones.
        min_budget: smallest inferred budget; by default the smallest of ``encoder.budget_range``.
        max_budget: largest inferred budget, never lowered; by default the largest of
            ``encoder.budget_range``, lowered (with a warning) to fit a third of free memory.
        max_graphs: how many graphs at most.
        outputs: fields of :class:`EncoderOutput` to return, by default ``pooler_output`` [N, out]
            and ``deepstack_features``, a tuple of [N, out], for N tokens; ``last_hidden_state`` is
            [P, D] for P rows. The others are None and cost no memory. ``"blocks.6"`` puts the
            hidden state after a block into ``extras``, as ``encoder.with_extras`` names it.
        backend: "cudagraph", "static" (same buffers, padding and packing, no graph, any device),
            "eager" (no padding), or "auto": cudagraph on CUDA, eager elsewhere.
        kernels: attention kernels of the encoder's accelerated form, which runs in replays and in
            eager runs if the encoder has one: "auto" for the fastest of all, a name for one, or
            "reference" for the encoder as it is, bit for bit. An encoder that is accelerated
            already keeps its own kernels: leave "auto".
        precision: "bf16" keeps the encoder's dtype, whichever it is; "fp8" computes products of an
            accelerated form in e4m3 where that is faster (a bfloat16 encoder on an H100 or newer).
        table: where measured times and kernel choices are kept for later processes: "auto" for the
            folder ``vitgraph/tables`` in ``HF_HOME`` (``VITGRAPH_TABLES`` names another one, or is
            "off"), a file, or None for nowhere. A file that exists has to fit, as in
            :meth:`load_table`.
        on_overflow: an item over every budget runs eagerly ("eager") or raises ("raise").
        clone: results are the caller's own; False returns views that the next call overwrites.

    Attributes:
        encoder: the module.
        budgets: the budgets to capture, ascending within each input path.
        max_batch_size: most items per replay; for several paths, the smallest of their numbers.
        backend: the backend in use; never "auto".
        device, dtype: device and dtype of the weights at the last call or capture.
        outputs, kernels, precision, table, on_overflow, clone: the arguments of these names.

    Raises:
        TypeError: not a module, or one without the members of :class:`GraphableEncoder`.
        ValueError: arguments that cannot work; raised before anything is allocated.
    """

    def __init__(
        self,
        encoder: E,
        budgets: Sequence[int] | Mapping[str, Sequence[int] | None] | None = None,
        *,
        max_batch_size: int | None = None,
        max_frames_per_batch: int | None = None,
        min_budget: int | None = None,
        max_budget: int | None = None,
        max_graphs: int = 48,
        outputs: Sequence[str] = ("pooler_output", "deepstack_features"),
        backend: settings.Backend = "auto",
        kernels: encoder_forms.FormKernels = "auto",
        precision: Precision = "bf16",
        table: str | os.PathLike[str] | None = AUTO,
        on_overflow: settings.OnOverflow = "eager",
        clone: bool = True,
    ) -> None:
        settings.require_choice("backend", backend, settings.BACKENDS)
        settings.require_choice("on_overflow", on_overflow, settings.OVERFLOWS)
        settings.require_choice("clone", clone, (True, False))
        settings.require_table(table)
        settings.require_choice("kernels", kernels, get_args(encoder_forms.FormKernels))
        self.outputs = settings.read_outputs(outputs)
        giving = encoder_forms.with_extras(encoder, self.outputs)
        self._path_encoder = encoder_forms.with_paths(giving)
        paths = self._path_encoder.paths
        self._paths_joined = encoder_forms.joins_paths(paths, giving)
        self.encoder: E = encoder
        choose = partial(
            choose_budgets,
            max_batch_size=max_batch_size,
            max_frames_per_batch=max_frames_per_batch,
            min_budget=min_budget,
            max_budget=max_budget,
            max_graphs=max_graphs,
        )
        path_budgets = budgets_by_path(budgets, paths)
        self._budget_sets = {name: choose(path, path_budgets[name]) for name, path in paths.items()}
        budget_sets = self._budget_sets.values()
        self.budgets = tuple(budget for sizes in budget_sets for budget in sizes.budgets)
        self.max_batch_size = min(sizes.max_batch_size for sizes in budget_sets)
        self.on_overflow, self.clone = on_overflow, clone
        self._bounded = max_budget is None
        self._backend = backend
        self.kernels, self.precision = kernels, precision
        self._settings = encoder_forms.FormSettings(kernels, precision)
        self._lock = calling.CallLock()
        self.table = table
        self._tables: dict[str, CostTable] = {}
        self._measures_anew = False
        self._forms: dict[str, encoder_forms.EncoderForm] = {}
        self._captured: Captured | None = None
        self._locate()
        self._counts = GraphStats(self.backend)

    backend: settings.BackendInUse
    device: torch.device
    dtype: torch.dtype

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a GraphedEncoder cannot be copied or pickled, because its graphs belong to this "
            "process: wrap a copy of its encoder, GraphedEncoder(copy.deepcopy(graphed.encoder))"
        )

    @property
    def config(self) -> EncoderConfig:
        """The config of the wrapped encoder."""
        return self._described.config

    @property
    def num_features(self) -> int:
        """The number of columns of ``last_hidden_state``."""
        return self._described.num_features

    @property
    def out_features(self) -> int:
        """The number of columns of ``pooler_output``."""
        return self._described.out_features

    @property
    def preprocess(self) -> Preprocess:
        """The method ``preprocess`` of the wrapped encoder.

        Raises:
            TypeError: the encoder has no such method.
        """
        try:
            return self._described.preprocess
        except AttributeError as error:
            raise TypeError(
                f"{error}, which encode() calls: prepare the pixels yourself and call "
                "graphed(pixel_values, grid)"
            ) from error

    @property
    def feature_maps(self) -> FeatureMaps:
        """The encoder's ``feature_maps``; the output field it reads must be among ``outputs``."""
        return self._described.feature_maps

    @property
    def _described(self) -> Described:
        return cast(Described, self.encoder)

    def _locate(self) -> None:
        """Find the device and dtype of the weights, and make the forms of the encoder for them."""
        device, dtype = settings.find_weights(self.encoder)
        if not self._forms or (self.device, self.dtype) != (device, dtype):
            self._forms = {}
            self.device, self.dtype = device, dtype
            self.backend = settings.resolve_backend(self._backend, self.device)
            for name, path in self._path_encoder.paths.items():
                form, accelerator = encoder_forms.choose_form(path, self._settings)
                self._forms[name] = encoder_forms.EncoderForm(
                    form, accelerator, device, dtype, self.outputs, self.backend, self._settings
                )

    def capture(self, progress: bool = True) -> GraphedEncoder[E]:
        """Capture all budgets, largest first, and time them; does nothing if already captured.

        Without it the first call does so. If a table has the times of all budgets, that call
        captures the largest budget, for which memory is reserved, and what it needs; the others are
        captured at their first use, in the thread of the caller.

        Runs without autocast, gradients and inference mode, whatever is set around it.

        Args:
            progress: show a bar with budgets, seconds and MiB.

        Returns:
            self.

        Raises:
            ValueError: a loaded table that was measured on another encoder or device, or metadata
                whose shapes depend on more than the capacities.
            RuntimeError: every budget failed, for another reason than memory: the encoder's own
                error.

        Warns:
            UserWarning: the largest budget was lowered to fit memory, or a budget was dropped.
        """
        calling.check_alone(self._lock, self.device)
        with self._lock:
            captured = self._ready(everything=True, progress=progress)
            if captured.waits():
                with CAPTURE_LOCK, calling.settle_modes(self.device):
                    captured.capture_rest(progress=progress)
        return self

    def _ready(self, *, everything: bool = False, progress: bool = False) -> Captured:
        """Return the captured graphs, and capture them first if that has not been done.

        On the eager backend, device and dtype are read again if weights changed after the capture.
        """
        captured = self._captured
        if captured is not None:
            if self.backend != "eager" or captured.guard.holds():
                return captured
            self._forms = {}
        try:
            self._locate()
            if captured is None or self.backend != "eager":
                self._counts = GraphStats(self.backend)
            with CAPTURE_LOCK, calling.settle_modes(self.device):
                self._captured = self._capture(everything=everything, progress=progress)
        except BaseException as error:  # also after an interrupt, no partial capture may remain
            traceback.clear_frames(error.__traceback__)  # the traceback refers to the buffers
            self._free()
            raise
        return self._captured

    def _capture(self, *, everything: bool, progress: bool) -> Captured:
        """Capture with the times of a table, or measure them and keep a table."""
        file = self._table_file()
        captured = capture_encoder(
            self.encoder,
            self._forms,
            self._budget_sets,
            self._tables if file is None else self._read_tables(file),
            self._counts,
            bounded=self._bounded,
            clone=self.clone,
            everything=everything,
            progress=progress,
        )
        tables = self._measured_tables(captured)
        if file is not None and tables and captured.measured_here:
            try:
                keep(file, tables)
            except OSError:
                if self.table != AUTO:
                    raise
        return captured

    def _table_file(self) -> Path | None:
        """Return the file that keeps this encoder's times; None if none is read or written."""
        if self.backend != "cudagraph" or self._tables or self.table is None:
            return None
        if self.table != AUTO:
            return Path(self.table)
        return kept_file(self._made_on(), self._budget_sets)

    def _read_tables(self, file: Path) -> dict[str, CostTable]:
        """Return the tables in the file of this encoder, none if its times have to be measured."""
        if self._measures_anew:
            return {}
        if self.table != AUTO:
            return read_tables(file, self._budget_sets) if file.exists() else {}
        accelerators = {name: form.accelerator for name, form in self._forms.items()}
        return read_kept(file, self._made_on(), accelerators)

    def _made_on(self) -> dict[str, dict[str, str]]:
        return {name: fingerprint(self.encoder, form) for name, form in self._forms.items()}

    def release(self) -> None:
        """Free graphs, their memory, derived weights and times; the next call captures again.

        That capture measures times anew and keeps them, unless :meth:`load_table` named a table.
        """
        with self._lock:
            self._free()
            self._measures_anew = True

    def _free(self) -> None:
        with self._lock, CAPTURE_LOCK:
            on_cuda = self.device.type == "cuda"
            if on_cuda:
                torch.cuda.synchronize(self.device)  # replays may still be writing to the buffers
            self._captured = None
            self._forms = {}  # the accelerated form holds the derived weights
            self._counts = GraphStats(self.backend)
            if on_cuda:
                torch.cuda.empty_cache()

    def save_table(self, path: str | os.PathLike[str]) -> None:
        """Write measured times and chosen kernels as JSON: another process makes the same choices.

        Raises:
            ValueError: nothing was measured (no capture yet, or a backend without graphs).
        """
        with self._lock:
            tables = self._measured_tables(self._captured) if self._captured else {}
            if not tables:
                raise ValueError("there are no measured times: capture() with backend='cudagraph'")
            write_tables(path, tables)

    def _measured_tables(self, captured: Captured) -> dict[str, CostTable]:
        """Return the table of each input path, none at all if one of them was not measured."""
        tables = {}
        for name, executor in captured.paths.items():
            form, costs = executor.form, executor.graphs.packer.costs
            kernels = None if form.accelerator is None else dict(form.accelerator.choices())
            tables[name] = CostTable("", fingerprint(self.encoder, form), costs, kernels)
        return tables if all(table.costs.measured for table in tables.values()) else {}

    def load_table(self, path: str | os.PathLike[str] | None) -> None:
        """Use saved times and kernels instead of measuring; call it before capture.

        The file is read here, once. It serves every capture of this object, also after
        ``release()``, until another is loaded. Inferred budgets above its largest are skipped, and
        the argument ``table`` has no effect.

        Args:
            path: a file that ``save_table`` wrote; None forgets a table loaded before, so that the
                argument ``table`` counts again.

        Raises:
            ValueError: already captured, or no such table. The capture raises it for a table with
                other budgets, measured on another encoder or device, or with a kernel that cannot
                run here.
        """
        with self._lock:
            if self._captured is not None:
                raise ValueError("already captured: release() first, then load_table, then capture")
            self._tables = {} if path is None else read_tables(path, self._budget_sets)

    @overload
    def __call__(self, pixel_values: VisionInputs) -> list[PartialOutput]: ...

    @overload
    def __call__(self, pixel_values: Tensor, grid_thw: GridLike) -> PartialOutput: ...

    def __call__(
        self,
        pixel_values: Tensor | VisionInputs,
        grid_thw: GridLike | None = None,
    ) -> PartialOutput | list[PartialOutput]:
        """Encode a batch of items.

        Runs without autocast, even inside ``torch.autocast``, so that eager runs match replays.

        Args:
            pixel_values: the rows of all items, [P, *row_shape], any floating dtype, on the CPU or
                the encoder's device. A pinned CPU tensor is read asynchronously: do not overwrite
                it before the device has done the work. Or the whole result of
                ``encoder.preprocess``, which an encoder of several paths needs.
            grid_thw: [items, 3], the same as for the wrapped encoder; read on the host.

        Returns:
            :class:`PartialOutput`, items in the caller's order; fields not in ``outputs`` are None.
            From the result of ``preprocess``, a list with one output per item.

        Raises:
            ValueError: pixels or a grid that do not fit, gradients wanted, inputs of other paths,
                or (with ``on_overflow="raise"``) an item over every budget.
            RuntimeError: weights were rebound, a plain value of a module changed (an adapter was
                switched or merged) or (with graphs) a hook was registered after capture, or this
                was called from inside its own encoder, or inside a CUDA graph that is being
                captured.
        """
        if not isinstance(pixel_values, VisionInputs):
            if self._paths_joined:
                raise ValueError(
                    f"pixel_values is a {type(pixel_values).__name__}, but this encoder has the "
                    f"paths {', '.join(self._budget_sets)}: pass the whole result of "
                    "encoder.preprocess(...)"
                )
            return self._encode({"image": (pixel_values, grid_thw)})["image"]
        if grid_thw is not None:
            raise ValueError(
                "the result of preprocess was given with grid_thw: pass it alone, or pass "
                "inputs.pixel_values and inputs.grid_thw"
            )
        pixel_values.check(self._budget_sets)
        path_inputs = {name: path[:2] for name, path in pixel_values.paths.items() if path.items}
        outputs = self._encode(path_inputs)
        with calling.settle_modes(self.device):
            return self.join(outputs, pixel_values)

    def join(
        self, outputs: Mapping[str, PartialOutput], inputs: VisionInputs
    ) -> list[PartialOutput]:
        """Return one output per item from the outputs of the paths.

        Args:
            outputs: the output of each path by its name, without the paths that got no pixels.
            inputs: the result of ``preprocess``.
        """
        return [PartialOutput(*item) for item in self._path_encoder.join(outputs, inputs)]

    def _encode(self, inputs: Mapping[str, Inputs]) -> dict[str, PartialOutput]:
        """Return the output of each input path in ``inputs``."""
        calling.check_alone(self._lock, self.device)
        with self._lock:
            captured = self._ready()
            for name, (pixels, _) in inputs.items():
                calling.check_pixels(pixels, captured.paths[name].row_shape, self.device)
                captured.guard.check_gradients(pixels)
            with calling.settle_modes(self.device):
                if captured.waits():
                    with CAPTURE_LOCK:
                        captured.capture_for(inputs)
                return captured.encode(inputs, refuses=self.on_overflow == "raise")

    def item_encoder(self) -> ItemEncoder[PartialOutput]:
        """Return the functions and settings by which ``encode`` and ``embed`` run items."""
        paths = self._path_encoder.paths
        calls = {name: partial(self._call_path, name) for name in paths}
        own = ItemEncoder(self, paths, calls, self.device, self.outputs, owns_results=self.clone)
        encoder: nn.Module = self.encoder
        if not isinstance(encoder, EncodesItems):
            return own
        inner = encoder.item_encoder()
        return replace(
            own,
            stager=inner.stager,
            head=inner.head,
            pixel_dtype=inner.pixel_dtype,
            class_token=inner.class_token,
        )

    def _call_path(self, name: str, pixel_values: Tensor, grid_thw: GridLike) -> PartialOutput:
        return self._encode({name: (pixel_values, grid_thw)})[name]

    def stats(self) -> GraphStats:
        """Return a copy of the counters; it prints as a table, ``.to_dict()`` is plain data."""
        with self._lock:
            stats = deepcopy(self._counts)
            if self._captured is not None:
                self._captured.measure(stats)
            return stats

    def reset_stats(self) -> None:
        """Set the counters of calls to zero; times and bytes measured at capture are kept."""
        with self._lock:
            self._counts.reset()

    def _poison(self) -> None:
        """Fill static buffers and pool with NaN, so that tests see if a result reads old values."""
        if self._captured is not None:
            self._captured.memory.poison()
            for path in self._captured.paths.values():
                path.written_key = None
