"""Plain pre-norm transformer blocks, as in SigLIP and CLIP, over views or packed rows.

Shapes: B views (images or tiles) of n rows, T packed rows, D width, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..block_parts import BlockParts, plain_parts
from ..hf_config import require_sizes
from .attention import attention
from .segments import TileSegments

Sizes = TypeVar("Sizes")

Gelu: TypeAlias = Literal["gelu", "gelu_tanh", "quick_gelu"]
"""The activation: exact GELU, its tanh form, or ``x * sigmoid(1.702 x)``."""


@dataclass(frozen=True)
class BlockSizes:
    """The depth and the widths of a stack of transformer blocks."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    activation: Gelu
    layer_norm_eps: float

    def __post_init__(self) -> None:
        require_sizes(vars(self))
        if self.activation not in get_args(Gelu):
            raise ValueError(
                f'activation={self.activation!r}: must be "gelu", "gelu_tanh" or "quick_gelu"'
            )


def nested_sizes(  # type: ignore[explicit-any]  # each kind has keywords of its own
    kind: Callable[..., Sizes], value: Sizes | Mapping[str, object]
) -> Sizes:
    """Return ``value``, or ``kind(**value)`` if it is a mapping, such as ``asdict(sizes)``."""
    return kind(**value) if isinstance(value, Mapping) else value


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.attn = Attention(sizes)
        self.norm2 = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.mlp = MLP(sizes.hidden_size, sizes.intermediate_size, sizes.activation)

    def forward(self, hidden: Tensor, context: TileSegments) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), context)
        return hidden + self.mlp(self.norm2(hidden))

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        return plain_parts(self, self.mlp.activation)


class Attention(nn.Module):
    """Full attention inside each view [B, n, D], or each segment (image) packed in [T, D]."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.num_heads, width = sizes.num_heads, sizes.hidden_size
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, context: TileSegments) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK, v_THK = qkv.flatten(0, -4).unbind(1)
        rows = x.shape[1] if x.ndim == 3 else 0  # views are equally long, packed segments are not
        out_THK = attention(q_THK, k_THK, v_THK, *context, segment_rows=rows)
        out: Tensor = self.proj(out_THK.flatten(1))
        return out.view_as(x)


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, width: int, inner: int, activation: Gelu) -> None:
        super().__init__()
        self.activation = activation
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(activate(self.fc1(x), self.activation))


def activate(x: Tensor, activation: Gelu) -> Tensor:
    """Apply "gelu" (erf), "gelu_tanh" or "quick_gelu" (``x * sigmoid(1.702 x)``)."""
    if activation == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def resize_table(table: Tensor, h: int, w: int, antialias: bool) -> Tensor:
    """Resize a square table of positions to another grid, bicubically, in float32 or wider.

    Args:
        table: [side*side, D], row by row.
        h: height of the grid.
        w: width of the grid.
        antialias: whether the interpolation antialiases; published towers differ in this.

    Returns:
        [h*w, D] in the dtype of ``table``; ``table`` itself if the grid has its size.
    """
    side = round(len(table) ** 0.5)
    if (h, w) == (side, side):
        return table
    float_table = table.to(torch.promote_types(table.dtype, torch.float32))
    grid = rearrange(float_table, "(h w) d -> 1 d h w", h=side)
    # On the CPU, torch 2.15 antialiases contiguous float maps to one column wrongly. In the memory
    # format channels_last it agrees with PIL.
    grid = grid.clone(memory_format=torch.channels_last)
    grid = F.interpolate(
        grid, size=(h, w), mode="bicubic", antialias=antialias, align_corners=False
    )
    return rearrange(grid, "1 d h w -> (h w) d").to(table.dtype)
