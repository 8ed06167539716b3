"""The vision tower of ERNIE-4.5-VL, with its resampler over space and time.

A pre-norm ViT over packed patches of any image size: 2D rotary positions, full attention inside
each frame, and a resampler that takes 2x2 patches of two frames to one token. For the resampler, an
image is two equal frames; the frames of a clip are paired in order.

Source: ``Ernie4_5_VLMoeVisionTransformerPretrainedModel`` and
``Ernie4_5_VLMoeVariableResolutionResamplerModel`` of transformers 5.23.0, and ``ernie45_vl.py`` of
vLLM 0.33.0 for the names in published configs.
Repo ids: baidu/ERNIE-4.5-VL-28B-A3B-{PT,Base-PT,Thinking},
baidu/ERNIE-4.5-VL-424B-A47B-{PT,Base-PT}.

Shapes: P patches in merge-block order (T = P rows of attention), G = P/4 cells of 2x2 patches of
one frame, N tokens, D width, H heads, K head size, S segments.

Deliberate differences:

- ``last_hidden_state`` is the output of the last block; transformers gives the one after the norm.
- The last frame of an odd clip is paired with itself, which is what the processor makes of it;
  transformers' resampler drops it.
- The RMS norm after the resampler rounds once, after the weight; transformers rounds before it too.
- The rotation multiplies in float32 and rounds to the tower's dtype once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import PatchEncoder, merge_order_positions
from ..block_parts import BlockParts, plain_parts
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_ratio,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.rotary import rotary_cos_sin, rotate
from ..layers.segments import RotarySegments
from .frame_pairs import frame_pairs

if TYPE_CHECKING:
    from ..contract import Preprocessor

PAIR = 2
"""The number of consecutive frames of a clip that become one set of tokens."""


@dataclass(frozen=True)
class Ernie4_5VLConfig:
    """Sizes of tower and resampler; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int = 14
    spatial_merge_size: int = 2
    in_channels: int = 3
    layer_norm_eps: float = 1e-6
    rms_norm_eps: float = 1e-5
    """The epsilon of the norm after the resampler, the same as in the language model."""
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
        """The size of a row of ``pixel_values``: channels * height * width of a patch."""
        return self.in_channels * self.patch_size**2

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Ernie4_5VLConfig:
        """Read the ``config.json`` of a checkpoint, with Baidu's or transformers' field names.

        Raises:
            ValueError: an unsupported config value, sizes that disagree, or the vision section
                alone, which lacks the width of the language model.
        """
        vision = find_section(config, "vision_config")
        # Baidu's configs have the fields of the language model at the top.
        language = find_section(config, "text_config") if vision is not config else {}
        width = read_size(vision, "embed_dim", "hidden_size", default=1280)
        merge = read_size(vision, "spatial_merge_size", default=2)
        require_value(vision, "hidden_act", "quick_gelu")
        require_value(vision, "temporal_merge_size", PAIR)
        require_value(config, "temporal_conv_size", PAIR)
        require_value(config, "spatial_conv_size", merge)
        require_value(config, "use_temporal_conv", True)
        require_value(config, "pixel_hidden_size", width)
        ratio = read_ratio(vision, "mlp_ratio", default=4)
        return cls(
            depth=read_size(vision, "depth", "num_hidden_layers", default=32, limit=1024),
            hidden_size=width,
            intermediate_size=read_size(vision, "intermediate_size", default=int(width * ratio)),
            num_heads=read_size(vision, "num_heads", "num_attention_heads", default=16),
            out_hidden_size=read_size(language, "hidden_size"),
            patch_size=read_size(vision, "patch_size", "spatial_patch_size", default=14),
            spatial_merge_size=merge,
            in_channels=read_size(vision, "in_channels", "in_chans", default=3),
            layer_norm_eps=read_epsilon(vision, "rms_norm_eps", default=1e-6),
            rms_norm_eps=read_epsilon(language, "rms_norm_eps", default=1e-5),
            rope_theta=read_rope_theta(vision),
        )


class Ernie4_5VLEncoder(PatchEncoder):
    """Encodes packed patches to hidden states, and to one token per 2x2 patches of two frames."""

    _token_frames = PAIR

    def __init__(self, config: Ernie4_5VLConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Ernie4_5VLConfig = config
        self._preprocessor = preprocessor
        self.patch_embed = PatchEmbed(config)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.resampler = Resampler(config)

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.patches import PatchPreprocessor

        config = self.config
        return PatchPreprocessor.published("ernie", config.patch_size, config.spatial_merge_size)

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
        tokens = self.resampler(self.ln(hidden), metadata["pair_index"])
        return EncoderOutput(hidden, tokens, ())

    @property
    def _pixel_weight(self) -> Tensor:
        return self.ln.weight

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim] as rows [P, D]."""
        patches = self._admit_patches(pixel_values, self._pixel_weight, metadata)
        return self.patch_embed(patches)

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return rotary angles in merge-block order, and the two cells (2x2 patches) of each token.

        ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` are [P, head_size / 2]; ``pair_index``
        int64 [N, 2], or [G, 2] with ``max_input_size``, since images have a token per cell. P is
        ``max_input_size``, with padding at the end, or the number of patches of ``grids``.
        """
        dtype = torch.promote_types(self.ln.weight.dtype, torch.float32)
        merge, head = self.config.spatial_merge_size, self.config.head_size
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        cos, sin = rotary_cos_sin(
            merge_order_positions(grids, merge, rows), head, self.config.rope_theta, dtype
        )
        tokens = rows // merge**2
        if max_input_size is None:
            tokens = sum(spec.output_tokens for spec in self.item_specs(grids))
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "pair_index": frame_pairs(grids, merge, tokens),
        }


class PatchEmbed(nn.Module):
    """A linear layer over the pixels of a patch."""

    def __init__(self, config: Ernie4_5VLConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.patch_dim, config.hidden_size, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: Ernie4_5VLConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, context: RotarySegments) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), context)
        return hidden + self.mlp(self.norm2(hidden))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return plain_parts(self, "quick_gelu")


class Attention(nn.Module):
    """Full attention inside each frame; fused qkv rows are [Q; K; V], head-major."""

    def __init__(self, config: Ernie4_5VLConfig) -> None:
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
    """Two linear layers with quick GELU, ``x * sigmoid(1.702 x)``, between them."""

    def __init__(self, config: Ernie4_5VLConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x))


class Resampler(nn.Module):
    """Turns 2x2 patches into a cell, two cells into a token, and a token into the output width."""

    def __init__(self, config: Ernie4_5VLConfig) -> None:
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.spatial_linear = Merge(self.width, self.width, config.layer_norm_eps)
        self.temporal_linear = Merge(PAIR * self.width, self.width, config.layer_norm_eps)
        self.mlp = nn.Linear(self.width, config.out_hidden_size)
        self.after_norm = nn.RMSNorm(config.out_hidden_size, eps=config.rms_norm_eps)

    def forward(self, patches: Tensor, pair_index: Tensor) -> Tensor:
        """Merge patches [P, D] to tokens [N, out]; a token is two cells of 2x2 patches each."""
        cells = self.spatial_linear(patches.view(-1, self.width))
        tokens = self.temporal_linear(cells[pair_index].flatten(1))
        return self.after_norm(self.mlp(tokens))


class Merge(nn.Module):
    """Two linear layers with GELU between them, and a norm."""

    def __init__(self, width: int, out: int, eps: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, out)
        self.fc2 = nn.Linear(out, out)
        self.ln = nn.LayerNorm(out, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(self.fc2(F.gelu(self.fc1(x))))
