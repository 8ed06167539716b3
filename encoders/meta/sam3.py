"""SAM 3's image encoder (Segment Anything with Concepts), and its neck of feature maps.

A pre-norm ViT over square views: attention inside windows, and over the whole view in a few
blocks, with 2D rotary positions beside a small learned table that is tiled over the view. A neck
of convolutions makes maps of 256 channels at 4, 2, 1 and 1/2 times the resolution of the patches.

Source: ``Sam3VisionModel`` of transformers 5.24.0.
Repo ids: facebook/sam3.

Shapes: B views of n = h*w patches, s side of a window, W windows, D width, K head size, C channels
of the neck, N = B*n tokens.

Deliberate differences:

- The rows of a window are neighbours in all blocks, which reorders them once, not once per block.
- Views are whole windows. The source pads others with rows of zeros, which take part in attention.
- Views of another size than in the config are accepted, as if the config had their size: the
  rotary positions of whole views are scaled to the side of a window.
- The levels of the neck other than that of the patches are made on request, by ``neck_maps``.
- The patch embedding is a Linear over the stored Conv2d weight: same sums, one matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from ..base.checks import check_rows, require_metadata
from ..base.intermediates import rows_of_all
from ..base.tile_encoder import TileEncoder
from ..block_parts import BlockParts, plain_parts
from ..data import (
    EncoderItemSpec,
    EncoderOutput,
    FeatureRows,
    Grid,
    GridLike,
    Metadata,
    VisionInputs,
)
from ..hf_config import (
    find_section,
    read_epsilon,
    read_field,
    read_indices,
    read_rope_theta,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import attention
from ..layers.blocks import MLP
from ..layers.products import PatchEmbed, convolve, upsample
from ..layers.rotary import rotary_cos_sin, rotate_pairs
from ..layers.segments import RotarySegments, TileSegments, padded_offsets

if TYPE_CHECKING:
    from ..contract import Preprocessor

SCALES = (4.0, 2.0, 1.0, 0.5)
"""The resolutions of the neck's levels, as multiples of the grid of patches."""


@dataclass(frozen=True)
class Sam3Config:
    """The sizes of SAM 3's image encoder and of its neck."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    global_blocks: tuple[int, ...]
    """Numbers of the blocks that attend over the whole view; the others attend in windows."""
    out_hidden_size: int = 256
    scales: tuple[float, ...] = SCALES
    """The resolution of each level of the neck; that of 1.0 makes the tokens."""
    image_size: int = 1008
    pretrain_size: int = 336
    """The side in pixels of the views that the learned table of positions was made for."""
    window_size: int = 24
    patch_size: int = 14
    in_channels: int = 3
    rope_theta: float = 10000.0
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("head size", self.hidden_size // self.num_heads, "rotary axes * 2", 4)
        side = self.image_size // self.patch_size
        require_sizes({"patches per side": side, "positions per side": self.table_side})
        require_divisible("patches per side", side, "window_size", self.window_size)
        scales = set(self.scales)
        if 1.0 not in scales or not scales <= set(SCALES) or len(scales) < len(self.scales):
            raise ValueError(
                f"config: scale_factors={list(self.scales)}: must be some of {list(SCALES)}, each "
                "once, with 1.0 among them"
            )

    @property
    def tile_size(self) -> int:
        """Side of a view in pixels, rounded down to whole patches."""
        return self.image_size // self.patch_size * self.patch_size

    @property
    def table_side(self) -> int:
        """The number of rows, and of columns, of the learned table of positions."""
        return self.pretrain_size // self.patch_size

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Sam3Config:
        """Read the ``config.json`` of a SAM 3 model, or of its image encoder only.

        Raises:
            ValueError: a config value that is not supported, or sizes that disagree.
        """
        vision = find_section(config, "vision_config", "detector_config.vision_config")
        vit = find_section(vision, "backbone_config")
        require_value(vit, "hidden_act", "gelu")
        require_value(vision, "hidden_act", "gelu")
        require_value(vit, "layer_scale_init_value", None)
        scales = read_field(vision, "scale_factors", default=SCALES)
        if not isinstance(scales, list | tuple):
            raise ValueError(f"config field scale_factors={scales!r}: must be a list of numbers")
        return cls(
            depth=read_size(vit, "num_hidden_layers", default=32, limit=1024),
            hidden_size=read_size(vit, "hidden_size", default=1024),
            intermediate_size=read_size(vit, "intermediate_size", default=4736),
            num_heads=read_size(vit, "num_attention_heads", default=16),
            global_blocks=read_indices(vit, "global_attn_indexes", (7, 15, 23, 31)),
            out_hidden_size=read_size(vision, "fpn_hidden_size", default=256),
            scales=tuple(scales),
            image_size=read_size(vit, "image_size", default=1008),
            pretrain_size=read_size(vit, "pretrain_image_size", default=336),
            window_size=read_size(vit, "window_size", default=24, limit=1024),
            patch_size=read_size(vit, "patch_size", default=14),
            in_channels=read_size(vit, "num_channels", default=3),
            rope_theta=read_rope_theta(vit),
            layer_norm_eps=read_epsilon(vit, "layer_norm_eps", default=1e-6),
        )


class Sam3Encoder(TileEncoder):
    """Encodes square views to hidden states and to tokens, the neck's map of the patches."""

    _largest_batch = 4
    _grid_multiple_name = "window_size"

    def __init__(self, config: Sam3Config, preprocessor: Preprocessor | None = None) -> None:
        super().__init__()
        self.config: Sam3Config = config
        self._preprocessor = preprocessor
        self._grid_multiple = config.window_size
        width = config.hidden_size
        self.patch_embed = PatchEmbed(width, config.patch_size, config.in_channels, bias=False)
        self.pos_embed = nn.Parameter(torch.randn(config.table_side**2, width))
        self.norm_pre = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.blocks: nn.ModuleList = nn.ModuleList(
            Block(config, windowed=n not in config.global_blocks) for n in range(config.depth)
        )
        self.neck = nn.ModuleList(
            Level(width, config.out_hidden_size, scale) for scale in config.scales
        )

    def _default_preprocessor(self) -> Preprocessor:
        from .sam3_pixels import Sam3Preprocessor

        return Sam3Preprocessor(self.config.patch_size, image_size=self.config.image_size)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode B views of n patches each to N tokens.

        Returns:
            ``last_hidden_state`` [B, n, D], ``pooler_output`` [N, C], the level of the neck that
            has the resolution of the patches, no DeepStack features.
        """
        metadata = self._resolve_metadata(pixel_values, grid_thw, encoder_metadata)
        hidden = self.embed_patches(pixel_values, metadata)
        for block in self.steps(self.blocks, hidden, metadata):
            hidden = block(hidden)
        rows = self.in_input_order(hidden, metadata)
        h, w = (size // self.config.patch_size for size in pixel_values.shape[2:])
        level = self.neck[self.config.scales.index(1.0)]
        tokens = rearrange(level(rows.mT.unflatten(2, (h, w))), "b c h w -> (b h w) c")
        return EncoderOutput(rows, tokens, ())

    def embed_patches(self, pixel_values: Tensor, metadata: Metadata) -> Tensor:
        """Embed views [B, C, H, W] as normed patches with positions, [B, n, D], by windows."""
        patches: Tensor = self.patch_embed(self._admit_tiles(pixel_values, self.pos_embed))
        (h, w), side = patches.shape[1:3], self.config.table_side
        table = self.pos_embed.view(side, side, -1).repeat(-(-h // side), -(-w // side), 1)
        embedded: Tensor = self.norm_pre(patches + table[:h, :w])
        return by_windows(embedded, self.config.window_size)

    def neck_maps(
        self, features: FeatureRows, inputs: VisionInputs | GridLike
    ) -> list[dict[str, Tensor]]:
        """Return the feature maps of all levels of the neck.

        Args:
            features: ``last_hidden_state`` of all items in one tensor, or a list with one tensor
                or output per item, as ``encoder(inputs)`` returns it.
            inputs: the result of ``preprocess``, or ``grid_thw`` [items, 3].

        Returns:
            For each item a dict of maps by level: "x4" [t, 4h, 4w, C], "x2", "x1", which has the
            tokens of ``pooler_output``, and "x0.5".

        Raises:
            ValueError: ``features`` are not the hidden states of ``inputs``.
        """
        if isinstance(inputs, VisionInputs):
            maps = [item["image"] for item in self.feature_maps(features, inputs)]
        else:
            maps = self._maps_of_grids(rows_of_all(features), inputs)
        if any(rows.shape[-1] != self.config.hidden_size for rows in maps):
            raise ValueError(
                f"the neck reads rows of {self.config.hidden_size} columns: pass last_hidden_state"
            )
        return [
            {
                f"x{scale:g}": level(rows.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
                for scale, level in zip(self.config.scales, self.neck, strict=True)
            }
            for rows in maps
        ]

    def in_input_order(self, rows: Tensor, metadata: Metadata) -> Tensor:
        """Return rows [B, n, ..] row by row, from rows window by window."""
        return rows[:, metadata["reverse_index"]]

    def _block_context(self, hidden: Tensor, metadata: Metadata) -> Context:
        """Return the tensors that blocks read to attend inside windows and over whole views."""
        require_metadata(metadata, "cu_window_seqlens")
        views = TileSegments.of(metadata, hidden)
        if hidden.shape[0]:
            rows = metadata["rotary_pos_emb_cos"].shape[0]
            check_rows(hidden.shape[1], rows, "per view but encoder_metadata is for")
        offsets, longest = metadata["cu_window_seqlens"], metadata["max_window_seqlen"]
        windows = TileSegments(offsets, longest, views.padding)
        cos, sin, cos_w, sin_w = (
            metadata[f"{kind}rotary_pos_emb_{name}"][:, None, None]
            for kind in ("", "window_")
            for name in ("cos", "sin")
        )
        return Context(RotarySegments(cos, sin, *views), RotarySegments(cos_w, sin_w, *windows))

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Return each item's views, output tokens, segments (its views), their length, windows."""
        area = self.config.window_size**2
        return [
            spec._replace(windows=spec.segments * spec.longest_segment // area)
            for spec in super().item_specs(grid_thw)
        ]

    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """Return the rotary angles of a view and of a window, which all of them share.

        ``rotary_pos_emb_cos`` and ``rotary_pos_emb_sin`` [n, K/2] are window by window, those of
        ``window_rotary_pos_emb_cos`` and ``.._sin`` [s*s, K/2] row by row. ``reverse_index`` int64
        [n] is the place of each patch in the order of windows. ``cu_window_seqlens`` is int32
        [W+1], ``max_window_seqlen`` the rows of a window, 0-dim int32.
        """
        h, w = self._shared_grid(grids, max_input_size)
        side, head = self.config.window_size, self.config.hidden_size // self.config.num_heads
        dtype = torch.promote_types(self.pos_embed.dtype, torch.float32)

        def angles(h: int, w: int, scale: float) -> tuple[Tensor, Tensor]:
            y, x = torch.meshgrid(
                torch.arange(h, device="cpu"), torch.arange(w, device="cpu"), indexing="ij"
            )
            places = by_windows(torch.stack((x, y), -1)[None], side)[0].to(dtype) * scale
            return rotary_cos_sin(places, head, self.config.rope_theta, dtype)

        cos, sin = angles(h, w, side / w)
        window_cos, window_sin = angles(side, side, 1.0)
        order = by_windows(torch.arange(h * w, device="cpu").view(1, h, w, 1), side).flatten()
        windows = h * w // side**2  # of a view
        counts = [side**2] * (windows * sum(t for t, _, _ in grids))
        if max_windows_per_batch is None and max_input_size is not None:
            max_windows_per_batch = windows * max_input_size
        return {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "window_rotary_pos_emb_cos": window_cos,
            "window_rotary_pos_emb_sin": window_sin,
            "reverse_index": order.argsort(),
            "cu_window_seqlens": padded_offsets(
                counts, max_windows_per_batch, "max_windows_per_batch", "windows"
            ),
            "max_window_seqlen": torch.tensor(side**2, dtype=torch.int32, device="cpu"),
        }


def by_windows(rows: Tensor, side: int) -> Tensor:
    """Return the rows of views [B, h, w, ..] window by window, [B, h*w, ..].

    Windows of ``side`` x ``side`` rows follow one another row by row, and so do rows inside one.
    """
    return rearrange(rows, "b (r p) (c q) d -> b (r c p q) d", p=side, q=side)


class Context(NamedTuple):
    """The tensors that every block reads, for attention over whole views or inside windows."""

    views: RotarySegments
    windows: RotarySegments


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: Sam3Config, *, windowed: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attn = Attention(config, windowed=windowed)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, "gelu")

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), context)
        return hidden + self.mlp(self.norm2(hidden))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        windowed = self.attn.windowed
        return plain_parts(self, "gelu")._replace(rotary_pair_distance=1, windowed=windowed)


class Attention(nn.Module):
    """Attention inside each window, or over each whole view; fused qkv rows are [Q; K; V]."""

    def __init__(self, config: Sam3Config, *, windowed: bool) -> None:
        super().__init__()
        self.num_heads, width = config.num_heads, config.hidden_size
        self.windowed = windowed
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        cos, sin, *segments = context.windows if self.windowed else context.views
        length = cos.shape[0]
        qkv = self.qkv(x).view(-1, length, 3, self.num_heads, x.shape[-1] // self.num_heads)
        q_THK, k_THK = rotate_pairs(qkv[:, :, :2], cos, sin).flatten(0, 1).unbind(1)
        v_THK = qkv[:, :, 2].flatten(0, 1)
        out_THK = attention(q_THK, k_THK, v_THK, *segments, segment_rows=length)
        out: Tensor = self.proj(out_THK.flatten(1))
        return out.view_as(x)


class Level(nn.Module):
    """One level of the neck: maps of another resolution, then two convolutions."""

    def __init__(self, width: int, out: int, scale: float) -> None:
        super().__init__()
        half = nn.ConvTranspose2d(width, width // 2, 2, stride=2)
        quarter = nn.ConvTranspose2d(width // 2, width // 4, 2, stride=2)
        layers: dict[float, list[nn.Module]] = {
            4.0: [half, nn.GELU(), quarter],
            2.0: [half],
            1.0: [],
            0.5: [nn.MaxPool2d(2)],
        }
        self.scale_layers = nn.ModuleList(layers[scale]) if layers[scale] else None
        self.proj1 = nn.Conv2d(width // max(int(scale), 1), out, 1)
        self.proj2 = nn.Conv2d(out, out, 3, padding=1)

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps [B, C, scale*h, scale*w] of maps [B, D, h, w]."""
        for layer in self.scale_layers or ():
            maps = upsample(layer, maps)
        return convolve(self.proj2, convolve(self.proj1, maps))
