"""DINOv3's ViTs: Meta's self-supervised towers with rotary positions, over packed patches.

A pre-norm ViT with a class token and registers before the patches, rotary positions of patches
alone, a scale per channel on each branch, full attention inside each image, and a final norm. S+,
H+ and 7B have gated MLPs. Any multiple of 16 pixels is a native size.

Source: ``DINOv3ViTModel`` of transformers 5.24.0.
Repo ids: facebook/dinov3-{vits16,vits16plus,vitb16,vitl16,vith16plus,vit7b16}-pretrain-lvd1689m,
facebook/dinov3-{vitl16,vit7b16}-pretrain-sat493m,
timm/vit_{small,small_plus,base,large,huge_plus,7b}_patch16_dinov3.lvd1689m and others.

Shapes: P patches row by row, S segments (images or frames), r rows before the patches of a segment
(class token and registers), T = P + S*r packed rows, D width, K head size.

Deliberate differences:

- Images of any size are packed; transformers takes batches of one size.
- ``last_hidden_state`` and ``pooler_output`` have only patches; the class token and the registers,
  normed, are ``extras["prefix"]``. transformers' ``pooler_output`` is the first of them.
- The patch embedding is a product with the stored Conv2d weight, the same sums.
- The rotation multiplies in float32 and rounds to the tower's dtype once; transformers rounds
  cosines and sines to the tower's dtype first.
- The frequencies are computed in float32 or wider, as in transformers and timm; Meta's code stores
  them in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..base.checks import check_input_size, check_rows, require_metadata
from ..base.patch_encoder import RasterEncoder, merge_order_positions
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    read_choice,
    read_count,
    read_epsilon,
    read_flag,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.products import FlatPatchEmbed
from .blocks import Block, DinoBlockSizes

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class Dinov3Config:
    """The sizes of a DINOv3 ViT."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    prefix_rows: int = 5
    """The number of rows before the patches of an image: the class token and the registers."""
    gated: bool = False
    """Whether the MLPs have a gate with SiLU (SwiGLU); else their activation is exact GELU."""
    query_value_bias: bool = True
    """Whether the projections of queries and values have biases; that of keys never has one."""
    mask_token: bool = True
    """Whether the checkpoint has the token that replaces masked patches in training; no forward
    pass reads it."""
    patch_size: int = 16
    in_channels: int = 3
    rope_theta: float = 100.0
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("head size", self.hidden_size // self.num_heads, "rotary axes * 2", 4)

    @property
    def spatial_merge_size(self) -> int:
        """The side of a token in patches: 1, because each patch is a token."""
        return 1

    @property
    def patch_dim(self) -> int:
        """The size of a row of ``pixel_values``: channels * height * width of a patch."""
        return self.in_channels * self.patch_size**2

    @property
    def out_hidden_size(self) -> int:
        """The number of columns of a token, which is the width of the tower."""
        return self.hidden_size

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Dinov3Config:
        """Read the ``config.json`` of a checkpoint.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        gated = read_flag(config, "use_gated_mlp", default=False)
        read_choice(config, "hidden_act", "silu" if gated else "gelu", default="gelu")
        require_value(config, "key_bias", False)
        for name in ("proj_bias", "mlp_bias"):
            require_value(config, name, True)
        bias = read_flag(config, "query_bias", default=True)
        require_value(config, "value_bias", bias, default=True)
        width = read_size(config, "hidden_size", default=384)
        heads = 6 if width == 384 else None  # else required: no tensor's shape shows it
        return cls(
            depth=read_size(config, "num_hidden_layers", default=12, limit=1024),
            hidden_size=width,
            intermediate_size=read_size(config, "intermediate_size", default=1536),
            num_heads=read_size(config, "num_attention_heads", default=heads),
            prefix_rows=1 + read_count(config, "num_register_tokens", default=0),
            gated=gated,
            query_value_bias=bias,
            mask_token=read_flag(config, "use_mask_token", default=True),
            patch_size=read_size(config, "patch_size", default=16),
            in_channels=read_size(config, "num_channels", default=3),
            rope_theta=read_rope_theta({"rope_theta": 100.0, **config}),
            layer_norm_eps=read_epsilon(config, "layer_norm_eps", default=1e-5),
        )


class Dinov3Encoder(RasterEncoder):
    """Encodes packed patches to hidden states and one normed token per patch."""

    class_token = True

    def __init__(self, config: Dinov3Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Dinov3Config = config
        self._preprocessor = preprocessor
        self.prefix_rows = config.prefix_rows
        width, registers = config.hidden_size, config.prefix_rows - 1
        self.patch_embed = FlatPatchEmbed(width, config.patch_size, config.in_channels)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.register_tokens: nn.Parameter | None = None
        if registers:
            self.register_tokens = nn.Parameter(torch.randn(1, registers, width))
        if config.mask_token:
            self.register_buffer("mask_token", torch.zeros(1, 1, width))
        sizes = DinoBlockSizes(
            width,
            config.intermediate_size,
            config.num_heads,
            config.layer_norm_eps,
            config.gated,
            key_bias=False,
            query_value_bias=config.query_value_bias,
        )
        self.blocks: nn.ModuleList = nn.ModuleList(Block(sizes) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def _default_preprocessor(self) -> Preprocessor:
        from .dino_pixels import DinoPreprocessor

        return DinoPreprocessor.dinov3(self.config.patch_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode P packed patches to P tokens.

        Returns:
            ``last_hidden_state`` [P, D] before the last norm, ``pooler_output`` [P, D] after it, no
            DeepStack features, ``"prefix"`` [S, r, D], the normed class token and registers.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        return self.prefixed_output(hidden, self.norm(hidden), metadata)

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim], and pack them behind r rows, [T, D]."""
        pixels = self._admit_pixels(pixel_values, self.cls_token)
        require_metadata(metadata, "patch_index")
        check_rows(pixels.shape[0], metadata["patch_index"].shape[0], "but encoder_metadata is for")
        prefix = self.cls_token[0]
        if self.register_tokens is not None:
            prefix = torch.cat((prefix, self.register_tokens[0]))
        return self.pack(prefix, self.patch_embed(pixels), metadata)

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` [P, K/2], a row per patch.

        P is ``max_input_size``, with padding at the end, or the number of patches of ``grids``. The
        base class adds the rows before the patches, which are not rotated.
        """
        dtype = torch.promote_types(self.cls_token.dtype, torch.float32)
        rows = check_input_size(sum(t * h * w for t, h, w in grids), max_input_size)
        places = torch.zeros(rows, 2, dtype=dtype, device="cpu")
        start = 0
        for t, h, w in grids:
            cells = merge_order_positions([(1, h, w)], 1, h * w).to(dtype)
            sides = torch.tensor([h, w], dtype=dtype, device="cpu")
            places[start : start + t * h * w] = (2 * ((cells + 0.5) / sides) - 1).repeat(t, 1)
            start += t * h * w
        head = self.config.hidden_size // self.config.num_heads
        cos, sin = centre_angles(places, head, self.config.rope_theta)
        return {"rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}


def centre_angles(places: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin [P, K/2] of the rotary angles of patches.

    Args:
        places: (y, x) of the centre of each patch, from -1 to 1 over its image, [P, 2].
        head_size: K; half the angles are by y, then half by x.
        theta: the base of the frequencies.
    """
    exponents = torch.arange(0, 1, 4 / head_size, dtype=places.dtype, device=places.device)
    angles = (2 * math.pi * places[:, :, None] * theta**-exponents).flatten(1)
    return angles.cos(), angles.sin()
