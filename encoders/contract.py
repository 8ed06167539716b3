"""What every encoder promises, and the plain data that passes between the packages.

Words: a *patch* is one input row of a tower; a *segment* is one attention sequence (an image, a
frame pair, a tile); an *item* is one image or one video as the user passed it; a *token* is one
output row after the merge.

Shapes: P patches (rows of ``pixel_values``), N tokens, D tower width, S segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = [
    "Accelerable",
    "Accelerator",
    "BlockParts",
    "BlockTower",
    "EncoderItemSpec",
    "EncoderOutput",
    "GraphableEncoder",
    "Grid",
    "GridLike",
    "Metadata",
    "NamesItsParts",
    "VisionInputs",
]

Grid: TypeAlias = tuple[int, int, int]
GridLike: TypeAlias = Tensor | Sequence[Sequence[int]] | Sequence[int]
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


PartNorm: TypeAlias = nn.LayerNorm | nn.RMSNorm | nn.Identity


class BlockParts(NamedTuple):
    """The layers of one pre-norm block by role, for code that runs its steps in another way.

    Each is of its type or what stands in its place (LoRA, quantised).

    A block computes ``x += scale1 * proj(attention(qkv(norm1(x))))`` and then
    ``x += scale2 * down(activation(up(norm2(x))))``, the activation of ``gate`` times ``up`` where
    there is a gate.
    """

    containers: tuple[nn.Module, ...]
    """The block, its attention and its MLP: what a hook on them would see."""
    norm1: PartNorm
    qkv: nn.Linear
    """Rows are [Q; K; V], each head-major."""
    proj: nn.Linear
    norm2: PartNorm
    up: nn.Linear
    down: nn.Linear
    num_heads: int
    activation: str
    """"gelu", "gelu_tanh", "quick_gelu" or "silu"."""
    gate: nn.Linear | None = None
    scale1: Tensor | None = None
    """[D], multiplies the attention branch (layer scale)."""
    scale2: Tensor | None = None
    q_norm: PartNorm | None = None
    """Norm over the query rows, all heads together."""
    k_norm: PartNorm | None = None
    windows: bool = False
    """Whether attention stays inside ``cu_window_seqlens`` instead of ``cu_seqlens``."""


@runtime_checkable
class NamesItsParts(Protocol):
    """A block that says what it is made of."""

    def parts(self) -> BlockParts | None: ...


class BlockTower(Protocol):
    """All that an accelerator asks of the encoder whose blocks it runs."""

    @property
    def blocks(self) -> nn.ModuleList: ...

    def block_context(self, hidden: Tensor, metadata: Metadata) -> Any: ...

    def run_block(self, block: nn.Module, *args: Any) -> Tensor: ...

    def reference_blocks(
        self, hidden: Tensor, metadata: Metadata, wanted: Sequence[int]
    ) -> Iterator[Tensor]: ...


class Accelerator(Protocol):
    """Runs an encoder's blocks in a faster way; the weights stay the encoder's own."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights derived from the encoder's."""
        ...

    @property
    def taken(self) -> str:
        """Names of the attention kernels that the last forward took, or "reference"."""
        ...

    def run_blocks(
        self, encoder: BlockTower, hidden: Tensor, metadata: Metadata, wanted: Sequence[int]
    ) -> Iterator[Tensor]:
        """The hidden state after each block in ``wanted`` (ascending block numbers)."""
        ...

    def add_weighted_rows(
        self, rows: Tensor, table: nn.Embedding, index: Tensor, weight: Tensor
    ) -> Tensor:
        """Rows plus a weighted sum of rows of a table."""
        ...

    def refresh(self) -> None:
        """Bring derived weights up to date with writes that torch counts, before each replay."""
        ...

    def choices(self) -> dict[str, Any]:
        """What was chosen and why, as plain data for JSON."""
        ...

    def load_choices(self, choices: Mapping[str, Any]) -> None:
        """Take the choices of another process instead of timing."""
        ...


@runtime_checkable
class Accelerable(Protocol):
    """The optional part of the contract: an encoder that has a faster form of itself."""

    accelerator: Accelerator | None

    def accelerated(self, kernels: str = "auto", precision: str = "bf16") -> GraphableEncoder: ...
