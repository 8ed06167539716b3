"""The vision tower of Qwen3-VL, Qwen3-VL-MoE, Qwen3-Omni, Qwen3.5, 3.6 and 3.8.

A pre-norm ViT over packed patches of any image size: 2D rotary positions, a learned 48x48 position
table interpolated to the grid, full attention inside each frame pair, a 2x2 merger, and (Qwen3-VL
and Omni) DeepStack mergers that read the hidden state after a few inner blocks.

Source: ``Qwen3VLVisionModel`` and ``Qwen3_5VisionModel`` of transformers 5.23.0.
Repo ids: Qwen/Qwen3-VL-{2B,4B,8B,32B}-Instruct, Qwen/Qwen3-VL-30B-A3B-Instruct,
Qwen/Qwen3-VL-235B-A22B-Instruct, Qwen/Qwen3-Omni-30B-A3B-Instruct, Qwen/Qwen3.5-*, Qwen/Qwen3.6-*,
Qwen/Qwen3.8-*, Qwen/Qwen-Drive-1.0-4B, CohereLabs/North-Micro-Vision-Instruct, and timm's
qwen3_vit_*_enc, whose patches have one frame and which have no DeepStack mergers.

Shapes: P patches in merge-block order (T = P rows of attention), N = P/4 tokens, D width, H heads,
K head size, S segments.

Deliberate differences:

- The patch embedding is a Linear over the stored Conv3d weight, which makes the same sums faster
  (``patch_product`` has times). A layer with LoRA or hooks is called as a module instead.
- Position interpolation adds its four taps in the tower's dtype or float32, whichever is wider,
  both in eager runs and in graphs.
- The rotation multiplies in float32 and rounds to the tower's dtype once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import PatchEncoder, longest_side, merge_order_positions
from ..block_parts import BlockParts
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    find_type,
    read_indices,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.products import FlatPatchEmbed
from ..layers.rotary import rotary_cos_sin, rotate
from ..layers.segments import RotarySegments

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class Qwen3VLConfig:
    """Sizes of a vision tower; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("head size", self.head_size, "rotary axes * 2", 4)
        if self.position_side**2 != self.num_position_embeddings:
            raise ValueError(
                f"config: num_position_embeddings={self.num_position_embeddings} must be a square"
            )
        if any(not 0 <= index < self.depth for index in self.deepstack_visual_indexes):
            raise ValueError(
                f"config: deepstack_visual_indexes={list(self.deepstack_visual_indexes)}: "
                f"must be among blocks 0 to {self.depth - 1} of the tower"
            )

    @property
    def position_side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return isqrt(self.num_position_embeddings)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: channels * frames * height * width of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Qwen3VLConfig:
        """Read the ``config.json`` of a checkpoint, the whole or only its vision section.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config", "thinker_config.vision_config")
        require_value(vision, "hidden_act", "gelu_pytorch_tanh")
        require_value(vision, "apply_vit_abs_pos_embed", True)
        family = find_type(config, vision)
        plain = ("qwen3_5", "qwen3_6", "qwen4_exp", "intern_s2", "interns2")
        deepstack = () if family.startswith(plain) else (8, 16, 24)
        return cls(
            depth=read_size(vision, "depth", "num_hidden_layers", default=27, limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=1152),
            intermediate_size=read_size(vision, "intermediate_size", default=4304),
            num_heads=read_size(vision, "num_heads", "num_attention_heads", default=16),
            out_hidden_size=read_size(vision, "out_hidden_size", default=3584),
            num_position_embeddings=read_size(vision, "num_position_embeddings", default=2304),
            deepstack_visual_indexes=read_indices(vision, "deepstack_visual_indexes", deepstack),
            patch_size=read_size(vision, "patch_size", default=16),
            temporal_patch_size=read_size(vision, "temporal_patch_size", default=2),
            spatial_merge_size=read_size(vision, "spatial_merge_size", default=2),
            in_channels=read_size(vision, "in_channels", "in_chans", default=3),
            rope_theta=read_rope_theta(vision),
        )


class Qwen3VLEncoder(PatchEncoder):
    """Encodes packed patches to hidden states, merged tokens and DeepStack features."""

    def __init__(self, config: Qwen3VLConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Qwen3VLConfig = config
        self._preprocessor = preprocessor
        self.patch_embed = FlatPatchEmbed(
            config.hidden_size, config.patch_size, config.in_channels, config.temporal_patch_size
        )
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.merger = Merger(config, norm_after_grouping=False)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(config, norm_after_grouping=True) for _ in config.deepstack_visual_indexes
        )

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.patches import PatchPreprocessor

        config = self.config
        sizes = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        return PatchPreprocessor.published("qwen3_vl", *sizes)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to N tokens.

        Returns:
            ``last_hidden_state`` [P, D], ``pooler_output`` [N, out], and ``deepstack_features``, a
            tuple of [N, out] with one entry per DeepStack block.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        stacked = self.config.deepstack_visual_indexes
        deepstack: list[Tensor] = []
        steps = self.steps(self.blocks, hidden, metadata, read_after=stacked)
        for number, block in enumerate(steps):
            hidden = block(hidden)
            if number in stacked:
                merger = self.deepstack_merger_list[stacked.index(number)]
                deepstack.append(merger(hidden))
        return EncoderOutput(hidden, self.merger(hidden), tuple(deepstack))

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim], and add interpolated positions, [P, D]."""
        weight = self.patch_embed.proj.weight
        patches = self.patch_embed(self._admit_patches(pixel_values, weight, metadata))
        taps, weights = metadata["pos_embed_index"], metadata["pos_embed_weight"]
        return self._add_weighted_rows(patches, self.pos_embed, taps, weights)

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return rotary angles and positions per patch; the 2x2 patches of a token are neighbours.

        ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` are [P, head_size / 2].
        ``pos_embed_index`` int64 and ``pos_embed_weight`` [P, 4] are the rows of the
        position table that are summed for a patch, and their weights. P is ``max_input_size``, with
        padding at the end, or the number of patches of ``grids``.
        """
        dtype = torch.promote_types(self.patch_embed.proj.weight.dtype, torch.float32)
        merge, head = self.config.spatial_merge_size, self.config.head_size
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        positions = merge_order_positions(grids, merge, rows)
        side = longest_side(grids)
        cos, sin = rotary_cos_sin(positions, head, self.config.rope_theta, dtype, side)
        index, weights = position_taps(positions, grids, self.config.position_side, dtype)
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "pos_embed_index": index,
            "pos_embed_weight": weights,
        }


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: Qwen3VLConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, context: RotarySegments) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), context)
        return hidden + self.mlp(self.norm2(hidden))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return BlockParts(
            containers=(self, self.attn, self.mlp),
            norm1=self.norm1,
            qkv=self.attn.qkv,
            proj=self.attn.proj,
            norm2=self.norm2,
            up=self.mlp.linear_fc1,
            down=self.mlp.linear_fc2,
            num_heads=self.attn.num_heads,
            activation="gelu_tanh",
        )


class Attention(nn.Module):
    """Full attention inside each frame pair; fused qkv rows are [Q; K; V], head-major."""

    def __init__(self, config: Qwen3VLConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_size = config.head_size
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        qkv_T3HK = self.qkv(x).view(x.shape[0], 3, self.num_heads, self.head_size)
        q_THK, k_THK = rotate(qkv_T3HK[:, :2], context.cos, context.sin).unbind(1)
        offsets, longest = context.cu_seqlens, context.max_seqlen
        v_THK = qkv_T3HK[:, 2]
        out_THK = attention(q_THK, k_THK, v_THK, offsets, longest, padding=context.padding)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """Two linear layers with tanh-approximated GELU between them."""

    def __init__(self, config: Qwen3VLConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class Merger(nn.Module):
    """Joins four neighbouring patches to a token; normalises patches or (DeepStack) the token."""

    def __init__(self, config: Qwen3VLConfig, *, norm_after_grouping: bool) -> None:
        super().__init__()
        self.group = config.spatial_merge_size**2
        self.norm_after_grouping = norm_after_grouping
        width = config.hidden_size * self.group
        self.norm = nn.LayerNorm(width if norm_after_grouping else config.hidden_size, eps=1e-6)
        self.linear_fc1 = nn.Linear(width, width)
        self.linear_fc2 = nn.Linear(width, config.out_hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.norm_after_grouping:
            x = self.norm(hidden.view(-1, self.group * hidden.shape[-1]))
        else:
            x = self.norm(hidden).view(-1, self.group * hidden.shape[-1])
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


def position_taps(
    positions: Tensor, grids: Sequence[Grid], side: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the four rows of the position table around each patch, and their bilinear weights.

    The corners of the grid map to the corners of the table (``align_corners=True``).

    Args:
        positions: row and column of each patch, int64 [rows, 2]; padding may follow the patches.
        grids: ``(t, h, w)`` per item, in patches.
        side: rows and columns of the position table.
        dtype: dtype of the weights.

    Returns:
        Row numbers int64 [rows, 4] in the order (r, c), (r, c+1), (r+1, c), (r+1, c+1), and weights
        [rows, 4] in ``dtype``; both are 0 beyond the patches.
    """
    index = torch.zeros(len(positions), 4, dtype=torch.int64, device="cpu")
    weight = torch.zeros(len(positions), 4, dtype=dtype, device="cpu")
    if not grids:
        return index, weight
    # The taps of all lengths lie in one table, in which each patch looks up its row and column.
    lengths = sorted({length for _, h, w in grids for length in (h, w)})
    starts = dict(zip(lengths, accumulate(lengths[:-1], initial=0), strict=True))
    entries, weights = map(
        torch.cat, zip(*(_axis_taps(n, side, dtype) for n in lengths), strict=True)
    )
    counts = torch.tensor([t * h * w for t, h, w in grids], device="cpu")
    first = torch.tensor([(starts[h], starts[w]) for _, h, w in grids], device="cpu")
    count = int(counts.sum())
    places = positions[:count] + first.repeat_interleave(counts, 0, output_size=count)
    row, column = places.unbind(1)
    index[:count] = F.embedding(row, (entries * side).repeat_interleave(2, 1))
    index[:count] += F.embedding(column, entries.repeat(1, 2))
    weight[:count] = F.embedding(row, weights.repeat_interleave(2, 1))
    weight[:count] *= F.embedding(column, weights.repeat(1, 2))
    return index, weight


def _axis_taps(length: int, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the two entries around each of ``length`` positions, int64 [length, 2], and weights.

    The entries are those of an axis of ``side`` entries, whose ends are the first and the last
    position; the weights are [length, 2] in ``dtype``.
    """
    spacing = torch.tensor((side - 1) / max(length - 1, 1), dtype=dtype, device="cpu")
    coordinates = torch.arange(length, dtype=dtype, device="cpu") * spacing
    low = coordinates.to(torch.int64)
    fraction = coordinates - low
    entries = torch.stack((low, (low + 1).clamp(max=side - 1)), 1)
    return entries, torch.stack((1 - fraction, fraction), 1)
