"""The base class of encoders of one input path: metadata, splitting, and how blocks run.

Shapes: P patches (rows of ``pixel_values``), N tokens, D tower width.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..data import (
    EncoderItemSpec,
    EncoderOutput,
    Grid,
    GridLike,
    Metadata,
    Output,
    VisionInputs,
    is_of_prefix,
    output_like,
)
from ..grids import split_rows
from ..layers.segments import BlockContext, segment_metadata
from .block_records import BlockRecorder, check_names
from .checks import (
    check_pixels,
    check_rows,
    missing_grid,
    require_metadata,
    require_output,
    require_tensor,
)
from .encoder import Encoder

if TYPE_CHECKING:
    from ..contract import Accelerator, Kernels, Precision, Step
    from .configs import VisionConfig

Self = TypeVar("Self", bound="VisionEncoder")


class InnerStack(NamedTuple):
    """A stack of blocks over views [B, h, w, D] (SAM) that a tower runs before its ``blocks``."""

    blocks: nn.ModuleList
    embed_patches: Callable[[Tensor], Tensor]
    """Takes tiles [B, C, H, W], and returns the rows [B, h, w, D] that the first block reads."""


class VisionEncoder(Encoder):
    """An :class:`Encoder` of one input path: it takes tensors, and CUDA graphs can capture it.

    Subclasses define the architecture: ``config``, ``blocks`` and ``forward``.
    """

    config: VisionConfig
    gradient_checkpointing: bool = False
    accelerator: Accelerator | None = None
    """Runs the blocks of an accelerated encoder; None means that blocks are called as modules."""
    prefix_rows: int = 0
    """The number of rows of a segment that come before its patches: class tokens and registers."""
    _extra_names: tuple[str, ...] = ()
    """The outputs of blocks that ``extras`` have, set by :meth:`with_extras`."""
    _recorder: BlockRecorder | None = None
    """Keeps these outputs during a forward; only the copy that runs that forward has one."""

    if TYPE_CHECKING:  # a family sets ``blocks``, or defines a property that finds them

        @property
        def blocks(self) -> nn.ModuleList: ...

    @property
    def paths(self) -> Mapping[str, VisionEncoder]:
        """The encoder itself under the name "image", because it has only one input path."""
        return {"image": self}

    @property
    def _pixel_weight(self) -> Tensor:
        """The weight to whose dtype ``embed_patches`` converts pixels: by default the first one."""
        return next(self.parameters())

    @property
    @abstractmethod
    def budget_range(self) -> tuple[int, int]:
        """The smallest and largest number of output tokens of CUDA graphs captured by default."""

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row of ``pixel_values``: all of its axes but the first."""

    @abstractmethod
    def grid_for(self, tokens: int) -> Grid:
        """Return the smallest grid (t, h, w) of one item that makes at least ``tokens`` tokens."""

    @abstractmethod
    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Return the sizes of each item: input rows, output tokens, attention segments, windows."""

    @abstractmethod
    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode the rows of all items.

        Args:
            pixel_values: [P, patch_dim] of towers over patches, [B, C, H, W] of towers over tiles;
                floating-point, on the CPU or on the device of the encoder.
            grid_thw: (t, h, w) per item, h and w in patches; it is not read if
                ``encoder_metadata`` is given.
            encoder_metadata: the result of ``prepare_encoder_metadata``; with it the host never
                waits for the device, and pixel rows beyond those of the grid are padding.

        Returns:
            :class:`EncoderOutput`, with the shapes that the documentation of the family gives.

        Raises:
            ValueError: integer pixels, a wrong width or size, or a grid or metadata that disagree
                with the pixels.
        """

    def prepare_encoder_metadata(
        self,
        grid_thw: GridLike,
        *,
        max_batch_size: int | None = None,
        max_frames_per_batch: int | None = None,
        max_seqlen_override: int | None = None,
        max_input_size: int | None = None,
        max_windows_per_batch: int | None = None,
        device: torch.device | str | None = None,
    ) -> Metadata:
        grids = self._segment_grids(self._read(grid_thw))
        weight = next(self.parameters())
        specs = self.item_specs(grids)
        if (rows := sum(spec.segments * spec.longest_segment for spec in specs)) >= 2**31:
            raise ValueError(
                f"the grid makes {rows} rows, and int32 offsets end at 2^31: pass fewer items"
            )
        entries = self._grid_metadata(grids, max_input_size, max_windows_per_batch)
        lengths = [spec.longest_segment for spec in specs for _ in range(spec.segments)]
        segments = segment_metadata(
            lengths,
            max_batch_size=max_batch_size,
            max_frames_per_batch=max_frames_per_batch,
            max_seqlen_override=max_seqlen_override,
        )
        count = len(segments["cu_seqlens"]) - 1
        entries |= self._prefix_metadata(entries, lengths, count, max_input_size)
        device = device or weight.device
        return {  # the host reads the 0-dim entries, the device all others
            name: entry.to(device) if entry.ndim else entry
            for name, entry in (entries | segments).items()
        }

    @abstractmethod
    def _read(self, grid_thw: GridLike) -> list[Grid]:
        """Return the grid as a list of ``(t, h, w)``, checked by the rules of the family."""

    def _segment_grids(self, grids: list[Grid]) -> list[Grid]:
        """Return one grid per segment if attention spans few frames; by default, the grids."""
        return grids

    @abstractmethod
    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the metadata besides ``cu_seqlens`` and ``max_seqlen``, on the CPU.

        Entries per patch are padded to ``max_input_size`` rows, and offsets to
        ``max_windows_per_batch`` attention windows, if these are not None.
        """

    def _prefix_metadata(
        self, entries: Metadata, lengths: list[int], segments: int, max_input_size: int | None
    ) -> Metadata:
        """Return where rows before the patches lie among packed rows; by default there are none.

        ``entries`` are the result of ``_grid_metadata``; ``lengths`` count all rows of a segment.
        The result is padded to ``segments`` segments and ``max_input_size`` patches.
        """
        return {}

    @abstractmethod
    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Return the hidden state that the first block reads.

        It has the rows [P, D], in towers over tiles [B, n, D]. ``metadata`` is the result of
        ``prepare_encoder_metadata``.
        """

    def in_input_order(self, rows: Tensor, metadata: Metadata) -> Tensor:
        """Return rows in the order of ``pixel_values``, from rows in the order of the blocks."""
        return rows

    def rows_of_prefix(self, rows: Tensor, metadata: Metadata) -> Tensor:
        """Return the rows before the patches [segments, r, D] among rows in the order of blocks.

        These are class tokens and registers; ``r`` is ``prefix_rows``, which must not be 0.
        """
        return rows[:, : self.prefix_rows]

    def block_outputs(
        self, pixel_values: Tensor, grid_thw: GridLike, numbers: Sequence[int]
    ) -> Iterator[Tensor]:
        """Embed pixels; yield the hidden state, in input order, after each block in ``numbers``.

        Args:
            pixel_values, grid_thw: as ``forward`` takes them.
            numbers: block numbers from 0; no block runs after the greatest one.

        Yields:
            The hidden state, with the shape of ``last_hidden_state``, in ascending order of blocks.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, None)
        hidden, stop = self.embed_patches(pixel_values, metadata), max(numbers, default=-1) + 1
        steps = self.steps(self.blocks, hidden, metadata, read_after=numbers, stop=stop)
        for number, block in enumerate(steps):
            hidden = block(hidden)
            if number in numbers:
                yield self.in_input_order(hidden, metadata)

    @property
    def inner_stacks(self) -> Mapping[str, InnerStack]:
        """The blocks that run before ``blocks``, by name, such as "sam"; most towers have none."""
        return {}

    @property
    def _stacks(self) -> dict[str, nn.ModuleList]:
        """The stacks of blocks by the beginning of the names of their outputs: "" or "sam."."""
        inner = {f"{name}.": stack.blocks for name, stack in self.inner_stacks.items()}
        return {"": self.blocks, **inner}

    @property
    def _blocks_run(self) -> int:
        """The number of ``blocks`` that ``forward`` runs, the first ones."""
        return len(self.blocks)

    @property
    def _named_blocks(self) -> dict[str, list[nn.Module]]:
        run = {name: list(stack) for name, stack in self._stacks.items()}
        return {**run, "": run[""][: self._blocks_run]}

    def with_extras(self: Self, names: Sequence[str]) -> Self:
        check_names(names, self._named_blocks, ("",) if self.prefix_rows else ())
        giving = copy.copy(self)  # the copy shares modules, parameters and hooks
        giving._extra_names = tuple(dict.fromkeys((*self._extra_names, *names)))
        return giving

    def _call(
        self, pixel_values: Tensor, grid_thw: GridLike | None, encoder_metadata: Metadata | None
    ) -> EncoderOutput:
        if not self._extra_names:
            return super()._call(pixel_values, grid_thw, encoder_metadata)
        running = copy.copy(self)  # of this call alone, because threads may share ``self``
        running._recorder = recorder = BlockRecorder(self._extra_names)
        output = super(VisionEncoder, running)._call(pixel_values, grid_thw, encoder_metadata)
        given = {name: recorder.outputs[name] for name in self._extra_names}
        return output._replace(extras={**output.extras, **given})

    def _maps_of_items(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        maps = self._maps_of_grids(features, inputs.grid_thw, inputs.tiles)
        return [{"image": item} for item in maps]

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Split the batched output of the only path, "image", into one output per item."""
        return self.split(outputs["image"], inputs.grid_thw) if outputs else []

    def split(self, output: Output, grid_thw: GridLike) -> list[Output]:
        """Split a batched output into one output per item.

        Args:
            output: the output of ``forward`` for all items.
            grid_thw: [items, 3], (t, h, w) in patches of each item, as ``forward`` took it.

        Returns:
            One output per item, with the rows, tokens and extras of that item. They are views that
            keep the whole batch in memory; ``clone()`` copies one of them.

        Raises:
            ValueError: no :class:`EncoderOutput`, a bad grid, or a grid of more rows or tokens than
                the output has.
        """
        require_output(output)
        specs = self.item_specs(grid_thw)
        rows, tokens = [s.input_size for s in specs], [s.output_tokens for s in specs]
        hidden = split_rows(output.last_hidden_state, [s.hidden_rows for s in specs])
        pooled = split_rows(output.pooler_output, tokens)
        deepstack: list[tuple[Tensor, ...] | None] = [None] * len(specs)
        if output.deepstack_features is not None:
            layers = [layer[: sum(tokens)].split(tokens) for layer in output.deepstack_features]
            deepstack = [tuple(layer[item] for layer in layers) for item in range(len(specs))]
        extras: list[dict[str, Tensor]] = [{} for _ in specs]
        for name, rows_of_all in output.extras.items():
            counts = [s.segments for s in specs] if is_of_prefix(name) else rows
            for of_item, part in zip(extras, rows_of_all[: sum(counts)].split(counts), strict=True):
                of_item[name] = part
        fields = zip(hidden, pooled, deepstack, extras, strict=True)
        return [output_like(output, *of_item) for of_item in fields]

    def _resolve_metadata(
        self, pixel_values: Tensor, grid_thw: GridLike | None, encoder_metadata: Metadata | None
    ) -> Metadata:
        """Return ``encoder_metadata`` or, if that is None, compute them from ``grid_thw``.

        Raises:
            ValueError: neither metadata nor a grid, pixels that are no tensor, or another number of
                rows than the grid makes.
        """
        require_tensor(pixel_values)
        if encoder_metadata is not None:
            require_metadata(encoder_metadata)
            return encoder_metadata
        if grid_thw is None:
            raise ValueError(missing_grid(pixel_values, self.config.patch_size))
        grids = self._read(grid_thw)
        self._check_grids(pixel_values, grids)  # before a grid in pixels makes huge metadata
        if self.accelerator is None:
            return self.prepare_encoder_metadata(grids)
        weight = next(self.parameters())
        return self.accelerator.metadata_of(grids, weight, self)

    def _check_grids(self, pixel_values: Tensor, grids: list[Grid]) -> None:
        """Raise a ValueError if pixels of the right shape do not have the rows of the grids."""
        if pixel_values.shape[1:] == self.row_shape:
            rows = sum(spec.input_size for spec in self.item_specs(grids))
            check_rows(len(pixel_values), rows, "but the grid makes")

    def _admit_pixels(
        self, pixel_values: Tensor, weight: Tensor, hint: str = "", shape: tuple[int, ...] = ()
    ) -> Tensor:
        """Check ``pixel_values`` and bring them to the dtype and device of ``weight``.

        ``hint`` is added to errors; ``shape``, if given, replaces ``row_shape`` in the check.

        Raises:
            ValueError: no tensor, integer pixels, rows of a wrong shape, or pixels on a device that
                is neither the CPU nor that of ``weight``.
        """
        rows = f"{type(self).__name__} takes rows of shape {self.row_shape}{hint}"
        check_pixels(pixel_values, shape or self.row_shape, rows, weight.device)
        return pixel_values.to(device=weight.device, dtype=weight.dtype)

    @abstractmethod
    def _block_context(self, hidden: Tensor, metadata: Metadata) -> BlockContext:
        """Return the tensors, made once per forward, that all blocks read with the hidden state."""

    def steps(
        self,
        blocks: nn.ModuleList,
        hidden: Tensor,
        metadata: Metadata,
        *,
        read_after: Collection[int] = (),
        stop: int | None = None,
    ) -> Iterable[Step]:
        """Return blocks as functions of only the hidden state, to be called one after the other.

        A ``forward`` loops over them, ``hidden = block(hidden)``. Each gets what all blocks read
        beside the hidden state. An accelerated encoder returns fused blocks unless gradients are
        recorded; only the last of them, and those in ``read_after``, return the hidden state: the
        others return what the next one needs.

        Args:
            blocks: the stack to run: ``self.blocks``, or one that runs before it, such as SAM's.
            hidden: the rows that the first block reads.
            metadata: the result of ``prepare_encoder_metadata``.
            read_after: numbers, from 0, of the blocks whose output is read, beside the last one's.
            stop: the number of blocks to run; None runs all.
        """
        run: list[nn.Module] = list(islice(blocks, stop))
        if (recorder := self._recorder) is None:
            return self._steps(blocks, run, hidden, metadata, read_after)
        stack = next(name for name, stack in self._stacks.items() if stack is blocks)
        read_after, watched = {*read_after, *recorder.numbers(stack)}, recorder.watched(stack, run)
        steps = self._steps(blocks, watched, hidden, metadata, read_after)

        def order(rows: Tensor) -> Tensor:
            return rows if stack else self.in_input_order(rows, metadata)

        prefix = partial(self.rows_of_prefix, metadata=metadata)
        return recorder.steps(stack, run, steps, order, prefix)

    def _steps(
        self,
        blocks: nn.ModuleList,
        run: Sequence[nn.Module],
        hidden: Tensor,
        metadata: Metadata,
        read_after: Collection[int],
        start: int = 0,
    ) -> Iterable[Step]:
        """Return the blocks ``run`` of the stack ``blocks``, as :meth:`steps` returns them.

        ``start`` is the number of the first of them; those in ``read_after`` are counted from it.
        """
        if self.accelerator is not None and not self._records_gradients(hidden):

            def call_block(block: nn.Module, hidden: Tensor) -> Tensor:
                return self._run_block(block, self._block_context(hidden, metadata), hidden)

            fused = self.accelerator.steps(
                blocks, run, hidden, metadata, read_after, call_block, start
            )
            if fused is not None:
                return fused
        context = self._block_context(hidden, metadata)
        return [partial(self._run_block, block, context) for block in run]

    def _records_gradients(self, hidden: Tensor) -> bool:
        """Return whether autograd records operations on ``hidden`` or on the weights."""
        if not torch.is_grad_enabled():
            return False
        return hidden.requires_grad or any(weight.requires_grad for weight in self.parameters())

    def _run_block(self, block: nn.Module, context: BlockContext, hidden: Tensor) -> Tensor:
        """Run one block; the backward recomputes it if ``gradient_checkpointing`` is on."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, hidden, context, use_reentrant=False)
        return block(hidden, context)

    def accelerated(self: Self, kernels: Kernels = "auto", precision: Precision = "bf16") -> Self:
        from ..accelerated import accelerate  # imported here because it needs Triton

        if self.accelerator is not None:
            raise ValueError(
                "this encoder is accelerated already: call accelerated() on the encoder that it "
                "was made from"
            )
        accelerated = copy.copy(self)  # the copy shares modules, parameters and hooks
        weight = next(self.parameters())
        accelerated.accelerator = accelerate(kernels, precision, weight.device, weight.dtype)
        return accelerated

    def kernel_choices(self) -> dict[str, object]:
        return {"kernels": "reference"} if self.accelerator is None else self.accelerator.choices()

    def load_kernel_choices(self, choices: Mapping[str, object]) -> None:
        if self.accelerator is None:
            raise ValueError("this encoder is not accelerated: call accelerated() first")
        self.accelerator.load_choices(choices)
