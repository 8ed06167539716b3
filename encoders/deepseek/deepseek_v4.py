"""The vision tower of DeepSeek-V4.1-Flash and DeepSeek-V4-Flash-Vision.

A pre-norm ViT over packed patches of images of any size: 2D rotary positions, RMS norms, gated
MLPs, attention inside each image. Its aligner makes one token of 3x3 patches; where an image ends
inside of such a square, zeros stand for the patches that are missing.

Source: ``DeepseekV4ViT`` and ``DeepseekV4Aligner`` of vLLM 0.33.0, and ``DeepseekVitEncoder`` of
timm 1.0.31.
Repo ids: deepseek-ai/DeepSeek-V4.1-Flash, deepseek-ai/DeepSeek-V4-Flash-Vision-Exp.

Shapes: P patches row by row (T = P rows of attention), N tokens, D width, H heads, K head size, S
segments.

Deliberate differences:

- The patches of a token are gathered by an index, and a mask makes the missing ones zero; the
  sources pad and unfold the map of one image.
- RMS norms have weights in the tower's dtype; vLLM keeps them in float32.
- Tokens come in reading order. :meth:`DeepseekV4Encoder.sequences` puts the learned start, newlines
  and end of V4.1 around them; V4 orders pairs of rows by the place of an image in the prompt, which
  is left to the engine.
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
from ..base.raster import raster_maps
from ..block_parts import BlockParts
from ..data import EncoderItemSpec, EncoderOutput, Grid, GridLike, Metadata, Tiling
from ..grids import read_grid, split_rows
from ..hf_config import (
    find_section,
    read_ratio,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
)
from ..layers.attention import attention
from ..layers.rotary import rotary_cos_sin, rotate
from ..layers.segments import RotarySegments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..contract import Preprocessor

_FLAT = {
    "vision_n_layers": "num_hidden_layers",
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_rope_theta": "rope_theta",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_max_wh_ratio": "max_wh_ratio",
}
"""Key of DeepSeek-V4's config, beside those of its language model -> V4.1's, in a section."""


@dataclass(frozen=True)
class DeepseekV4Config:
    """Sizes of tower and aligner, and of images; ``out_hidden_size`` is the aligner's width."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    spatial_merge_size: int = 3
    """Side of a token in patches."""
    patch_size: int = 14
    in_channels: int = 3
    rope_theta: float = 10000.0
    max_image_tokens: int = 1024
    """The most tokens of an image, those of newlines, start and end among them."""
    min_pixels: int = 295936
    """The area in pixels to which smaller images are enlarged."""
    max_aspect: float | None = None
    """The largest ratio of width to height; wider images are squeezed. None: there is none."""
    paired_rows: bool = False
    """Whether prompts have tokens in pairs of rows, with a learned token as padding (V4)."""

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
    def from_hf(cls, config: Mapping[str, object]) -> DeepseekV4Config:
        """Read the ``config.json`` of a checkpoint, V4.1's with a section or V4's without.

        Raises:
            ValueError: no vision tower, a value that is not supported, or sizes that disagree.
        """
        flat = any(name in config for name in _FLAT)
        vision, language = find_section(config, "vision_config"), config
        if flat:
            vision = {name: config[key] for key, name in _FLAT.items() if key in config}
        else:
            language = find_section(config, "text_config")
        if not vision.get("num_hidden_layers"):
            raise ValueError(
                "config: num_hidden_layers (vision_n_layers in V4) is missing or 0: this "
                "checkpoint has no vision tower"
            )
        wide = vision.get("max_wh_ratio", 8.0 if flat else None)
        return cls(
            depth=read_size(vision, "num_hidden_layers", limit=1024),
            hidden_size=read_size(vision, "hidden_size", default=1024),
            intermediate_size=read_size(vision, "intermediate_size", default=2816),
            num_heads=read_size(vision, "num_attention_heads", default=16),
            out_hidden_size=read_size(language, "hidden_size"),
            spatial_merge_size=read_size(vision, "downsample_ratio", default=3, limit=64),
            patch_size=read_size(vision, "patch_size", default=14),
            rope_theta=read_rope_theta(vision),
            max_image_tokens=read_size(vision, "max_image_tokens", default=384 if flat else 1024),
            min_pixels=read_size(vision, "min_pixels", default=147456 if flat else 295936),
            max_aspect=None if wide is None else read_ratio(vision, "max_wh_ratio", default=8.0),
            paired_rows=flat and config.get("model_type") != "deepseek_v41",  # vLLM flattens it
        )


class DeepseekV4Encoder(RasterEncoder):
    """Encodes packed patches of images to hidden states and tokens of up to 3x3 patches.

    An item ``(t, h, w)`` is t images of one size, h and w any numbers of patches.
    """

    config: DeepseekV4Config
    image_start: nn.Parameter
    image_newline: nn.Parameter
    image_end: nn.Parameter

    def __init__(self, config: DeepseekV4Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config = config
        self._preprocessor = preprocessor
        width, out = config.hidden_size, config.out_hidden_size
        self.patch_embed = nn.Linear(config.patch_dim, width)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.aligner = Aligner(width * config.spatial_merge_size**2, out)
        names = ("start", "newline", "end", *(["pad"] if config.paired_rows else []))
        for name in names:  # no forward reads them, only the sequence of an image has them
            self.register_parameter(f"image_{name}", nn.Parameter(torch.randn(out)))

    def _default_preprocessor(self) -> Preprocessor:
        from .deepseek_v4_pixels import FlashPreprocessor

        config = self.config
        return FlashPreprocessor.within(
            config.patch_size,
            config.spatial_merge_size,
            min_pixels=config.min_pixels,
            max_tokens=config.max_image_tokens,
            max_aspect=config.max_aspect,
            paired_rows=config.paired_rows,
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
            ``last_hidden_state`` [P, D], ``pooler_output`` [N, out] in reading order, no DeepStack
            features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        squares = self.norm(hidden)[metadata["merge_index"]]
        squares = squares.masked_fill(~metadata["merge_mask"][..., None], 0.0)
        return EncoderOutput(hidden, self.aligner(squares.mT.flatten(1)), ())

    @property
    def _pixel_weight(self) -> Tensor:
        return self.patch_embed.weight

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed patches [P, patch_dim] as rows [P, D]."""
        return self.patch_embed(self._admit_patches(pixel_values, self._pixel_weight, metadata))

    def sequences(self, tokens: Tensor, grid_thw: GridLike) -> list[Tensor]:
        """Return the sequence that the language model of V4.1 reads for each item.

        Args:
            tokens: ``pooler_output`` [N, out] of all items.
            grid_thw: (t, h, w) per item, h and w in patches.

        Returns:
            [rows, out] per item: for each image the start, its rows of tokens with a newline behind
            each, and the end.

        Raises:
            ValueError: a tower of V4, whose prompts have another order, or tokens of other items.
        """
        if self.config.paired_rows:
            raise ValueError(
                "sequences: DeepSeek-V4 orders the tokens of an image by its place in the prompt: "
                "take pooler_output, which is in reading order, and the code of the engine"
            )
        grids, items = self._token_grids(grid_thw), []
        sizes = [t * h * w for t, h, w in grids]
        for part, (t, h, w) in zip(split_rows(tokens, sizes), grids, strict=True):
            assert part is not None
            rows = part.unflatten(0, (t, h, w))
            newlines = self.image_newline.expand(t, h, 1, -1)
            lines = torch.cat((rows, newlines.to(rows.dtype)), dim=2).flatten(1, 2)
            first, last = (x.expand(t, 1, -1) for x in (self.image_start, self.image_end))
            items.append(torch.cat((first, lines, last), dim=1).flatten(0, 1))
        return items

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Return each item's patches, tokens, segments (its images) and patches per segment."""
        pairs = zip(self._read(grid_thw), self._token_grids(grid_thw), strict=True)
        return [
            EncoderItemSpec(t * h * w, t * rows * columns, t, h * w)
            for (t, h, w), (_, rows, columns) in pairs
        ]

    def _token_grids(self, grid_thw: GridLike) -> list[Grid]:
        """Return the grid (t, rows, columns) of the tokens of each item."""
        side = self.config.spatial_merge_size
        return [(t, -(-h // side), -(-w // side)) for t, h, w in self._read(grid_thw)]

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return rotary angles per patch, and the patches of each token.

        ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` are [P, K/2], ``merge_index`` int64 [N, 9]
        the rows of a token's patches, ``merge_mask`` bool [N, 9] false for those that are missing.
        P is ``max_input_size``, with padding at the end, and N a ninth of it, or they are the
        numbers of patches and of tokens of ``grids``.

        Raises:
            ValueError: more patches than ``max_input_size``, or more tokens than a ninth of it.
        """
        dtype = torch.promote_types(self.patch_embed.weight.dtype, torch.float32)
        side, head = self.config.spatial_merge_size, self.config.head_size
        count = sum(t * h * w for t, h, w in grids)
        index, mask = squares_of(grids, side)
        if max_input_size is not None:
            rows = check_input_size(len(index) * side**2, max_input_size, side**2)
            free = rows // side**2 - len(index)
            index, mask = (F.pad(x, (0, 0, 0, free)) for x in (index, mask))
            count = rows
        positions = merge_order_positions(grids, 1, count)
        cos, sin = rotary_cos_sin(positions, head, self.config.rope_theta, dtype)
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "merge_index": index,
            "merge_mask": mask,
        }

    def _maps_of_grids(
        self, features: Tensor, grid_thw: GridLike, tiles: Sequence[Tiling] | None = None
    ) -> list[Tensor]:
        grids, tokens = self._read(grid_thw), self._token_grids(grid_thw)
        is_merged = len(features) == sum(t * h * w for t, h, w in tokens)
        return raster_maps(features, tokens if is_merged else grids, 1)

    def _read(self, grid_thw: GridLike) -> list[Grid]:
        return read_grid(grid_thw, 1, "patches")


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

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
            up=self.mlp.gate_up,
            gate_in_up=True,
            down=self.mlp.down,
            num_heads=self.attn.num_heads,
            activation="silu",
        )


class Attention(nn.Module):
    """Full attention inside each image; fused qkv rows are [Q; K; V], head-major."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        qkv_T3HK = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK = rotate(qkv_T3HK[:, :2], context.cos, context.sin).unbind(1)
        offsets, longest = context.cu_seqlens, context.max_seqlen
        v_THK = qkv_T3HK[:, 2]
        out_THK = attention(q_THK, k_THK, v_THK, offsets, longest, padding=context.padding)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """SwiGLU without biases, ``down(silu(gate) * up)``; one layer makes gate and up."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Aligner(nn.Module):
    """Projects the patches of a token, channel by channel, to the width of the language model."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, out)
        self.fc2 = nn.Linear(out, out)

    def forward(self, squares: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(squares)))


def squares_of(grids: list[Grid], side: int) -> tuple[Tensor, Tensor]:
    """Return the rows of the patches of each token, and which of them are there.

    Args:
        grids: (t, h, w) per item; its patches lie row by row.
        side: side of a token in patches.

    Returns:
        int64 and bool [N, side * side]; a missing patch has the row 0.
    """
    indices = [torch.zeros(0, side**2, dtype=torch.int64, device="cpu")]
    start = 0
    for t, h, w in grids:
        rows = torch.arange(start, start + t * h * w, device="cpu").view(t, h, w)
        padded = F.pad(rows, (0, -w % side, 0, -h % side), value=-1)
        cells = padded.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
        indices.append(cells.flatten(3).flatten(0, 2))
        start += t * h * w
    index = torch.cat(indices)
    return index.clamp(min=0), index >= 0
