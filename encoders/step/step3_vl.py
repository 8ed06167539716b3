"""The vision tower of Step3-VL-10B, Step-3.7 and Step5: Perception Encoder G with a projector.

A pre-norm ViT over a whole image of 728x728 pixels and, for larger or elongated images, tiles of
504x504: learned positions and 2D rotary positions, layer scale, then two strided convolutions that
make one token of 4x4 patches, and a projector into the language model's width.

Source: ``step_vl.py`` and ``step3_vl.py`` of vLLM 0.33.0 and ``Step3p7VisionModel`` of transformers
5.23.0.
Repo ids: stepfun-ai/Step3-VL-10B, stepfun-ai/Step-3.7-Flash; the tower of Step5 is the same.

Shapes: B views of n = h*w patches, T = B*n rows of attention, D width, H heads, K head size,
N = B*(h/4)*(w/4) tokens, sizes rounded up.

Deliberate differences:

- The patch embedding is a Linear over the stored Conv2d weight: same sums, one matrix product. A
  layer with LoRA or hooks is called as a module instead.
- The rotation multiplies in float32 and rounds to the tower's dtype once; layer scale with residual
  rounds once.
- Positions of tiles are interpolated in float32 or wider and added in the tower's dtype.
- Images are tiled as by StepFun's own code: a tile that reaches beyond the image is black there;
  transformers stretches the part of the image inside of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..base.checks import check_rows, require_metadata
from ..base.paths_encoder import TilesThenImage
from ..base.tile_encoder import TileEncoder
from ..block_parts import BlockParts
from ..data import EncoderOutput, Grid, GridLike, Metadata
from ..hf_config import (
    find_section,
    read_epsilon,
    read_flag,
    read_ratio,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.products import convolve, patch_product
from ..layers.rotary import rotate_pairs
from ..layers.segments import RotarySegments, TileSegments

if TYPE_CHECKING:
    from ..contract import Preprocessor

LARGEST_BATCH = {"image": 8, "tiles": 36}
"""Views of the largest default CUDA graph of each input path. One whole image of Step3-VL is 10
TFLOP: 2,704 patches through 1.8 billion parameters. Only elongated images have over 36 tiles."""


@dataclass(frozen=True)
class Step3VLConfig:
    """Sizes of a vision tower; ``out_hidden_size`` is the width of the language model."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    projector_bias: bool = False
    image_size: int = 728
    tile_size: int = 504
    patch_size: int = 14
    in_channels: int = 3
    layer_norm_eps: float = 1e-5
    enable_patch: bool = True
    """Whether large images are also encoded as tiles; if not, only the whole image is."""

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("head size", self.head_size, "rotary axes * 2", 4)
        require_divisible("image_size", self.image_size, "patch_size", self.patch_size)
        require_divisible("tile size", self.tile_size, "patch_size", self.patch_size)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Step3VLConfig:
        """Read the ``config.json`` of a checkpoint, with StepFun's or transformers' names.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        language = find_section(config, "text_config")
        require_value(vision, "hidden_act", "quick_gelu")
        require_value(vision, "use_cls_token", False, None)
        require_value(vision, "ues_cls_token", False, None)  # some configs spell it so
        require_value(vision, "use_abs_posemb", True)
        require_value(vision, "use_ln_pre", True)
        require_value(vision, "use_ln_post", False)
        require_value(vision, "use_rope2d", True)
        require_value(vision, "pool_type", "none", None)
        require_value(vision, "output_dim", None)
        require_value(config, "understand_projector_stride", 2)
        require_value({"rope_theta": read_rope_theta(vision)}, "rope_theta", 10000.0)
        width = read_size(vision, "width", "hidden_size", default=1536)
        ratio = read_ratio(vision, "mlp_ratio", default=8960 / 1536)
        return cls(
            depth=read_size(vision, "layers", "num_hidden_layers", default=47, limit=1024),
            hidden_size=width,
            intermediate_size=round(width * ratio),  # ratios in configs may be rounded: 5.8333
            num_heads=read_size(vision, "heads", "num_attention_heads", default=16),
            out_hidden_size=read_size(language, "hidden_size", default=4096),
            projector_bias=read_flag(config, "projector_bias", default=False),
            image_size=read_size(vision, "image_size", default=728),
            patch_size=read_size(vision, "patch_size", default=14),
            in_channels=read_size(vision, "num_channels", default=3),
            layer_norm_eps=read_epsilon(vision, "layer_norm_eps", default=1e-5),
            enable_patch=read_flag(vision, "enable_patch", default=True),
        )


class Step3VLEncoder(TilesThenImage):
    """Encodes images, whole and as tiles, to hidden states and projected tokens."""

    config: Step3VLConfig

    def __init__(self, config: Step3VLConfig, preprocessor: Preprocessor | None = None) -> None:
        tower = Step3VLTower(config)
        image = tower.at(config.image_size, LARGEST_BATCH["image"])
        super().__init__(image, tower.at(tower.side, LARGEST_BATCH["tiles"]), preprocessor)

    def _default_preprocessor(self) -> Preprocessor:
        from .step3_pixels import CropPreprocessor

        return CropPreprocessor(
            self.config.patch_size,
            image_size=self.config.image_size,
            tile_size=self.config.tile_size,
            tiled=self.config.enable_patch,
        )


class Step3VLTower(TileEncoder):
    """Encodes square views of one size: whole images (input path "image") or tiles ("tiles")."""

    def __init__(self, config: Step3VLConfig) -> None:
        super().__init__()
        self.config: Step3VLConfig = config
        width, patch = config.hidden_size, config.patch_size
        self.patch = (config.in_channels, patch, patch)
        self.conv1 = nn.Conv2d(config.in_channels, width, patch, stride=patch, bias=False)
        self.positional_embedding = nn.Parameter(
            torch.randn((config.image_size // patch) ** 2, width)
        )
        self.ln_pre = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.transformer = Transformer(config)
        self.vit_downsampler1 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.vit_downsampler2 = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.vit_large_projector = nn.Linear(
            4 * width, config.out_hidden_size, bias=config.projector_bias
        )

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views of n patches each to N tokens.

        Returns:
            ``last_hidden_state`` [B, n, D], ``pooler_output`` [N, out], no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        h, w = (size // self.config.patch_size for size in pixel_values.shape[2:])
        maps = hidden.mT.unflatten(2, (h, w))
        maps = convolve(self.vit_downsampler2, convolve(self.vit_downsampler1, maps))
        tokens = self.vit_large_projector(rearrange(maps, "b d h w -> (b h w) d"))
        return EncoderOutput(hidden, tokens, ())

    @property
    def _pixel_weight(self) -> Tensor:
        return self.conv1.weight

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed views [B, C, H, W] as normed patches with positions, [B, n, D]."""
        pixels = self._admit_tiles(pixel_values, self._pixel_weight)
        patch = self.config.patch_size
        h, w = (size // patch for size in pixels.shape[2:])
        patches = rearrange(pixels, "b c (h p) (w q) -> b (h w) (c p q)", p=patch, q=patch)
        rows = patch_product(self.conv1, patches, self.patch)
        return self.ln_pre(rows + self._positions(h, w))

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> RotarySegments:
        """Return the tensors that all blocks read: rotary angles, offsets of segments, padding."""
        require_metadata(metadata, "rotary_pos_emb_cos")
        cos, sin = metadata["rotary_pos_emb_cos"], metadata["rotary_pos_emb_sin"]
        segments = TileSegments.of(metadata, hidden)
        if hidden.shape[0]:
            check_rows(hidden.shape[1], cos.shape[0], "per view but encoder_metadata is for")
        return RotarySegments(cos[:, None, None], sin[:, None, None], *segments)

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks of the tower, in the order in which they run."""
        return self.transformer.resblocks

    def _token_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of tokens of a view: a quarter of ``h`` and ``w``, rounded up."""
        return -(-h // 4), -(-w // 4)

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the rotary cos and sin [n, K/2] of one view, which all views share."""
        h, w = self._shared_grid(grids, max_input_size)
        dtype = torch.promote_types(self.conv1.weight.dtype, torch.float32)
        cos, sin = rotary_cos_sin(h, w, self.config.head_size, dtype)
        return {"rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}

    def _positions(self, h: int, w: int) -> Tensor:
        """Return position embeddings [h*w, D]: the table, or a bilinear resize of it."""
        table, side = self.positional_embedding, self.config.image_size // self.config.patch_size
        if (h, w) == (side, side):
            return table
        float_table = table.to(torch.promote_types(table.dtype, torch.float32))
        grid = rearrange(float_table, "(h w) d -> 1 d h w", h=side)
        grid = F.interpolate(grid, size=(h, w), mode="bilinear", align_corners=False)
        return rearrange(grid, "1 d h w -> (h w) d").to(table.dtype)


class Transformer(nn.Module):
    """Holds the transformer blocks, so that parameter names begin as in the checkpoint."""

    def __init__(self, config: Step3VLConfig) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(config) for _ in range(config.depth))


class Block(nn.Module):
    """Pre-norm attention and MLP, each scaled per channel and added to the residual."""

    def __init__(self, config: Step3VLConfig) -> None:
        super().__init__()
        self.attn = Attention(config)
        self.ls_1 = nn.Parameter(torch.full((config.hidden_size,), 0.1))
        self.ls_2 = nn.Parameter(torch.full((config.hidden_size,), 0.1))
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, context: RotarySegments) -> Tensor:
        hidden = torch.addcmul(hidden, self.attn(self.ln_1(hidden), context), self.ls_1)
        return torch.addcmul(hidden, self.mlp(self.ln_2(hidden)), self.ls_2)

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return BlockParts(
            containers=(self, self.attn, self.mlp),
            norm1=self.ln_1,
            qkv=self.attn.in_proj,
            proj=self.attn.out_proj,
            scale1=self.ls_1,
            norm2=self.ln_2,
            up=self.mlp.c_fc,
            down=self.mlp.c_proj,
            scale2=self.ls_2,
            num_heads=self.attn.num_heads,
            activation="quick_gelu",
            rotary_pair_distance=1,
        )


class Attention(nn.Module):
    """Full attention inside each view; fused rows are [Q; K; V], head-major."""

    def __init__(self, config: Step3VLConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.in_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        cos, sin, *segments = context
        qkv_Bn3HK = self.in_proj(x).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK = rotate_pairs(qkv_Bn3HK[:, :, :2], cos, sin).flatten(0, 1).unbind(1)
        v_THK = qkv_Bn3HK[:, :, 2].flatten(0, 1)
        out_THK = attention(q_THK, k_THK, v_THK, *segments, segment_rows=x.shape[1])
        out: Tensor = self.out_proj(out_THK.flatten(1))
        return out.view_as(x)


class MLP(nn.Module):
    """Two linear layers with quick GELU, ``x * sigmoid(1.702 x)``, between them."""

    def __init__(self, config: Step3VLConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        return self.c_proj(x * torch.sigmoid(1.702 * x))


def rotary_cos_sin(h: int, w: int, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [h*w, head_size/2] of rotary angles, half by column, then half by row."""
    exponents = torch.arange(0, head_size // 2, 2, dtype=dtype, device="cpu")
    turns = 10000.0 ** (exponents / (head_size // 2))
    rows = torch.arange(h, dtype=dtype, device="cpu")[:, None, None] / turns
    columns = torch.arange(w, dtype=dtype, device="cpu")[None, :, None] / turns
    angles = torch.cat((columns.expand(h, -1, -1), rows.expand(-1, w, -1)), dim=-1).flatten(0, 1)
    return angles.cos(), angles.sin()
