"""MoonViT, the vision tower of Kimi-VL, and MoonViT-3D, that of Kimi-K2.5, K2.6 and K3.

A pre-norm ViT over packed patches of any image size: a learned 64x64 position table interpolated
bicubically to the grid, 2D rotary positions, layer norms, full attention inside each image, and a
projector that takes 2x2 patches to one token. MoonViT-3D takes up to four frames of a clip as one
segment: their patches attend to each other, patches get a sinusoidal embedding of the frame's
number, and the frames are averaged after the last norm. Kimi-K3's tower has RMS norms, no biases,
bilinear interpolation of the table, heads that are wider together than the tower, and a projector
whose norm comes last.

Source: ``Kimi_K25VisionModel`` and ``Kimi_K25MultimodalProjection`` of transformers 5.23.0,
``moonvit.py`` of vLLM 0.33.0, whose tower of Kimi-VL is the same for images, and
``kimi_k25_vit.py`` there for Kimi-K3.
Repo ids: moonshotai/Kimi-VL-A3B-{Instruct,Thinking,Thinking-2506}, moonshotai/Kimi-K2.{5,6},
moonshotai/Kimi-K3.

Shapes: P patches row by row, N tokens, D width, H heads, K head size, S segments, F frames,
T packed rows of a block.

Deliberate differences:

- ``last_hidden_state`` is the output of the last block, before the final norm.
- An item is a whole clip of t frames, split into segments of four; its tokens are the tokens
  of the segments in order. transformers takes one item per segment, which works here, too.
- Clips of different lengths share a call; transformers raises for them.
- The patch embedding is a Linear over the stored Conv2d weight, the same sums. A layer with LoRA or
  hooks is called as a module instead.
- Positions in space and time are added to patches in float32 or wider and rounded once, and so is
  the mean over frames.
- The rotation multiplies in float32 and rounds to the tower's dtype once.
- Kimi-K3's norms, which name no epsilon, have float32's in every dtype, 1.19e-7, as torch takes it
  for bfloat16, float16 and float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import RasterEncoder, merge_order_positions
from ..block_parts import BlockParts, plain_parts
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_choice,
    read_epsilon,
    read_flag,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.products import FlatPatchEmbed
from ..layers.rotary import rotate_pairs
from ..layers.segments import RotarySegments
from ..layers.table_taps import bilinear_taps, frame_rows, frame_table, grid_taps, pooled_rows

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class MoonViTConfig:
    """Sizes of tower and projector; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    segment_frames: int
    """The most frames of a clip that attend to each other and become one set of tokens; 1 in
    Kimi-VL, which takes only images."""
    position_side: int = 64
    """The number of rows, and of columns, of the learned table of positions."""
    qkv_hidden_size: int | None = None
    """The width of all heads together; None: that of the tower."""
    rms_norm: bool = False
    """Whether the norms of the tower are RMS norms, as in Kimi-K3, and not layer norms."""
    bias: bool = True
    """Whether linear layers of tower and projector have biases."""
    bilinear: bool = False
    """Whether the table of positions is interpolated bilinearly, and not bicubically."""
    norm_last: bool = False
    """Whether the projector normalises its tokens (RMS), and not the patches before it."""
    patch_size: int = 14
    spatial_merge_size: int = 2
    in_channels: int = 3
    projector_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        own_heads = {} if self.qkv_hidden_size is None else {"head_size": self.head_size}
        require_sizes({**vars(self), **own_heads})
        require_divisible("qkv_hidden_size", self.heads_width, "num_heads", self.num_heads)
        require_divisible("head size", self.head_size, "rotary axes * 2", 4)

    @property
    def heads_width(self) -> int:
        """The width of all heads together."""
        return self.qkv_hidden_size or self.hidden_size

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.heads_width // max(self.num_heads, 1)

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: channels * height * width of a patch."""
        return self.in_channels * self.patch_size**2

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> MoonViTConfig:
        """Read the ``config.json`` of a checkpoint, with Moonshot's or transformers' names.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        language = find_section(config, "text_config")
        types = (vision.get("model_type"), config.get("model_type"))
        third = bool({"kimi_k3", "kimi_k3_vision"}.intersection(types))
        flat = bool({"moonvit", "kimi_vl"}.intersection(types))
        usual = _K3 if third else _K2_5
        width = read_size(vision, "vt_hidden_size", "hidden_size", default=usual["hidden_size"])
        heads_width = read_size(vision, "qkv_hidden_size", default=1536 if third else width)
        side = read_size(vision, "init_pos_emb_height", "pos_emb_height", default=64)
        bias = read_flag(vision, "linear_bias", default=not third)
        _require_supported(vision, width, side, bias)
        require_value(config, "projection_hidden_size", width, None)
        usual_frames = 4 if any(types) else 1  # Kimi-VL's configs state none
        frames = read_size(
            vision, "init_pos_emb_time", "pos_emb_time", default=usual_frames, limit=64
        )
        eps = read_epsilon(vision, "projector_ln_eps", default=1e-5)
        return cls(
            depth=read_size(
                vision, "vt_num_hidden_layers", "num_hidden_layers", default=27, limit=1024
            ),
            hidden_size=width,
            intermediate_size=read_size(
                *(vision, "vt_intermediate_size", "intermediate_size"),
                default=usual["intermediate_size"],
            ),
            num_heads=read_size(
                *(vision, "vt_num_attention_heads", "num_attention_heads"),
                default=usual["num_heads"],
            ),
            out_hidden_size=read_size(language, "hidden_size"),
            segment_frames=1 if flat else frames,
            position_side=side,
            qkv_hidden_size=None if heads_width == width else heads_width,
            rms_norm=_says(vision, "norm_type", "layernorm", "rmsnorm", third),
            bias=bias,
            bilinear=_says(vision, "pos_emb_interpolation_mode", "bicubic", "bilinear", third),
            norm_last=_says(vision, "mm_projector_type", "patchmerger", "patchmergerv2", third),
            patch_size=read_size(vision, "patch_size", default=14),
            spatial_merge_size=read_size(vision, "merge_kernel_size", default=2),
            projector_norm_eps=read_epsilon(config, "projection_layer_norm_eps", default=eps),
            rope_theta=read_rope_theta(vision),
        )


_K2_5 = {"hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
_K3 = {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 12}
"""The sizes of Kimi-K3 where its config leaves them out; ``_K2_5`` has those of the others."""


def _require_supported(vision: Mapping[str, object], width: int, side: int, bias: bool) -> None:
    """Raise a ValueError if a field of the vision section has a value that is not implemented.

    Args:
        vision: the section.
        width: the width of the tower.
        side: the number of rows of the table of positions.
        bias: whether the linear layers have biases.
    """
    for name in ("init_pos_emb_width", "pos_emb_width"):
        require_value(vision, name, side)
    for name in ("hidden_act", "activation_func"):
        require_value(vision, name, "gelu_pytorch_tanh")
    require_value(vision, "pos_emb_type", "divided_fixed")
    require_value(vision, "mlp_type", "mlp2")
    require_value(vision, "video_attn_type", "spatial_temporal")
    require_value(vision, "merge_type", "sd2_tpool")
    require_value(vision, "projector_hidden_act", "gelu")
    require_value(vision, "mm_hidden_size", width, None)
    for name in ("attn_bias", "patch_embed_proj_bias"):
        require_value(vision, name, bias)


def _says(section: Mapping[str, object], name: str, no: str, yes: str, default: bool) -> bool:
    """Return whether the field ``name`` is ``yes``, not ``no``; ``default`` if it is missing."""
    return read_choice(section, name, no, yes, default=yes if default else no) == yes


class MoonViTEncoder(RasterEncoder):
    """Encodes packed patches of images to hidden states and projected tokens."""

    def __init__(self, config: MoonViTConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: MoonViTConfig = config
        self._preprocessor = preprocessor
        self._segment_frames = self._token_frames = config.segment_frames
        self.patch_embed = FlatPatchEmbed(
            config.hidden_size, config.patch_size, config.in_channels, bias=config.bias
        )
        self.pos_embed = nn.Embedding(config.position_side**2, config.hidden_size)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = make_norm(config)
        self.projector = Projector(config)

    def _default_preprocessor(self) -> Preprocessor:
        from .moonvit_pixels import NavitPreprocessor

        sizes = self.config.patch_size, self.config.spatial_merge_size, self.config.segment_frames
        return NavitPreprocessor.kimi(*sizes, third=self.config.norm_last)

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
        return EncoderOutput(hidden, self.projector(self._mean_over_time(hidden, metadata)), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim], and add positions in time and space, [P, D]."""
        weight = self.patch_embed.proj.weight
        patches = self.patch_embed(self._admit_patches(pixel_values, weight, metadata))
        timed = patches + metadata["frame_table"][metadata["frame_index"]]
        taps, weights = metadata["pos_embed_index"], metadata["pos_embed_weight"]
        return self._add_weighted_rows(timed, self.pos_embed, taps, weights).to(patches.dtype)

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> RotarySegments:
        """Return the tensors that all blocks read: rotary angles, offsets of segments, padding."""
        return RotarySegments.of(metadata, repeated=False)

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the metadata tensors of the packed patches of images and clips, by name.

        ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` are [P, head_size / 2].
        ``pos_embed_index`` int64 and ``pos_embed_weight`` [P, 16], [P, 4] if bilinear, interpolate
        the learned position table, ``frame_index`` int64 [P] is a patch's row of ``frame_table``
        [F+1, D] for F frames.
        ``merge_index`` int64 and ``merge_weight`` [N*4, F] average N tokens over time. P is
        ``max_input_size``, with padding at the end, or the number of patches of ``grids``.
        """
        dtype = torch.promote_types(self.patch_embed.proj.weight.dtype, torch.float32)
        merge, max_frames = self.config.spatial_merge_size, self.config.segment_frames
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        positions = merge_order_positions(grids, 1, rows)
        cos, sin = rotary_cos_sin(positions, self.config.head_size, self.config.rope_theta, dtype)
        taps = bilinear_taps if self.config.bilinear else grid_taps
        index, weight = taps(positions, grids, self.config.position_side, dtype)
        if max_input_size is None:
            rows = sum(h * w for _, h, w in grids)
            max_frames = max((frames for frames, _, _ in grids), default=1)
        merge_index, merge_weight = pooled_rows(grids, merge, max_frames, rows, dtype)
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "pos_embed_index": index,
            "pos_embed_weight": weight,
            "frame_index": frame_rows(grids, len(positions)),
            "frame_table": frame_table(self.config.segment_frames, self.config.hidden_size, dtype),
            "merge_index": merge_index,
            "merge_weight": merge_weight,
        }

    def _mean_over_time(self, hidden: Tensor, metadata: Metadata) -> Tensor:
        """Normalise patches [P, D], average them over a segment's frames: 4 per token, [N*4, D]."""
        normed, index, weight = self.norm(hidden), metadata["merge_index"], metadata["merge_weight"]
        total: Tensor = normed[index[:, 0]] * weight[:, :1]
        for frame in range(1, index.shape[1]):
            total = torch.addcmul(total, normed[index[:, frame]], weight[:, frame, None])
        return total.to(normed.dtype)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.norm1 = make_norm(config)
        self.attn = Attention(config)
        self.norm2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, context: RotarySegments) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), context)
        return hidden + self.mlp(self.norm2(hidden))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return plain_parts(self, "gelu_tanh")._replace(rotary_pair_distance=1)


class Attention(nn.Module):
    """Full attention inside each segment, up to four frames; fused qkv is [Q; K; V], head-major."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.heads_width, bias=config.bias)
        self.proj = nn.Linear(config.heads_width, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        qkv_T3HK = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK = rotate_pairs(qkv_T3HK[:, :2], context.cos, context.sin).unbind(1)
        offsets, longest = context.cu_seqlens, context.max_seqlen
        v_THK = qkv_T3HK[:, 2]
        out_THK = attention(q_THK, k_THK, v_THK, offsets, longest, padding=context.padding)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """Two linear layers with the tanh form of GELU between them."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Projector(nn.Module):
    """Projects the 2x2 patches of a token, normalised before; or after, as a token."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.merged_width = width = config.hidden_size * config.spatial_merge_size**2
        eps, out = config.projector_norm_eps, config.out_hidden_size
        last = config.norm_last
        self.pre_norm = nn.Identity() if last else nn.LayerNorm(config.hidden_size, eps=eps)
        self.linear_1 = nn.Linear(width, width, bias=config.bias)
        self.linear_2 = nn.Linear(width, out, bias=config.bias)
        self.post_norm = nn.RMSNorm(out, eps=eps) if last else nn.Identity()

    def forward(self, patches: Tensor) -> Tensor:
        tokens = self.pre_norm(patches).view(-1, self.merged_width)
        return self.post_norm(self.linear_2(F.gelu(self.linear_1(tokens))))


def make_norm(config: MoonViTConfig) -> nn.LayerNorm | nn.RMSNorm:
    """Make a norm of patches, of the kind that a config says."""
    if config.rms_norm:
        return nn.RMSNorm(config.hidden_size, eps=torch.finfo(torch.float32).eps)
    return nn.LayerNorm(config.hidden_size, eps=1e-5)


def rotary_cos_sin(
    positions: Tensor, head_size: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [P, K/2] of the 2D rotary angles of ``positions`` [P, 2], (row, column).

    Angles by column and by row alternate; K is ``head_size``, ``theta`` the base.
    """
    exponents = torch.arange(0, head_size, 4, dtype=dtype, device=positions.device)
    turns = theta ** (exponents / head_size)
    angles = (positions.flip(1)[:, None].to(dtype) / turns[:, None]).flatten(1)
    return angles.cos(), angles.sin()
