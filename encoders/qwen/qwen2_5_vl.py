"""The vision tower of Qwen2.5-VL, Qwen2.5-Omni and EXAONE-4.5.

A pre-norm ViT over packed patches of any image size: 2D rotary positions, RMS norms, SwiGLU, and
attention inside windows of 8x8 patches except in four blocks that see the whole frame pair. In
EXAONE-4.5, groups of query heads share one key and value head (grouped-query attention).

Source: ``Qwen2_5_VisionTransformerPretrainedModel`` and ``Exaone4_5_VisionModel`` of transformers
5.23.0.
Repo ids: Qwen/Qwen2.5-VL-{3B,7B,32B,72B}-Instruct, Qwen/Qwen2.5-Omni-{3B,7B},
LGAI-EXAONE/EXAONE-4.5-33B.

Shapes: P patches in merge-block order (T = P rows of attention), N = P/4 tokens, D width, H heads,
K head size, S segments, W windows.

Deliberate differences:

- ``last_hidden_state`` is in input order; transformers leaves it in window order.
- The patch embedding is a Linear over the stored Conv3d weight, which makes the same sums faster
  (``patch_product`` has times). A layer with LoRA or hooks is called as a module instead.
- RMS norms round once, after the weight; transformers rounds before it too.
- The rotation multiplies in float32 and rounds to the tower's dtype once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import PatchEncoder, longest_side, merge_order_positions
from ..block_parts import BlockParts
from ..data import EncoderItemSpec, EncoderOutput, Grid, GridLike, Metadata
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
from ..layers.segments import RotarySegments, padded_offsets
from ..layers.windows import window_order

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class Qwen2_5VLConfig:
    """Sizes of a vision tower; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    fullatt_block_indexes: tuple[int, ...]
    window_size: int = 112
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    num_key_value_heads: int = 0
    """Heads of keys and values, each shared by a group of query heads; 0 means ``num_heads``."""
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        shared = self.num_key_value_heads or self.num_heads
        object.__setattr__(self, "num_key_value_heads", shared)
        require_sizes(vars(self))
        require_divisible("num_heads", self.num_heads, "num_key_value_heads", shared)
        require_divisible("head size", self.head_size, "rotary axes * 2", 4)
        token = self.patch_size * self.spatial_merge_size
        require_divisible("window_size", self.window_size, "a token's side", token)

    @property
    def window_side(self) -> int:
        """The side of an attention window in tokens (2x2 patches); 4 means 8x8 patches."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    @property
    def window_rows(self) -> int:
        """Number of patches in a full window."""
        return (self.window_side * self.spatial_merge_size) ** 2

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: channels * frames * height * width of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Qwen2_5VLConfig:
        """Read the ``config.json`` of a checkpoint, the whole or only its vision section.

        Raises:
            ValueError: a missing width (defaults of transformers make no valid tower), a value that
                is not implemented, or sizes that disagree.
        """
        vision = find_section(config, "vision_config", "thinker_config.vision_config")
        require_value(vision, "hidden_act", "silu")
        heads = read_size(vision, "num_heads", "num_attention_heads", default=16)
        grouped = find_type(config, vision).startswith("exaone4_5")
        shared = read_size(vision, "num_key_value_heads", default=8 if grouped else heads)
        return cls(
            depth=read_size(vision, "depth", "num_hidden_layers", default=32, limit=1024),
            hidden_size=read_size(vision, "hidden_size"),
            intermediate_size=read_size(vision, "intermediate_size"),
            num_heads=heads,
            out_hidden_size=read_size(vision, "out_hidden_size"),
            fullatt_block_indexes=read_indices(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
            window_size=read_size(vision, "window_size", default=112),
            patch_size=read_size(vision, "patch_size", "spatial_patch_size", default=14),
            temporal_patch_size=read_size(vision, "temporal_patch_size", default=2),
            spatial_merge_size=read_size(vision, "spatial_merge_size", default=2),
            in_channels=read_size(vision, "in_channels", "in_chans", default=3),
            rope_theta=read_rope_theta(vision),
            num_key_value_heads=shared,
        )


class Qwen2_5VLEncoder(PatchEncoder):
    """Encodes packed patches of images to hidden states and merged tokens."""

    def __init__(self, config: Qwen2_5VLConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Qwen2_5VLConfig = config
        self._preprocessor = preprocessor
        side, channels, frames = config.patch_size, config.in_channels, config.temporal_patch_size
        self.patch_embed = FlatPatchEmbed(config.hidden_size, side, channels, frames, bias=False)
        self.blocks: nn.ModuleList = nn.ModuleList(
            Block(config, full=n in config.fullatt_block_indexes) for n in range(config.depth)
        )
        self.merger = Merger(config)

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.patches import PatchPreprocessor

        config = self.config
        sizes = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        return PatchPreprocessor.published("qwen2_vl", *sizes)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to N tokens.

        Returns:
            ``last_hidden_state`` [P, D], ``pooler_output`` [N, out], no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        tokens = self.merger(hidden)[metadata["reverse_index"]]
        return EncoderOutput(self.in_input_order(hidden, metadata), tokens, ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim] as rows [P, D] in window order."""
        weight = self.patch_embed.proj.weight
        patches = self.patch_embed(self._admit_patches(pixel_values, weight, metadata))
        return self._reorder(patches, metadata["window_index"])

    def in_input_order(self, rows: Tensor, metadata: Metadata) -> Tensor:
        """Return rows [P, ..] in input order, from rows in window order."""
        return self._reorder(rows, metadata["reverse_index"])

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> Context:
        """Return the tensors that blocks read to attend over frame pairs and inside windows."""
        full = RotarySegments.of(metadata)
        offsets, longest = metadata["cu_window_seqlens"], metadata["max_window_seqlen"]
        return Context(full, full._replace(cu_seqlens=offsets, max_seqlen=longest))

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return rotary angles and window offsets; in window order, a window's rows are neighbours.

        ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` [P, K/2] are **in window order**.
        ``window_index`` int64 [N] is the token at each place of the window order, and
        ``reverse_index`` its inverse. ``cu_window_seqlens`` is int32 [W+1], where W is
        ``max_windows_per_batch`` if given. ``max_window_seqlen`` is the rows of a full window,
        0-dim int32. P is ``max_input_size``, with padding at the end, or the patches of ``grids``.
        """
        dtype = torch.promote_types(self.patch_embed.proj.weight.dtype, torch.float32)
        merge, head = self.config.spatial_merge_size, self.config.head_size
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        index, windows = window_order(grids, merge, self.config.window_side, rows // merge**2)
        positions = self._reorder(merge_order_positions(grids, merge, rows), index)
        side = longest_side(grids)
        cos, sin = rotary_cos_sin(positions, head, self.config.rope_theta, dtype, side)
        capacity, longest = max_windows_per_batch, self.config.window_rows
        cu_windows = padded_offsets(windows, capacity, "max_windows_per_batch", "windows")
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "window_index": index,
            "reverse_index": index.argsort(),
            "cu_window_seqlens": cu_windows,
            "max_window_seqlen": torch.tensor(longest, dtype=torch.int32, device="cpu"),
        }

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Return each item's patches, tokens, frame pairs, patches per frame pair and windows."""
        unit, side = self.config.spatial_merge_size**2, math.isqrt(self.config.window_rows)
        return [
            EncoderItemSpec(n := t * h * w, n // unit, t, h * w, t * -(-h // side) * -(-w // side))
            for t, h, w in self._read(grid_thw)
        ]

    def _reorder(self, rows: Tensor, index: Tensor) -> Tensor:
        """Permute rows [P, ..]: row group i of the result is row group ``index[i]`` of ``rows``; a
        group is the 4 rows of one token."""
        groups = torch.unflatten(rows, 0, (-1, self.config.spatial_merge_size**2))
        return groups[index].flatten(0, 1)


class Context(NamedTuple):
    """The tensors that every block reads, for attention over frame pairs or inside windows."""

    full: RotarySegments
    windows: RotarySegments


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: Qwen2_5VLConfig, *, full: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attn = Attention(config, full=full)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
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
            gate=self.mlp.gate_proj,
            up=self.mlp.up_proj,
            down=self.mlp.down_proj,
            num_heads=self.attn.num_heads,
            num_key_value_heads=self.attn.num_key_value_heads,
            activation="silu",
            windowed=not self.attn.full,
        )


class Attention(nn.Module):
    """Attention inside windows, or inside the frame pair if ``full``; qkv rows are [Q; K; V].

    ``group`` neighbouring query heads read the same head of keys and values.
    """

    def __init__(self, config: Qwen2_5VLConfig, *, full: bool) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_size = config.head_size
        self.group = self.num_heads // self.num_key_value_heads
        self.full = full
        heads = self.num_heads + 2 * self.num_key_value_heads
        self.qkv = nn.Linear(config.hidden_size, heads * self.head_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        heads, shared = self.num_heads, self.num_key_value_heads
        qkv_T1HK = self.qkv(x).view(x.shape[0], 1, heads + 2 * shared, self.head_size)
        cos, sin, *offsets = context.full if self.full else context.windows
        turned_THK = rotate(qkv_T1HK[:, :, : heads + shared], cos, sin).squeeze(1)
        q_THK, k_THK = turned_THK.split((heads, shared), 1)
        v_THK = qkv_T1HK[:, 0, heads + shared :]
        if self.group > 1:
            k_THK, v_THK = (part.repeat_interleave(self.group, 1) for part in (k_THK, v_THK))
        out_THK = attention(q_THK, k_THK, v_THK, *offsets)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``, with biases."""

    def __init__(self, config: Qwen2_5VLConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Merger(nn.Module):
    """Normalises each patch and turns four neighbouring patches into one token."""

    def __init__(self, config: Qwen2_5VLConfig) -> None:
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(self.width, self.width),
            nn.GELU(),
            nn.Linear(self.width, config.out_hidden_size),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(self.ln_q(hidden).view(-1, self.width))
