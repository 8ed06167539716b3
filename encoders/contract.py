"""What every encoder promises, and the plain data that passes between the packages.

Words: a *patch* is one input row of a tower; a *segment* is one attention sequence (an image, a
frame pair, a tile); an *item* is one image or one video as the user passed it; a *token* is one
output row after the merge.

Shapes: P patches (rows of ``pixel_values``), N tokens, D tower width, S segments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .grids import (
    Grid,
    GridLike,
    block_indices,
    check_input_size,
    check_pixels,
    check_rows,
    check_tiles,
    merge_order_positions,
    missing_grid,
    raster_maps,
    read_grid,
    require_features,
    require_output,
    require_tensor,
    split_rows,
    squarest,
    stitch_tiles,
    window_order,
)
from .hf_config import (
    find_section,
    read_blocks,
    read_epsilon,
    read_field,
    read_flag,
    read_integer,
    read_size,
    require_divisible,
    require_value,
)
from .layers import is_plain, patch_product

if TYPE_CHECKING:
    from .images import Preprocessor

__all__ = [
    "EncoderItemSpec",
    "EncoderOutput",
    "GraphableEncoder",
    "Grid",
    "GridLike",
    "Metadata",
    "VisionEncoder",
    "VisionInputs",
    "check_input_size",
    "check_rows",
    "check_tiles",
    "find_section",
    "is_plain",
    "merge_order_positions",
    "patch_product",
    "raster_maps",
    "read_blocks",
    "read_epsilon",
    "read_field",
    "read_flag",
    "read_grid",
    "read_integer",
    "read_size",
    "require_divisible",
    "require_features",
    "require_tensor",
    "require_value",
    "squarest",
    "stitch_tiles",
    "window_order",
]

Metadata: TypeAlias = dict[str, Tensor]


class EncoderOutput(NamedTuple):
    """What an encoder returns; a wrapper may leave out (None) the fields it was not asked for."""

    last_hidden_state: Tensor | None
    """[P, D] before the merger, in input order; InternViT [tiles, 1+h*w, D]."""
    pooler_output: Tensor | None
    """[N, out] merged tokens, in the merge order of the checkpoint."""
    deepstack_features: tuple[Tensor, ...] | None
    """A tuple of [N, out], empty where the family has none."""

    def clone(self) -> EncoderOutput:
        """The same tensors in memory of their own: one item of ``split``, free of its batch."""
        hidden, pooled, deepstack = self
        return EncoderOutput(
            None if hidden is None else hidden.clone(),
            None if pooled is None else pooled.clone(),
            None if deepstack is None else tuple(layer.clone() for layer in deepstack),
        )


class VisionInputs(NamedTuple):
    """Pixels ready for an encoder, and where each item lies in them."""

    pixel_values: Tensor
    grid_thw: Tensor
    """[items, 3] int64 on the CPU."""
    tiles: list[tuple[int, int, bool]] | None = None
    """(columns, rows, thumbnail) an item for tiled families, None elsewhere."""


class EncoderItemSpec(NamedTuple):
    """What one item costs: the single source for counting, packing and balancing."""

    input_size: int
    """Rows of ``pixel_values``: patches; InternViT tiles."""
    output_tokens: int
    """Rows of ``pooler_output``."""
    segments: int
    longest_segment: int
    """In rows that attend to each other: patches; InternViT 1+h*w."""
    windows: int = 0
    """Attention windows (Qwen2.5-VL)."""


class GraphableEncoder(Protocol):
    """All that ``graphwrap`` asks of a module; a toy of a few lines satisfies it."""

    @property
    def budget_range(self) -> tuple[int, int]: ...

    @property
    def row_shape(self) -> tuple[int, ...]: ...

    def grid_for(self, tokens: int) -> Grid: ...

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]: ...

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
    ) -> Metadata: ...

    def __call__(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput: ...

    def split(self, output: EncoderOutput, grid_thw: GridLike) -> list[EncoderOutput]: ...


class VisionEncoder(nn.Module, ABC):
    """The shell that all towers share: preprocessing, splitting, running blocks, intake checks.

    Subclasses hold the architecture: ``config``, ``blocks``, ``prepare_encoder_metadata``,
    ``forward``.
    """

    config: Any
    preprocessor: Preprocessor
    gradient_checkpointing: bool = False

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
    def block_outputs(self, pixel_values: Tensor, grid_thw: GridLike) -> Iterator[Tensor]:
        """The hidden state after each block in turn, in input order; stop early to save work."""

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

        Takes the arguments of :meth:`preprocess` and raises what it raises. All run in one forward,
        so memory grows with the call: pass many in chunks. Every item has memory of its own.
        """
        inputs = self.preprocess(
            images,
            videos,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            max_tiles=max_tiles,
            fps=fps,
            num_frames=num_frames,
        )
        items = self.split(self(inputs.pixel_values, inputs.grid_thw), inputs.grid_thw)
        return [item.clone() for item in items] if len(items) > 1 else items

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
        needed = islice(self.block_outputs(pixel_values, grid_thw), max(wanted, default=-1) + 1)
        kept = {number: hidden for number, hidden in enumerate(needed) if number in wanted}
        return [kept[number] for number in wanted]

    def resolve_metadata(
        self, pixel_values: Tensor, grid_thw: GridLike | None, encoder_metadata: Metadata | None
    ) -> Metadata:
        """The metadata given, else metadata made from the grid.

        Raises:
            ValueError: neither was given, or no tensor of pixels.
        """
        require_tensor(pixel_values)
        if encoder_metadata is not None:
            return encoder_metadata
        if grid_thw is None:
            raise ValueError(missing_grid(pixel_values, self.config.patch_size))
        return self.prepare_encoder_metadata(grid_thw)

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
