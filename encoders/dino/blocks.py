"""The transformer blocks of DINOv2 and DINOv3: plain pre-norm blocks with a scale per branch.

Shapes: T packed rows, D width, H heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.attention import attention
from ..layers.keyless_bias_linear import KeylessBiasLinear
from ..layers.rotary import rotate
from ..layers.segments import RotarySegments, TileSegments

if TYPE_CHECKING:
    from ..block_parts import BlockParts


@dataclass(frozen=True)
class DinoBlockSizes:
    """The widths of a block, and which of the layers that sizes differ in it has."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    layer_norm_eps: float
    gated: bool
    """Whether the MLP has a gate with SiLU (SwiGLU); else its activation is exact GELU."""
    key_bias: bool
    """Whether the projection of keys has a bias, as that of queries and values may have."""
    query_value_bias: bool = True


class Block(nn.Module):
    """Pre-norm attention and MLP, each scaled per channel and added to the residual."""

    def __init__(self, sizes: DinoBlockSizes) -> None:
        super().__init__()
        width, eps = sizes.hidden_size, sizes.layer_norm_eps
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.attn = Attention(sizes)
        self.mlp = MLP(width, sizes.intermediate_size, sizes.gated)
        self.ls1, self.ls2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor, context: TileSegments | RotarySegments) -> Tensor:
        hidden = torch.addcmul(hidden, self.attn(self.norm1(hidden), context), self.ls1)
        return torch.addcmul(hidden, self.mlp(self.norm2(hidden)), self.ls2)

    def parts(self) -> BlockParts | None:
        """Return the layers by role, for fused kernels; None if attention or MLP was replaced."""
        from ..block_parts import plain_parts

        if (type(self), type(self.attn), type(self.mlp)) != (Block, Attention, MLP):
            return None
        gated = self.mlp.gated
        parts = plain_parts(self, "silu" if gated else "gelu")
        return parts._replace(scale1=self.ls1, scale2=self.ls2, gate_in_up=gated)


class Attention(nn.Module):
    """Full attention inside each segment; queries and keys are rotated if there are angles."""

    def __init__(self, sizes: DinoBlockSizes) -> None:
        super().__init__()
        self.num_heads, width = sizes.num_heads, sizes.hidden_size
        bias = sizes.query_value_bias
        self.qkv: nn.Linear
        if bias and not sizes.key_bias:
            self.qkv = KeylessBiasLinear(width)
        else:
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, context: TileSegments | RotarySegments) -> Tensor:
        qkv_T3HK = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q_THK, k_THK, v_THK = qkv_T3HK.unbind(1)
        if isinstance(context, RotarySegments):
            q_THK, k_THK = rotate(qkv_T3HK[:, :2], context.cos, context.sin).unbind(1)
        offsets, longest = context.cu_seqlens, context.max_seqlen
        out_THK = attention(q_THK, k_THK, v_THK, offsets, longest, padding=context.padding)
        return self.proj(out_THK.flatten(1))


class MLP(nn.Module):
    """Two linear layers with exact GELU between them or, if ``gated``, ``silu(gate) * up``."""

    def __init__(self, width: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.fc1 = nn.Linear(width, 2 * inner if gated else inner)  # gated: rows are [gate; up]
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.fc2(F.gelu(self.fc1(x)))
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)
