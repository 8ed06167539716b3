"""DeepSeek-OCR-2's encoder: SAM-B, a 16-fold compressor, and Qwen2's blocks over learned queries.

A view goes through SAM and two strided convolutions, as in DeepSeek-OCR, to n cells. Behind them
stand n learned queries. In the blocks a cell attends to all cells, and a query to all cells and to
the queries up to itself; the last norm and a linear layer make n tokens of the queries.
An image is one view of the whole of it and, if it is large, tiles; their tokens make one sequence:
those of each tile, then of the whole image, then a learned separator.

Source: ``DeepseekOcr2Model`` and ``DeepseekOcr2VisionModel`` of transformers 5.24.0, and
``deepseek_ocr2.py`` and ``deepencoder2.py`` of vLLM 0.33.0.
Repo ids: deepseek-ai/DeepSeek-OCR-2, deepseek-community/DeepSeek-OCR-2.

Shapes: B views, n = h*w/16 cells of a view of h*w patches, T = B*2n rows of cells and queries, D
width of the blocks, H heads, K head size.

Deliberate differences: those of ``encoders.deepseek.sam``, and

- Attention runs twice, over the cells, and from the queries to all rows by the causal rule for
  fewer queries than keys, where the sources have one mask [2n, 2n].
- Rotary cos and sin are float32 or wider; transformers rounds them to the dtype of the tower.
- transformers takes queries for n up to 144 and drops none if n is smaller; here, as in vLLM, n is
  the number of queries: 144 for tiles of 768x768 pixels, 256 for whole images of 1024x1024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.paths_encoder import TilesThenImage
from ..base.tile_encoder import TileEncoder
from ..base.vision_encoder import InnerStack
from ..block_parts import BlockParts
from ..data import (
    EncoderItemSpec,
    EncoderOutput,
    Grid,
    GridLike,
    Metadata,
    Output,
    VisionInputs,
)
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
from ..layers.blocks import nested_sizes
from ..layers.rotary import rotate
from ..layers.segments import BlockContext, RotarySegments, TileSegments
from .deepseek_ocr import Compressor, Projector, compressed_side
from .sam import SamSizes, read_channels

if TYPE_CHECKING:
    from ..contract import Preprocessor


@dataclass(frozen=True)
class DeepseekOCR2Config:
    """Sizes of SAM, of the compressor, and of the blocks over cells and queries."""

    sam: SamSizes
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    out_hidden_size: int
    downsample_channels: tuple[int, ...] = (512, 896)
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_tiles: int = field(default=6, compare=False)
    """Most tiles per image; not compared between configs, as it is no part of the architecture."""

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        object.__setattr__(self, "sam", nested_sizes(SamSizes, self.sam))
        shared = self.num_key_value_heads
        require_divisible("num_heads", self.num_heads, "num_key_value_heads", shared)
        require_divisible("image_size", self.sam.image_size, "pixels of four tiles", 256)
        if self.downsample_channels[-1] != self.hidden_size:
            raise ValueError(
                f"config: downsample_channels end in {self.downsample_channels[-1]}, and the "
                f"blocks read cells of width {self.hidden_size}: they must be equal"
            )

    @property
    def patch_size(self) -> int:
        """Side of a patch of SAM in pixels."""
        return self.sam.patch_size

    @property
    def in_channels(self) -> int:
        """The number of colour channels of the pixels."""
        return self.sam.in_channels

    @property
    def head_columns(self) -> int:
        """The number of columns of an attention head of the blocks."""
        return self.hidden_size // self.num_heads

    @property
    def tile_size(self) -> int:
        """Side of the view of the whole image in pixels."""
        return self.sam.image_size

    @property
    def sides(self) -> dict[str, int]:
        """Side in pixels of the view of the whole image and of a tile, three quarters of it."""
        return {"image": self.tile_size, "tiles": self.tile_size * 3 // 4}

    @property
    def queries(self) -> dict[str, int]:
        """The number of queries for the whole image and for a tile."""
        patches = {path: side // self.patch_size for path, side in self.sides.items()}
        return {path: compressed_side(side) ** 2 for path, side in patches.items()}

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> DeepseekOCR2Config:
        """Read the ``config.json`` of a checkpoint, in DeepSeek's form or that of transformers.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config")
        if "sam_config" in vision or "encoder_config" in vision:
            return cls._from_transformers(config, vision)
        towers = vision.get("width")
        names = ("sam_vit_b", "qwen2-0-5b")
        sam, stack = (towers.get(x) if isinstance(towers, Mapping) else None for x in names)
        if not isinstance(sam, Mapping) or not isinstance(stack, Mapping):
            raise ValueError(
                f"config: width must describe 'sam_vit_b' and 'qwen2-0-5b', and is {towers!r}"
            )
        projector = find_section(config, "projector_config")
        require_value(vision, "model_name", "DeepEncoderV2", "deepencoderv2")
        require_value(projector, "projector_type", "linear")
        require_value(config, "tile_tag", "2D")
        width = read_size(stack, "dim")
        channels = {"downsample_channels": [512, width], **sam}
        return cls(
            sam=SamSizes.from_hf({"image_size": vision.get("image_size"), **sam}),
            # DeepSeek's code has the other sizes of the blocks as constants.
            depth=read_size(stack, "layers", default=24, limit=1024),
            hidden_size=width,
            intermediate_size=read_size(stack, "intermediate_size", default=4864),
            num_heads=read_size(stack, "heads", default=14),
            num_key_value_heads=read_size(stack, "num_key_value_heads", default=2),
            out_hidden_size=read_size(projector, "n_embed"),
            downsample_channels=read_channels(channels, "downsample_channels"),
        )

    @classmethod
    def _from_transformers(
        cls, config: Mapping[str, object], vision: Mapping[str, object]
    ) -> DeepseekOCR2Config:
        """Read a config of transformers; a missing size is an error, because none has a default."""
        sam, stack = find_section(vision, "sam_config"), find_section(vision, "encoder_config")
        require_value(stack, "hidden_act", "silu")
        require_value(stack, "use_sliding_window", False)
        return cls(
            sam=SamSizes.from_hf(sam),
            depth=read_size(stack, "num_hidden_layers", limit=1024),
            hidden_size=read_size(stack, "hidden_size"),
            intermediate_size=read_size(stack, "intermediate_size"),
            num_heads=read_size(stack, "num_attention_heads"),
            num_key_value_heads=read_size(stack, "num_key_value_heads"),
            out_hidden_size=read_size(find_section(config, "text_config"), "hidden_size"),
            downsample_channels=read_channels(
                {"downsample_channels": [512, 896], **sam}, "downsample_channels"
            ),
            rms_norm_eps=read_epsilon(stack, "rms_norm_eps", default=1e-6),
            rope_theta=read_rope_theta(stack),
        )


class DeepseekOCR2Encoder(TilesThenImage):
    """Encodes a whole image (input path "image") and tiles of it ("tiles") with one tower."""

    config: DeepseekOCR2Config
    view_seperator: nn.Parameter  # of the tower

    def __init__(
        self, config: DeepseekOCR2Config, preprocessor: Preprocessor | None = None
    ) -> None:
        tower = DeepseekOCR2Tower(config)
        super().__init__(tower, tower.at(config.sides["tiles"]), preprocessor)

    def _default_preprocessor(self) -> Preprocessor:
        from .deepseek_ocr_pixels import OcrPreprocessor

        config = self.config
        return OcrPreprocessor(
            config.patch_size,
            base_size=config.sides["image"],
            tile_size=config.sides["tiles"],
            max_tiles=config.max_tiles,
        )

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Return one output per item: its tiles, then the whole image, then the separator.

        Returns:
            Per item ``last_hidden_state`` [queries, D], and ``pooler_output`` [queries + 1, out],
            whose last row is the separator.
        """
        items: list[Output] = []
        for item in super().join(outputs, inputs):
            tokens = item.pooler_output
            if tokens is not None:
                tokens = torch.cat((tokens, self.view_seperator[None].to(tokens.dtype)))
            items.append(item._replace(pooler_output=tokens))
        return items

    def _maps_of_items(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        """Return the maps "image" and, if an item has tiles, "tiles", without the separators."""
        counts = [0] * len(inputs.grid_thw)
        for name, (_, grid_thw, items) in inputs.paths.items():
            specs = self.paths[name].item_specs(grid_thw)
            for item, spec in zip(items, specs, strict=True):
                counts[item] += spec.output_tokens
        if len(features) == sum(counts) + len(counts):
            parts = features.split([count + 1 for count in counts])
            features = torch.cat([part[:-1] for part in parts])
        return super()._maps_of_items(features, inputs)


class DeepseekOCR2Tower(TileEncoder):
    """The tower of DeepSeek-OCR-2, for views of one size: from pixels to projected queries."""

    _largest_batch = 16

    def __init__(self, config: DeepseekOCR2Config) -> None:
        super().__init__()
        self.config: DeepseekOCR2Config = config
        self.sam_model = Compressor(config.sam, config.downsample_channels)
        self.query_768 = Queries(config.queries["tiles"], config.hidden_size)
        self.query_1024 = Queries(config.queries["image"], config.hidden_size)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.projector = Projector(config.hidden_size, config.out_hidden_size)
        # Only the outputs of several views end in it, so that the tower does not read it.
        self.view_seperator = nn.Parameter(torch.randn(config.out_hidden_size))  # sic

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views, each to n tokens.

        Returns:
            ``last_hidden_state`` [B, n, D], the rows of the queries, ``pooler_output`` [B*n, out],
            no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        queries = hidden[:, hidden.shape[1] // 2 :]
        return EncoderOutput(queries, self.projector(self.norm(queries)).flatten(0, 1), ())

    @property
    def _pixel_weight(self) -> Tensor:
        return self.sam_model.pos_embed

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed views [B, C, H, W] as n cells and n queries, [B, 2n, D]."""
        hidden = self._embed_views(pixel_values)
        for block in self.steps(self.sam_model.blocks, hidden, {}):
            hidden = block(hidden)
        cells = self.sam_model.compress(hidden).flatten(1, 2)
        queries = self.query_1024
        if cells.shape[1] != self.config.queries["image"]:
            queries = self.query_768
        return torch.cat((cells, queries(cells.shape[0])), dim=1)

    @property
    def inner_stacks(self) -> Mapping[str, InnerStack]:
        """The transformer blocks of SAM, which users select by the name "sam"."""
        return {"sam": InnerStack(self.sam_model.blocks, self._embed_views)}

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Return each item's views, tokens and segments, which are cells and queries of a view."""
        specs = super().item_specs(grid_thw)
        return [spec._replace(longest_segment=2 * spec.longest_segment) for spec in specs]

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> BlockContext:
        """Return angles and offsets for the blocks, None for SAM's (``hidden`` [B, h, w, D])."""
        if hidden.ndim > 3:
            return None
        cos, sin = metadata["rotary_pos_emb_cos"], metadata["rotary_pos_emb_sin"]
        cos, sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
        segments = TileSegments.of(metadata, hidden)
        return RotarySegments(cos[:, None, None], sin[:, None, None], *segments)

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the rotary cos and sin [2n, K/2] of one view, which all views share."""
        rows = 2 * prod(self._row_grid(*self._shared_grid(grids, max_input_size)))
        dtype = torch.promote_types(self.norm.weight.dtype, torch.float32)
        size = self.config.head_columns
        exponents = torch.arange(0, size, 2, dtype=dtype, device="cpu") / size
        positions = torch.arange(rows, dtype=dtype, device="cpu")
        angles = positions[:, None] / self.config.rope_theta**exponents
        return {"rotary_pos_emb_cos": angles.cos(), "rotary_pos_emb_sin": angles.sin()}

    def _row_grid(self, h: int, w: int) -> tuple[int, int]:
        """Return rows and columns of the compressor's map for a view of ``h`` x ``w`` patches."""
        return compressed_side(h), compressed_side(w)

    def _row_maps(self, rows: Tensor, h: int, w: int) -> Tensor:
        """Arrange the cells of a block's rows [B, 2n, D], or a row per query [B, n, D], as maps."""
        grid = self._row_grid(h, w)
        return torch.unflatten(rows[:, : prod(grid)], 1, grid)

    def _read(self, grid_thw: GridLike) -> list[Grid]:
        grids = super()._read(grid_thw)
        for _, h, w in grids:
            self._check_view(h, w)
        return grids

    def _check_view(self, h: int, w: int) -> None:
        """Raise a ValueError unless a view of ``h`` x ``w`` patches makes a cell per query."""
        cells, known = prod(self._row_grid(h, w)), self.config.queries.values()
        if cells not in known:
            sides = " or ".join(f"{side}x{side}" for side in self.config.sides.values())
            raise ValueError(
                f"a view of {h}x{w} patches makes {cells} cells, and this tower has queries for "
                f"{' or '.join(map(str, known))}: pass views of {sides} pixels, as preprocess "
                "makes them"
            )

    def _embed_views(self, pixel_values: Tensor) -> Tensor:
        """Return the rows [B, h, w, width of SAM] that SAM's first block reads."""
        pixels = self._admit_tiles(pixel_values, self._pixel_weight)
        self._check_view(*(size // self.config.patch_size for size in pixels.shape[2:]))
        return self.sam_model.embed_patches(pixels)


class Queries(nn.Module):
    """Learned rows [n, D] that stand behind the cells of each view."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width))

    def forward(self, views: int) -> Tensor:
        return self.weight.expand(views, -1, -1)


class Block(nn.Module):
    """Qwen2's block: pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: DeepseekOCR2Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn = Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
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
            qkv=self.attn.q_proj,
            key_value=(self.attn.k_proj, self.attn.v_proj),
            proj=self.attn.o_proj,
            norm2=self.norm2,
            gate=self.mlp.gate_proj,
            up=self.mlp.up_proj,
            down=self.mlp.down_proj,
            num_heads=self.attn.num_heads,
            num_key_value_heads=self.attn.num_key_value_heads,
            activation="silu",
            causal_half=True,
        )


class Attention(nn.Module):
    """Attention in each view: full over the cells, causal for the queries behind them.

    Neighbouring query heads share a head of keys and values.
    """

    def __init__(self, config: DeepseekOCR2Config) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = config.num_heads, config.num_key_value_heads
        width, shared = config.hidden_size, config.num_key_value_heads * config.head_columns
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, shared)
        self.v_proj = nn.Linear(width, shared)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, context: RotarySegments) -> Tensor:
        cos, sin, *segments = context
        heads, shared = self.num_heads, self.num_key_value_heads
        q_Bn1HK = self.q_proj(x).unflatten(-1, (1, heads, -1))
        k_Bn1HK = self.k_proj(x).unflatten(-1, (1, shared, -1))
        q_THK, k_THK = (rotate(part, cos, sin).flatten(0, 2) for part in (q_Bn1HK, k_Bn1HK))
        v_THK = self.v_proj(x).unflatten(-1, (shared, -1)).flatten(0, 1)
        k_THK, v_THK = (part.repeat_interleave(heads // shared, 1) for part in (k_THK, v_THK))
        out_THK = attention(
            q_THK, k_THK, v_THK, *segments, segment_rows=x.shape[1], causal_half=True
        )
        out: Tensor = self.o_proj(out_THK.flatten(1))
        return out.view_as(x)


class MLP(nn.Module):
    """SwiGLU without biases: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
