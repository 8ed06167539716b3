"""The shell that all towers share: preprocessing, splitting, running blocks, intake checks.

Shapes: P patches (rows of ``pixel_values``), N tokens, D tower width.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .contract import Accelerator, EncoderItemSpec, EncoderOutput, Grid, GridLike
from .contract import Metadata, VisionInputs
from .inputs import (
    Preprocessor,
    StagedPreprocessor,
    block_indices,
    check_pixels,
    missing_grid,
    read_grid,
    require_metadata,
    require_output,
    require_tensor,
    split_rows,
)
from .layers import add_weighted_rows
from .streams import EncodesItems, Encoding

Encoder = TypeVar("Encoder", bound="VisionEncoder")


class VisionEncoder(EncodesItems, nn.Module, ABC):
    """The shell that all towers share: preprocessing, splitting, running blocks, intake checks.

    Subclasses hold the architecture: ``config``, ``blocks``, ``prepare_encoder_metadata``,
    ``forward``.
    """

    config: Any
    preprocessor: Preprocessor
    blocks: nn.ModuleList
    gradient_checkpointing: bool = False
    accelerator: Accelerator | None = None
    """What runs the blocks of an accelerated encoder; None runs them as modules."""
    _last_metadata: tuple[object, Metadata] | None = None

    @property
    @abstractmethod
    def budget_range(self) -> tuple[int, int]:
        """Smallest and largest number of output tokens that a graph is worth capturing for."""

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int, ...]:
        """Trailing shape of ``pixel_values``: what one input row looks like."""

    @abstractmethod
    def grid_for(self, tokens: int) -> Grid:
        """The ``(t, h, w)`` of one item of at least ``tokens`` tokens with the fewest rows."""

    @abstractmethod
    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """What each item costs: rows, tokens, segments, longest segment, windows."""

    @abstractmethod
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
        """Everything ``forward`` needs to know about the grid, as tensors; runs on the host.

        Args:
            grid_thw: [items, 3]; empty is valid.
            max_batch_size: segments to pad ``cu_seqlens`` for where ``max_frames_per_batch`` is
                not given.
            max_frames_per_batch: segments (frame pairs, tiles) to pad ``cu_seqlens`` for.
            max_seqlen_override: longest segment to plan for, at least the true one.
            max_input_size: rows of every per-patch or per-token entry; the added ones are finite.
            max_windows_per_batch: attention windows to pad for (Qwen2.5-VL).
            device: defaults to the encoder's.

        Returns:
            Plain tensors. Every family has ``cu_seqlens`` int32 [S+1] and ``max_seqlen`` 0-dim
            int32 on the CPU; the family says what else.

        Raises:
            ValueError: a bad grid, or one that does not fit a capacity.
        """

    @abstractmethod
    def block_outputs(
        self, pixel_values: Tensor, grid_thw: GridLike, wanted: Sequence[int]
    ) -> Iterator[Tensor]:
        """The hidden state after each block in ``wanted`` (ascending), in input order."""

    @abstractmethod
    def block_context(self, hidden: Tensor, metadata: Metadata) -> Any:
        """What every block reads besides the hidden state, made once per forward."""

    @abstractmethod
    def feature_maps(
        self,
        features: Tensor,
        grid_thw: GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[Tensor]:
        """Lay features out in space: a list of [t, h, w, D] in raster order, one an item.

        Args:
            features: ``last_hidden_state``, ``pooler_output`` or a DeepStack feature.
            grid_thw: [items, 3].
            tiles: of :class:`VisionInputs`, to stitch an image's tiles (InternViT).

        Raises:
            ValueError: no tensor, or features that are not of this grid.
        """

    def preprocess(
        self,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> VisionInputs:
        """Resize, normalise and cut images and videos as the checkpoint's own processor does.

        Args:
            images: paths (read upright, by EXIF), PIL images (as they are), numpy [H, W, C] or
                uint8 tensors [C, H, W], in any mix.
            videos: each a sequence of such frames, or one array [F, H, W, C] / tensor [F, C, H, W].
            min_pixels: smallest area in pixels (Qwen towers; a whole clip's for Qwen3-VL).
            max_pixels: largest area, likewise.
            max_tiles: most tiles an image is cut into, thumbnail not counted (InternViT).
            fps: sample videos to this many frames a second; by default every frame is used.
            num_frames: sample videos to this many frames.

        Returns:
            :class:`VisionInputs`; images first, then videos, each in the order given.

        Raises:
            ValueError: an image that cannot be encoded, or a keyword this family has no use for.
        """
        return self.preprocessor(
            images,
            videos,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            max_tiles=max_tiles,
            fps=fps,
            num_frames=num_frames,
        )

    def encoding(self) -> Encoding:
        """This encoder, and how ``encode`` and ``encode_many`` call it."""
        stager = self.preprocessor if isinstance(self.preprocessor, StagedPreprocessor) else None
        return Encoding(self, self, next(self.parameters()).device, stager=stager)

    def split(self, output: EncoderOutput, grid_thw: GridLike) -> list[EncoderOutput]:
        """Cut a batched output into one output an item: views, which keep the whole batch.

        An item's ``clone()`` is a copy of it alone.

        Raises:
            ValueError: no whole output, a bad grid, or one of more rows or tokens than it has.
        """
        require_output(output)
        specs = self.item_specs(grid_thw)
        rows, tokens = [s.input_size for s in specs], [s.output_tokens for s in specs]
        hidden = split_rows(output.last_hidden_state, rows)
        pooled = split_rows(output.pooler_output, tokens)
        deepstack: list[tuple[Tensor, ...] | None] = [None] * len(specs)
        if output.deepstack_features is not None:
            layers = [layer[: sum(tokens)].split(tokens) for layer in output.deepstack_features]
            deepstack = [tuple(layer[item] for layer in layers) for item in range(len(specs))]
        return list(map(EncoderOutput, hidden, pooled, deepstack))

    def forward_intermediates(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike,
        indices: int | Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Outputs of inner blocks, before any merger, in input order.

        Args:
            pixel_values: as ``forward`` takes them.
            grid_thw: [items, 3].
            indices: n for the last n blocks, block numbers (negatives from the end), None for all.

        Returns:
            A tensor a block, in the order asked for: [P, D]; InternViT [tiles, 1+h*w, D].

        Raises:
            ValueError: a block that does not exist, or what ``forward`` raises.
        """
        wanted = block_indices(indices, self.config.depth)
        numbers = sorted(set(wanted))
        states = self.block_outputs(pixel_values, grid_thw, numbers)
        kept = dict(zip(numbers, states, strict=True))
        return [kept[number] for number in wanted]

    def accelerated(self: Encoder, kernels: str = "auto", precision: str = "bf16") -> Encoder:
        """A faster form of this tower for inference on a GPU, over the same weights.

        An encoder of the same class with the same metadata, outputs and bounds, which fuses the
        element-wise steps and takes the fastest attention kernel for each shape. It shares modules,
        parameters and hooks with this one and sees updates of weights in place. Forwards that
        record gradients run the reference.

        Args:
            kernels: attention kernels to choose from: "auto" for all that are installed, "torch"
                for those that torch brings (Triton included), or the name of one kernel.
            precision: "bf16" keeps the encoder's own half or full precision.

        Returns:
            The accelerated encoder. Where it cannot accelerate (no CUDA, float64, a GPU older than
            compute capability 8.0, no Triton) it runs the reference, and ``kernel_choices()`` says
            why.

        Raises:
            ValueError: an unknown kernel or precision, or this encoder is accelerated already.

        Warns:
            UserWarning: a CUDA device that cannot be accelerated, or a kernel asked for by name
                that cannot run here.
        """
        from .accelerated import accelerate  # only where it is asked for: it needs Triton

        if self.accelerator is not None:
            raise ValueError(
                "this encoder is accelerated already: call accelerated() on the encoder that it "
                "was made from"
            )
        view = copy.copy(self)  # shares modules, parameters and hooks
        weight = next(self.parameters())
        view.accelerator = accelerate(kernels, precision, weight.device, weight.dtype)
        return view

    def kernel_choices(self) -> dict[str, Any]:
        """What an accelerated encoder chose, and why, as plain data for JSON.

        An encoder that is not accelerated says ``{"kernels": "reference"}``.
        """
        return {"kernels": "reference"} if self.accelerator is None else self.accelerator.choices()

    def load_kernel_choices(self, choices: Mapping[str, Any]) -> None:
        """Take the kernels that another process chose, instead of timing them here.

        Args:
            choices: what ``kernel_choices()`` returned there.

        Raises:
            ValueError: this encoder is not accelerated, or the data is no such thing or names a
                kernel that cannot run here.
        """
        if self.accelerator is None:
            raise ValueError("this encoder is not accelerated: call accelerated() first")
        self.accelerator.load_choices(choices)

    def resolve_metadata(
        self, pixel_values: Tensor, grid_thw: GridLike | None, encoder_metadata: Metadata | None
    ) -> Metadata:
        """The metadata given, else metadata made from the grid.

        Raises:
            ValueError: neither was given, or no tensor of pixels.
        """
        require_tensor(pixel_values)
        if encoder_metadata is not None:
            require_metadata(encoder_metadata)
            return encoder_metadata
        if grid_thw is None:
            raise ValueError(missing_grid(pixel_values, self.config.patch_size))
        if self.accelerator is None:
            return self.prepare_encoder_metadata(grid_thw)
        return self._prepare_once(grid_thw)

    def _prepare_once(self, grid_thw: GridLike) -> Metadata:
        """Metadata of a grid; that of the last grid on this stream is used again.

        For 32 images of 448x448 a call took 57.9 ms with it made anew, a replay 51.3 (H200).
        """
        weight = next(self.parameters())
        on_cuda = weight.device.type == "cuda"
        stream = torch.cuda.current_stream(weight.device).stream_id if on_cuda else 0
        key = (tuple(read_grid(grid_thw)), weight.device, weight.dtype, stream)
        if self._last_metadata is None or self._last_metadata[0] != key:
            self._last_metadata = key, self.prepare_encoder_metadata(grid_thw)
        return self._last_metadata[1]

    def run_blocks(
        self, hidden: Tensor, metadata: Metadata, wanted: Sequence[int]
    ) -> Iterator[Tensor]:
        """The hidden state after each block in ``wanted``; blocks after the last are not run.

        An accelerated encoder runs the blocks in its own way unless gradients are recorded.

        Args:
            hidden: [P, D], or InternViT [tiles, 1+h*w, D]; rows in the order that blocks work in.
            metadata: what ``prepare_encoder_metadata`` returns.
            wanted: block numbers from 0, ascending, each once.
        """
        if self.accelerator is None or self._records_gradients(hidden):
            return self.reference_blocks(hidden, metadata, wanted)
        return self.accelerator.run_blocks(self, hidden, metadata, wanted)

    def hidden_after(self, hidden: Tensor, metadata: Metadata, blocks: int) -> Tensor:
        """The hidden state after the first ``blocks`` blocks; ``hidden`` itself after none."""
        for state in self.run_blocks(hidden, metadata, [blocks - 1] if blocks else []):
            hidden = state
        return hidden

    def reference_blocks(
        self, hidden: Tensor, metadata: Metadata, wanted: Sequence[int]
    ) -> Iterator[Tensor]:
        """What ``run_blocks`` returns, each block called as the module it is."""
        context = self.block_context(hidden, metadata)
        for number, block in enumerate(islice(self.blocks, max(wanted, default=-1) + 1)):
            hidden = self.run_block(block, hidden, context)
            if number in wanted:
                yield hidden

    def add_weighted_rows(
        self, rows: Tensor, table: nn.Embedding, index: Tensor, weight: Tensor
    ) -> Tensor:
        """Rows plus a weighted sum of rows of a table: interpolated position embeddings.

        Args:
            rows: [P, D].
            table: [entries, D].
            index: int64 [P, taps], which entries.
            weight: [P, taps], float32 or wider.

        Returns:
            [P, D] in the dtype of ``rows``.
        """
        if self.accelerator is None or self._records_gradients(rows):
            return add_weighted_rows(rows, table, index, weight)
        return self.accelerator.add_weighted_rows(rows, table, index, weight)

    def _records_gradients(self, hidden: Tensor) -> bool:
        """Whether a backward pass could be asked of what runs now."""
        if not torch.is_grad_enabled():
            return False
        return hidden.requires_grad or any(weight.requires_grad for weight in self.parameters())

    def run_block(self, block: nn.Module, *args: Any) -> Tensor:
        """One transformer block, recomputed in the backward if ``gradient_checkpointing`` is on."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)

    def admit_pixels(
        self, pixel_values: Tensor, weight: Tensor, hint: str = "", shape: tuple[int, ...] = ()
    ) -> Tensor:
        """Check ``pixel_values`` and bring them to the dtype and device of ``weight``.

        Raises:
            ValueError: no tensor, integer pixels, a wrong trailing shape, or pixels on another
                accelerator.
        """
        rows = f"{type(self).__name__} takes rows of shape {self.row_shape}{hint}"
        check_pixels(pixel_values, shape or self.row_shape, rows, weight.device)
        return pixel_values.to(device=weight.device, dtype=weight.dtype)
