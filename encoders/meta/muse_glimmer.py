"""The vision tower of Muse-Glimmer and Muse-Spark, with their projector.

A pre-norm ViT over packed patches of any image size: a learned table of positions, interpolated,
and 2D rotary positions, a norm before the blocks, and attention inside windows of 32x32 patches
except in every fourth block and the last, which see the whole frame pair. After the last norm, 2x2
patches become one token, and a projector takes it to the language model's width.

Source: ``MuseGlimmerVisionModel``, ``MuseGlimmerVisionAdapter`` and ``MuseGlimmerModel`` of
transformers 5.24.0, and ``MuseSparkModel``, whose tower is the same.
Repo ids: meta-models/Muse-Glimmer-30B, meta-models/Muse-Spark-Open-816B-A42B.

Shapes: P patches row by row (T = P rows of attention), N = P/4 tokens, D width, H heads, K head
size, S segments, W windows.

Deliberate differences:

- ``last_hidden_state`` is the output of the last block, before the last norm, in input order.
- Positions are added to patches in float32 or wider and rounded once.
- The rotation multiplies in float32 and rounds to the tower's dtype once.
- The table of positions is read as in transformers 5.24.0: a grid of h rows and w columns takes the
  entries of a grid of w rows and h columns, one after the other. Before 5.24, transformers did not
  exchange the two, as vLLM 0.32 does not; for square images all agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import RasterEncoder, merge_order, merge_order_positions
from ..block_parts import BlockParts, plain_parts
from ..data import EncoderItemSpec, EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.rotary import rotary_cos_sin, rotate
from ..layers.segments import RotarySegments, padded_offsets
from ..layers.windows import window_order

if TYPE_CHECKING:
    from ..contract import Preprocessor

_BLOCK_EPS = 1e-5
"""The epsilon of the norms of blocks, which no config changes."""
_KINDS = ("window_attention", "full_attention")


@dataclass(frozen=True)
class MuseGlimmerConfig:
    """Sizes of tower and projector; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    full_blocks: tuple[int, ...]
    """The numbers of the blocks that attend to the whole frame pair; others stay in windows."""
    projector_size: int
    """Width of the inner layers of the projector."""
    out_hidden_size: int
    position_side: int = 32
    """Rows and columns of the table of positions, and of a window in patches."""
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    layer_norm_eps: float = 1e-5
    out_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("head size", self.head_size, "rotary axes * 2", 4)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: frames * channels * height * width of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """The width of the patches of a token side by side."""
        return self.hidden_size * self.spatial_merge_size**2

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> MuseGlimmerConfig:
        """Read the ``config.json`` of a checkpoint.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision, text = find_section(config, "vision_config"), find_section(config, "text_config")
        require_value(vision, "hidden_act", "gelu")
        require_value(config, "projector_hidden_act", "gelu")
        side = read_size(vision, "pos_emb_height", default=32, limit=1024)
        require_value(vision, "pos_emb_width", side, default=32)
        depth = read_size(vision, "num_hidden_layers", default=50, limit=1024)
        spark = str(config.get("model_type")) == "muse_spark"
        return cls(
            depth=depth,
            hidden_size=read_size(vision, "hidden_size", default=1536),
            intermediate_size=read_size(vision, "intermediate_size", default=8960),
            num_heads=read_size(vision, "num_attention_heads", default=16),
            full_blocks=_read_full_blocks(vision, depth),
            projector_size=read_size(config, "projector_hidden_size", default=4096),
            out_hidden_size=read_size(text, "hidden_size", default=8192 if spark else 6656),
            position_side=side,
            patch_size=read_size(vision, "patch_size", default=14),
            temporal_patch_size=read_size(vision, "patch_temporal", default=2, limit=64),
            spatial_merge_size=read_size(vision, "merge_size", default=2, limit=64),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-5),
            out_norm_eps=read_epsilon(text, "rms_norm_eps", default=1e-5),
            rope_theta=read_rope_theta(vision),
        )


def _read_full_blocks(vision: Mapping[str, object], depth: int) -> tuple[int, ...]:
    """Return the numbers of the blocks without windows: every fourth and the last, if not said."""
    kinds = vision.get("layer_types")
    if kinds is None:
        return tuple(n for n in range(depth) if n % 4 == 3 or n == depth - 1)
    if not isinstance(kinds, list | tuple) or len(kinds) != depth or {*kinds} - {*_KINDS}:
        raise ValueError(
            f"config field layer_types={kinds!r}: must name {' or '.join(_KINDS)} for each of the "
            f"{depth} blocks"
        )
    return tuple(n for n, kind in enumerate(kinds) if kind == "full_attention")


class MuseGlimmerEncoder(RasterEncoder):
    """Encodes packed patches of images to hidden states and projected tokens."""

    def __init__(self, config: MuseGlimmerConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: MuseGlimmerConfig = config
        self._preprocessor = preprocessor
        width = config.hidden_size
        self.patch_embed = nn.Linear(config.patch_dim, width, bias=False)
        self.pos_embed = nn.Embedding(config.position_side**2, width)
        self.ln_pre = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.blocks: nn.ModuleList = nn.ModuleList(
            Block(config, full=n in config.full_blocks) for n in range(config.depth)
        )
        self.ln_post = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.projector = Projector(config)

    def _default_preprocessor(self) -> Preprocessor:
        from .muse_glimmer_pixels import CellPreprocessor

        config = self.config
        return CellPreprocessor.muse(
            config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        )

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
        tokens = self.projector(self.ln_post(hidden)[metadata["merge_index"]])
        return EncoderOutput(self.in_input_order(hidden, metadata), tokens, ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim] with positions as normed rows [P, D], in window order."""
        pixels = self._admit_patches(pixel_values, self.patch_embed.weight, metadata)
        patches, index = self.patch_embed(pixels), metadata["pos_embed_index"]
        rows = self._add_weighted_rows(patches, self.pos_embed, index, metadata["pos_embed_weight"])
        return self.ln_pre(rows)[metadata["row_order"]]

    def in_input_order(self, rows: Tensor, metadata: Metadata) -> Tensor:
        """Return rows [P, ..] in input order, from rows in window order."""
        return rows[metadata["row_places"]]

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> Context:
        """Return the tensors that blocks read to attend over frame pairs and inside windows."""
        full = RotarySegments.of(metadata)
        offsets, longest = metadata["cu_window_seqlens"], metadata["max_window_seqlen"]
        return Context(full, full._replace(cu_seqlens=offsets, max_seqlen=longest))

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return rotary angles, positions and window offsets of packed patches.

        ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` [P, K/2] are **in window order**, in which
        a window's rows are neighbours. ``row_order`` int64 [P] is the patch at each place of the
        window order, ``row_places`` its inverse, and ``merge_index`` int64 [P] the place of each
        patch, token by token. ``pos_embed_index`` int64 and ``pos_embed_weight`` [P, 4] interpolate
        the table of positions. ``cu_window_seqlens`` is int32 [W+1], where W is
        ``max_windows_per_batch`` if given. ``max_window_seqlen`` is the rows of a full window,
        0-dim int32. P is ``max_input_size``, with padding at the end, or the patches of ``grids``.
        """
        config = self.config
        dtype = torch.promote_types(self.patch_embed.weight.dtype, torch.float32)
        merge, side = config.spatial_merge_size, config.position_side
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        order, windows = window_order(grids, 1, side, rows)
        reverse = order.argsort()
        positions = 1 + merge_order_positions(grids, 1, rows).flip(1)  # columns come first
        cos, sin = rotary_cos_sin(positions[order], config.head_size, config.rope_theta, dtype)
        index, weight = position_taps(grids, side, rows, dtype)
        cu_windows = padded_offsets(
            windows, max_windows_per_batch, "max_windows_per_batch", "windows"
        )
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "pos_embed_index": index,
            "pos_embed_weight": weight,
            "row_order": order,
            "row_places": reverse,
            "merge_index": reverse[merge_order(grids, merge, rows)],
            "cu_window_seqlens": cu_windows,
            "max_window_seqlen": torch.tensor(side**2, dtype=torch.int32, device="cpu"),
        }

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Return each item's patches, tokens, frame pairs, patches per frame pair and windows."""
        unit, side = self.config.spatial_merge_size**2, self.config.position_side
        return [
            EncoderItemSpec(n := t * h * w, n // unit, t, h * w, t * -(-h // side) * -(-w // side))
            for t, h, w in self._read(grid_thw)
        ]


class Context(NamedTuple):
    """The tensors that every block reads, for attention over frame pairs or inside windows."""

    full: RotarySegments
    windows: RotarySegments


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: MuseGlimmerConfig, *, full: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=_BLOCK_EPS)
        self.attn = Attention(config, full=full)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=_BLOCK_EPS)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), context)
        return hidden + self.mlp(self.norm2(hidden))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return plain_parts(self, "gelu")._replace(windowed=not self.attn.full)


class Attention(nn.Module):
    """Attention inside windows, or inside the frame pair if ``full``; qkv rows are [Q; K; V]."""

    def __init__(self, config: MuseGlimmerConfig, *, full: bool) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.full = full
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        cos, sin, *offsets = context.full if self.full else context.windows
        qkv_T3HK = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK = rotate(qkv_T3HK[:, :2], cos, sin).unbind(1)
        out_THK = attention(q_THK, k_THK, qkv_T3HK[:, 2], *offsets)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: MuseGlimmerConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Projector(nn.Module):
    """Turns the patches of a token into one: two layers with GELU, a projection, an RMS norm."""

    def __init__(self, config: MuseGlimmerConfig) -> None:
        super().__init__()
        self.unit, self.eps = config.spatial_merge_size**2, config.out_norm_eps
        self.fc1 = nn.Linear(config.merged_size, config.projector_size, bias=False)
        self.fc2 = nn.Linear(config.projector_size, config.projector_size, bias=False)
        self.projection = nn.Linear(config.projector_size, config.out_hidden_size, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """Return tokens [N, out] of normed patches [P, D], those of a token next to each other.

        In the input of ``fc1``, the patches of a token alternate: channel by channel.
        """
        tokens = torch.unflatten(patches, 0, (-1, self.unit)).mT.flatten(1)
        tokens = self.projection(F.gelu(self.fc2(F.gelu(self.fc1(tokens)))))
        precise = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        return F.rms_norm(precise, precise.shape[-1:], None, self.eps).to(tokens.dtype)


def position_taps(
    grids: Sequence[Grid], side: int, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the four entries of the table of positions around each patch, and their weights.

    The weights are bilinear, and 0 for entries beyond the table, so that they sum to less than 1 at
    the edges of a grid that is larger than the table. The patches of h rows and w columns take one
    by one the entries of w rows and h columns.

    Args:
        grids: ``(t, h, w)`` per item, in patches.
        side: rows and columns of the table.
        rows: rows of the results, at least the number of patches.
        dtype: dtype of the weights.

    Returns:
        Entry numbers int64 [rows, 4], and weights [rows, 4] in ``dtype``; both are 0 beyond the
        patches.
    """
    index = torch.zeros(rows, 4, dtype=torch.int64, device="cpu")
    weight = torch.zeros(rows, 4, dtype=dtype, device="cpu")
    start = 0
    for t, h, w in grids:
        (r, row_weights), (c, column_weights) = _axis_taps(w, side), _axis_taps(h, side)
        numbers = r[:, None, :, None] * side + c[None, :, None]
        weights = row_weights[:, None, :, None] * column_weights[None, :, None]
        stop = start + t * h * w
        index[start:stop] = numbers.reshape(h * w, 4).repeat(t, 1)
        weight[start:stop] = weights.reshape(h * w, 4).repeat(t, 1)
        start = stop
    return index, weight


def _axis_taps(size: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the two entries of an axis around each of ``size`` places, and weights, [size, 2]."""
    places = (torch.arange(size, dtype=torch.float64, device="cpu") + 0.5) * side / size - 0.5
    entries = places.floor()[:, None] + torch.arange(2, device="cpu")
    inside = (entries >= 0) & (entries < side)
    weights = (1 - (places[:, None] - entries).abs()) * inside
    return entries.clamp(0, side - 1).to(torch.int64), weights
