"""The vision tower of Pixtral, Mistral-Small-3.1 and 3.2, Ministral-3 and LightOnOCR.

A pre-norm ViT over packed patches of any image size: 2D rotary positions, RMS norms, gated MLPs,
full attention inside each image, and a projector into the language model's width. All but Pixtral
merge 2x2 patches into one token first.

Source: ``PixtralVisionModel``, ``Mistral3MultiModalProjector``, ``LightOnOcrMultiModalProjector``
and ``LlavaMultiModalProjector`` of transformers 5.23.0.
Repo ids: mistral-community/pixtral-12b, mistralai/Mistral-Small-3.{1,2}-24B-Instruct-{2503,2506},
mistralai/Ministral-3-{3B,8B,14B}-Instruct-2512, lightonai/LightOnOCR-1B-1025.

Shapes: P patches in merge-block order (T = P rows of attention), N tokens, D width, H heads, K head
size, S segments.

Deliberate differences:

- Patches come in merge-block order: the patches of a token are neighbours. transformers takes
  images padded to one size and has patches in raster order. Tokens are in raster order in both.
- The patch embedding is a Linear over the stored Conv2d weight, the same sums. A layer with LoRA or
  hooks is called as a module instead.
- RMS norms round once, after the weight; transformers rounds before it too.
- The rotation multiplies in float32 and rounds to the tower's dtype once; transformers rounds
  cosines and sines to the tower's dtype first.
- Attention never sees other images; transformers masks them out of one matrix over all patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.checks import check_input_size
from ..base.patch_encoder import PatchEncoder, merge_order_positions
from ..block_parts import BlockParts
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
from ..layers.rotary import rotate
from ..layers.segments import RotarySegments

if TYPE_CHECKING:
    from ..contract import Preprocessor

_NORM_EPS = {"mistral": 1e-6, "ministral3": 1e-5, "qwen3": 1e-6}
"""The epsilon of norms that transformers takes if a config has none, by the kind of the language
model."""


@dataclass(frozen=True)
class PixtralConfig:
    """Sizes of tower and projector; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    activation: Literal["silu", "gelu"]
    """The activation of the gate in the MLPs of the blocks."""
    merger: bool
    """Whether the projector normalises patches and merges them (all but Pixtral)."""
    projector_bias: bool
    spatial_merge_size: int = 2
    image_size: int = 1540
    """The longest side of an image in pixels, if processor files do not set one."""
    patch_size: int = 14
    in_channels: int = 3
    projector_norm_eps: float = 1e-5
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
    def from_hf(cls, config: Mapping[str, object]) -> PixtralConfig:
        """Read the ``config.json`` of a checkpoint.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        language = find_section(config, "text_config")
        lighton, llava = (config.get("model_type") == kind for kind in ("lighton_ocr", "llava"))
        merger = not llava and ("spatial_merge_size" in config or "model_type" in config)
        # transformers fills a section that is missing with other sizes than one that is there.
        whole = merger and "vision_config" not in config
        width = read_size(vision, "hidden_size", default=1024)
        heads = read_size(vision, "num_attention_heads", default=16)
        require_value(vision, "head_dim", width // heads, None)
        require_value(config, "vision_feature_layer", -1, default=-2 if llava else -1)
        strategy = "default" if llava else "full"
        require_value(config, "vision_feature_select_strategy", "full", default=strategy)
        require_value(config, "projector_hidden_act", "gelu")
        act: Literal["silu", "gelu"] = "silu" if whole and lighton else "gelu"
        kind = language.get("model_type", "mistral")  # the default of Mistral3Config
        eps = _NORM_EPS.get(str(kind), None if merger else 1e-6)
        return cls(
            depth=read_size(vision, "num_hidden_layers", default=24, limit=1024),
            hidden_size=width,
            intermediate_size=read_size(vision, "intermediate_size", default=4096),
            num_heads=heads,
            out_hidden_size=read_size(language, "hidden_size"),
            activation=read_choice(vision, "hidden_act", "silu", "gelu", default=act),
            merger=merger,
            projector_bias=read_flag(config, "multimodal_projector_bias", default=not merger),
            spatial_merge_size=read_size(config, "spatial_merge_size", default=2) if merger else 1,
            image_size=read_size(vision, "image_size", default=1540 if whole else 1024),
            patch_size=read_size(vision, "patch_size", default=14 if whole else 16),
            in_channels=read_size(vision, "num_channels", default=3),
            projector_norm_eps=read_epsilon(language, "rms_norm_eps", default=eps),
            rope_theta=read_rope_theta({**vision, "head_dim": None}),
        )


class PixtralEncoder(PatchEncoder):
    """Encodes packed patches of images to hidden states and projected tokens.

    An item ``(t, h, w)`` is t images of one size.
    """

    def __init__(self, config: PixtralConfig, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: PixtralConfig = config
        self._preprocessor = preprocessor
        self.patch_embed = FlatPatchEmbed(
            config.hidden_size, config.patch_size, config.in_channels, bias=False
        )
        self.ln_pre = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.projector = Projector(config)

    def _default_preprocessor(self) -> Preprocessor:
        from ..inputs.patches import PatchPreprocessor

        return PatchPreprocessor.pixtral(
            patch_size=self.config.patch_size,
            merge_size=self.config.spatial_merge_size,
            longest_edge=self.config.image_size,
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
        return EncoderOutput(hidden, self.projector(hidden), ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim] as normed rows [P, D]."""
        weight = self.patch_embed.proj.weight
        patches = self._admit_patches(pixel_values, weight, metadata)
        return self.ln_pre(self.patch_embed(patches))

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` [P, K/2], a row per patch.

        The patches of a token are neighbours. P is ``max_input_size``, with padding at the end, or
        the number of patches of ``grids``.
        """
        dtype = torch.promote_types(self.patch_embed.proj.weight.dtype, torch.float32)
        merge, head = self.config.spatial_merge_size, self.config.head_size
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size, merge**2)
        cos, sin = rotary_cos_sin(
            merge_order_positions(grids, merge, rows), head, self.config.rope_theta, dtype
        )
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
        }


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.attn = Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=1e-5)
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
            gate=self.mlp.gate_proj,
            up=self.mlp.up_proj,
            down=self.mlp.down_proj,
            num_heads=self.attn.num_heads,
            activation=self.mlp.activation,
        )


class Attention(nn.Module):
    """Full attention inside each image; fused qkv rows are [Q; K; V], head-major."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_size = config.head_size
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        qkv_T3HK = self.qkv(x).view(x.shape[0], 3, self.num_heads, self.head_size)
        q_THK, k_THK = rotate(qkv_T3HK[:, :2], context.cos, context.sin).unbind(1)
        offsets, longest = context.cu_seqlens, context.max_seqlen
        v_THK = qkv_T3HK[:, 2]
        out_THK = attention(q_THK, k_THK, v_THK, offsets, longest, padding=context.padding)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``, without biases."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activate = F.silu if self.activation == "silu" else F.gelu
        return self.down_proj(activate(self.gate_proj(x)) * self.up_proj(x))


class Projector(nn.Module):
    """Merges 2x2 patches if the config has a merger; projects to the language model's width."""

    def __init__(self, config: PixtralConfig) -> None:
        super().__init__()
        width, out, bias = config.hidden_size, config.out_hidden_size, config.projector_bias
        self.group = config.spatial_merge_size**2
        self.norm: nn.Module = nn.Identity()
        self.merging_layer: nn.Module = nn.Identity()
        if config.merger:
            self.norm = nn.RMSNorm(width, eps=config.projector_norm_eps)
            self.merging_layer = nn.Linear(width * self.group, width, bias=False)
        self.linear_1 = nn.Linear(width, out, bias=bias)
        self.linear_2 = nn.Linear(out, out, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        groups = self.norm(hidden).unflatten(0, (-1, self.group))
        tokens = self.merging_layer(groups.mT.flatten(1))  # channel-major, like the weight
        return self.linear_2(F.gelu(self.linear_1(tokens)))


def rotary_cos_sin(
    positions: Tensor, head_size: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [P, K/2] of the 2D rotary angles of ``positions`` [P, 2], (row, column).

    The first half of the angles is by row, with the even ones of the K/2 frequencies of a head; the
    second half is by column, with the odd ones.
    """
    exponents = torch.arange(0, head_size, 2, dtype=dtype, device=positions.device)
    turns = (theta ** (exponents / head_size)).view(-1, 2).T
    angles = (positions[:, :, None].to(dtype) / turns).flatten(1)
    return angles.cos(), angles.sin()
