"""SAM's vision tower, as DeepSeek-VL-7B and DeepSeek-OCR use it: windows, relative positions, neck.

Source: ``ImageEncoderViT`` in ``deepencoder/sam_vary_sdpa.py`` of deepseek-ai/DeepSeek-OCR at
commit e4ac34e and in ``deepseek_vl/models/sam.py`` of deepseek-ai/DeepSeek-VL at commit 681bffb,
whose names its modules have; ``SamVisionEncoder`` and ``UnlimitedOcrSamVisionEncoder`` of
transformers 5.23.0.

Shapes: B views of h x w patches, n patches of a view or window, D width, H heads, K head size,
R = h + w relative positions.

Deliberate differences:

- Relative positions are extra columns of queries and keys instead of a bias on the scores. The
  bias of a query at (y, x) for a key at (y', x') is ``q . table_h[y - y'] + q . table_w[x - x']``,
  a sum over one-hot columns of the key: with q' = [q * K**-0.5, q . table_h[y - .], q . table_w[x -
  .]] and k' = [k, onehot(y'), onehot(x')] plain attention computes it. The bias of one view of
  1024x1024 pixels has 12 x 4096 x 4096 numbers, 403 MB in half precision; the columns have 25 MB.
- The patch embedding is a Linear over the stored Conv2d weight: same sums, one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..block_parts import BlockParts, RelativePositions, plain_parts
from ..hf_config import (
    read_indices,
    read_ratio,
    read_size,
    require_divisible,
    require_sizes,
    require_value,
)
from ..layers.attention import observe_attention
from ..layers.blocks import MLP, resize_table
from ..layers.products import PatchEmbed, convolve


@dataclass(frozen=True)
class SamSizes:
    """The sizes of a SAM tower: depth, widths, image, windows and patches."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    global_blocks: tuple[int, ...]
    """Numbers of the blocks that attend over the whole view; the others attend in windows."""
    image_size: int
    """The side in pixels of the views that the tables of positions were made for."""
    neck_channels: int = 256
    window_size: int = 14
    patch_size: int = 16
    in_channels: int = 3
    layer_norm_eps: float = 1e-6

    @property
    def out_hidden_size(self) -> None:
        """The width of tokens; None, because SAM has no projector of its own."""

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        require_divisible("image_size", self.image_size, "patch_size", self.patch_size)
        if not self.global_blocks or any(
            not 0 <= number < self.depth for number in self.global_blocks
        ):
            raise ValueError(
                f"config: global_attn_indexes={list(self.global_blocks)}: the tower has blocks 0 "
                f"to {self.depth - 1}"
            )

    @classmethod
    def from_hf(cls, section: Mapping[str, object]) -> SamSizes:
        """Read the part of a config that describes SAM, by DeepSeek's names or by transformers'.

        A size that the config leaves out is SAM-B's, as in DeepSeek's code and in transformers.

        Raises:
            ValueError: a value that is not implemented or is not a size, or sizes that disagree.
        """
        require_value(section, "hidden_act", "gelu")
        require_value(section, "layer_norm_eps", 1e-6)
        for part in ("qkv_bias", "use_abs_pos", "use_rel_pos"):
            require_value(section, part, True)
        width = read_size(section, "width", "hidden_size", default=768)
        mlp = int(width * read_ratio(section, "mlp_ratio", default=4.0))
        return cls(
            depth=read_size(section, "layers", "num_hidden_layers", default=12, limit=1024),
            hidden_size=width,
            intermediate_size=read_size(section, "mlp_dim", "intermediate_size", default=mlp),
            num_heads=read_size(section, "heads", "num_attention_heads", default=12),
            global_blocks=read_indices(section, "global_attn_indexes", (2, 5, 8, 11)),
            image_size=read_size(section, "image_size", default=1024),
            neck_channels=read_size(section, "neck_channels", "output_channels", default=256),
            window_size=read_size(section, "window_size", default=14, limit=1024),
            patch_size=read_size(section, "patch_size", default=16),
            in_channels=read_size(section, "num_channels", default=3),
        )

    @property
    def tile_size(self) -> int:
        """The side in pixels of a view, which is the whole image or a tile of it."""
        return self.image_size

    @property
    def side(self) -> int:
        """Patches per side of the views that the tables of positions were made for."""
        return self.image_size // self.patch_size


def read_channels(section: Mapping[str, object], name: str) -> tuple[int, ...]:
    """Read the widths of the convolutions after the neck from field ``name``, or [512, 1024]."""
    widths = read_indices(section, name, (512, 1024))
    if len(widths) != 2 or min(widths) < 1:
        raise ValueError(f"config field {name}={list(widths)}: must be two positive integers")
    return widths


class Sam(nn.Module):
    """The layers of SAM's image encoder (Segment Anything), from the pixels to the neck."""

    def __init__(self, sizes: SamSizes) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(sizes.hidden_size, sizes.patch_size, sizes.in_channels)
        self.pos_embed = nn.Parameter(torch.randn(1, sizes.side, sizes.side, sizes.hidden_size))
        self.blocks = nn.ModuleList(
            SamBlock(sizes, 0 if number in sizes.global_blocks else sizes.window_size)
            for number in range(sizes.depth)
        )
        self.neck = Neck(sizes)

    def embed_patches(self, pixels: Tensor) -> Tensor:
        """Return patches with their positions, [B, h, w, D], of views [B, C, H, W]."""
        rows: Tensor = self.patch_embed(pixels)
        h, w = rows.shape[1:3]
        table = resize_table(self.pos_embed.flatten(0, 2), h, w, antialias=True)
        return rows + torch.unflatten(table, 0, (h, w))


class SamBlock(nn.Module):
    """Pre-norm attention, in windows or over the whole view, and MLP."""

    def __init__(self, sizes: SamSizes, window: int) -> None:
        super().__init__()
        self.window = window
        """The side of an attention window in patches; 0 means that the whole view attends."""
        self.norm1 = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.attn = SamAttention(sizes.hidden_size, sizes.num_heads, window or sizes.side)
        self.norm2 = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.mlp = MLP(sizes.hidden_size, sizes.intermediate_size, "gelu")

    def forward(self, hidden: Tensor, context: None = None) -> Tensor:
        """Run the block on views [B, h, w, D]; ``context`` is unused, as attention needs none."""
        hidden = hidden + self.cut_views(self.attn, self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))

    def cut_views(self, attend: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply ``attend`` to the windows of views ``x`` [B, h, w, D], or to the whole views."""
        return in_windows(attend, x, self.window) if self.window else attend(x)

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (SamBlock, SamAttention, MLP):
            return None
        return plain_parts(self, self.mlp.activation)._replace(
            relative=RelativePositions(self.attn.tables, self.window)
        )


class SamAttention(nn.Module):
    """Attention over a grid of patches with relative positions on both axes."""

    def __init__(self, width: int, num_heads: int, side: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.rel_pos_h = nn.Parameter(torch.randn(2 * side - 1, width // num_heads))
        self.rel_pos_w = nn.Parameter(torch.randn(2 * side - 1, width // num_heads))

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        q, k, v = rearrange(self.qkv(x), "b h w (s n k) -> s b n h w k", s=3, n=self.num_heads)
        rows_h, rows_w = (relative_rows(table) for table in self.tables(h, w))
        wide_q, wide_k = relative_columns(q, k, rows_h, rows_w)
        observe_attention(wide_q, wide_k, None, scale=1.0)
        # One width for q, k and v lets flash attention take it; the added columns of v are zero.
        wide_v = F.pad(v.flatten(2, 3), (0, h + w))
        rows = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, scale=1.0)[..., : v.shape[-1]]
        return self.proj(rearrange(rows, "b n (h w) k -> b h w (n k)", h=h))

    def tables(self, h: int, w: int) -> tuple[Tensor, Tensor]:
        """Return the relative positions [2*h - 1, K] and [2*w - 1, K] of views of h*w patches."""
        return resize_relative(self.rel_pos_h, h), resize_relative(self.rel_pos_w, w)


class Neck(nn.Sequential):
    """1x1 and 3x3 convolutions, each with a norm over the channels."""

    def __init__(self, sizes: SamSizes) -> None:
        inner = sizes.neck_channels
        super().__init__(
            nn.Conv2d(sizes.hidden_size, inner, 1, bias=False),
            LayerNorm2d(inner, eps=sizes.layer_norm_eps),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False),
            LayerNorm2d(inner, eps=sizes.layer_norm_eps),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Project hidden states [B, h, w, D] to feature maps [B, C, h, w]."""
        maps = hidden.permute(0, 3, 1, 2)
        for layer in self:
            maps = convolve(layer, maps)
        return maps


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of [B, C, h, w]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def in_windows(attend: Callable[[Tensor], Tensor], x: Tensor, side: int) -> Tensor:
    """Apply attention inside windows of ``side`` x ``side`` patches.

    The view is padded with zeros at the right and at the bottom to whole windows. Padded rows are
    not masked: as in SAM's code, they take part in the softmax of the windows at the edge.

    Args:
        attend: a function of [B, side, side, D].
        x: [B, h, w, D].
        side: side of a window in patches.

    Returns:
        [B, h, w, D].
    """
    h, w = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, -w % side, 0, -h % side))
    rows, columns = x.shape[1] // side, x.shape[2] // side
    windows = rearrange(x, "b (r p) (c q) d -> (b r c) p q d", p=side, q=side)
    out = rearrange(attend(windows), "(b r c) p q d -> b (r p) (c q) d", r=rows, c=columns)
    return out[:, :h, :w]


def resize_relative(table: Tensor, size: int) -> Tensor:
    """Resize a table of relative positions to an axis of another length.

    Args:
        table: [2*side - 1, K], for the distances ``1 - side`` to ``side - 1``.
        size: positions on the axis.

    Returns:
        [2*size - 1, K], interpolated linearly in float32 or wider; ``table`` itself if it has this
        size.
    """
    if len(table) == 2 * size - 1:
        return table
    float_table = table.to(torch.promote_types(table.dtype, torch.float32)).t()[None]
    return F.interpolate(float_table, size=2 * size - 1, mode="linear")[0].t().to(table.dtype)


def relative_rows(table: Tensor) -> Tensor:
    """Return row ``q - k`` of a table of relative positions for all positions q and k of an axis.

    Args:
        table: [2*size - 1, K], for the distances ``1 - size`` to ``size - 1``.

    Returns:
        [size, size, K], queries first.
    """
    size = (len(table) + 1) // 2
    positions = torch.arange(size, device=table.device)
    return table[positions[:, None] - positions + size - 1]


def relative_columns(q: Tensor, k: Tensor, rows_h: Tensor, rows_w: Tensor) -> tuple[Tensor, Tensor]:
    """Append columns to queries and keys, so that their products include the position biases.

    Args:
        q: [B, H, h, w, K].
        k: [B, H, h, w, K].
        rows_h: [h, h, K], the result of :func:`relative_rows` for the vertical axis.
        rows_w: [w, w, K], the result for the horizontal axis.

    Returns:
        Queries, scaled by ``K ** -0.5``, and keys, both [B, H, h*w, K + h + w].
    """
    h, w, size = q.shape[2:]
    of_h = torch.einsum("b n h w k, h y k -> b n h w y", q, rows_h)
    of_w = torch.einsum("b n h w k, w x k -> b n h w x", q, rows_w)
    hot_h = torch.eye(h, dtype=k.dtype, device=k.device)[:, None].expand(h, w, h)
    hot_w = torch.eye(w, dtype=k.dtype, device=k.device)[None].expand(h, w, w)
    hot = torch.cat((hot_h, hot_w), dim=-1).expand(*k.shape[:2], -1, -1, -1)
    wide_q = torch.cat((q * size**-0.5, of_h, of_w), dim=-1)
    return wide_q.flatten(2, 3), torch.cat((k, hot), dim=-1).flatten(2, 3)
