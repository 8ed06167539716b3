"""The layers of a transformer block by role, which an accelerator reads to fuse their steps.

Shapes: D tower width, B views of h*w patches, K width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from torch import Tensor, nn

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
PartNorm: TypeAlias = nn.LayerNorm | nn.RMSNorm | nn.Identity


class RelativePositions(NamedTuple):
    """The learned relative position biases of attention in a SAM block over maps [B, h, w, D]."""

    tables: Callable[[int, int], tuple[Tensor, Tensor]]
    """Takes height and width of a window or view in patches; returns tables [2*height - 1, K] and
    [2*width - 1, K], one row per distance from query to key, ``1 - size`` to ``size - 1``."""
    window: int
    """Side of attention windows in patches; 0: attention is over the whole view. Windows at edges
    are padded with rows that are zero before ``qkv`` and take part in the softmax."""


class BlockParts(NamedTuple):
    """The layers of one pre-norm block by role, for code that runs its steps with fused kernels.

    Each layer has the type given here, or is a module that replaces it (LoRA, quantised). A block
    computes ``x += scale1 * post_norm1(proj(attention(qkv(norm1(x)))))`` and ``x += scale2 *
    post_norm2(down(activation(up(norm2(x)))))`` or, with a gate, ``down(activation(gate) * up)``.
    """

    containers: tuple[nn.Module, ...]
    """The block, its attention and its MLP: the modules on which a hook could be registered."""
    norm1: PartNorm
    qkv: nn.Linear
    """The fused projection of queries, keys and values: rows are [Q; K; V], each head-major. With
    ``key_value`` it projects queries only."""
    proj: nn.Linear
    norm2: PartNorm
    up: nn.Linear
    down: nn.Linear
    num_heads: int
    activation: Activation
    gate: nn.Linear | None = None
    gate_in_up: bool = False
    """Whether ``up`` is two layers in one: its rows are [gate; up]. ``gate`` is then None."""
    scale1: Tensor | None = None
    """The layer scale [D], which multiplies the output of the attention."""
    scale2: Tensor | None = None
    post_norm1: PartNorm | None = None
    post_norm2: PartNorm | None = None
    gate_limit: float | None = None
    """The output of ``gate`` is clamped to at most this, ``up`` to +- this; None: not clamped."""
    q_norm: PartNorm | None = None
    """The norm of queries, over all heads together or over each (``head_norms``); None: no norm."""
    k_norm: PartNorm | None = None
    v_norm: PartNorm | None = None
    head_norms: bool = False
    """Whether ``q_norm``, ``k_norm`` and ``v_norm`` normalise each head; heads share the weight."""
    softmax_scale: float | None = None
    """The factor of query-key products before the softmax; None: ``head size ** -0.5``."""
    num_key_value_heads: int | None = None
    """Heads of keys and of values, each shared by a group of query heads; None: ``num_heads``."""
    windowed: bool = False
    """Whether attention stays in the windows of ``cu_window_seqlens``, not in ``cu_seqlens``."""
    rotary_pair_distance: int | None = None
    """Columns i and i + distance of each group of 2 * distance columns of a head rotate together.
    None: the distance is the number of angles of a row, K/2 if all K columns of a head rotate."""
    relative: RelativePositions | None = None
    """The relative position biases of a block of SAM; None for all other blocks."""
    key_value: tuple[nn.Linear, nn.Linear] | None = None
    """The projections of keys and of values, if they are layers of their own."""
    causal_half: bool = False
    """Whether the first half of each view attends to that half, and each row of the second half to
    the rows up to itself."""


@runtime_checkable
class NamesItsParts(Protocol):
    """A transformer block with a method ``parts`` that lists its layers by role."""

    def parts(self) -> BlockParts | None:
        """Return the block's layers by role, or None if ``BlockParts`` cannot describe them."""
        ...


@runtime_checkable
class CutsViews(Protocol):
    """A block over views [B, h, w, D], as in SAM, with attention inside a view or windows of it."""

    def cut_views(self, attend: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply ``attend`` to views ``x`` [B, h, w, D] or each window; return [B, h, w, ..]."""
        ...


class PlainAttention(Protocol):
    """Attention whose layers have the names that most families give them."""

    @property
    def num_heads(self) -> int: ...
    @property
    def qkv(self) -> nn.Linear: ...
    @property
    def proj(self) -> nn.Linear: ...


class PlainMLP(Protocol):
    """An MLP of two linear layers, without a gate."""

    @property
    def fc1(self) -> nn.Linear: ...
    @property
    def fc2(self) -> nn.Linear: ...


class PlainBlock(Protocol):
    """A pre-norm block of attention and MLP whose layers have the names of most families."""

    @property
    def norm1(self) -> PartNorm: ...
    @property
    def attn(self) -> PlainAttention: ...
    @property
    def norm2(self) -> PartNorm: ...
    @property
    def mlp(self) -> PlainMLP: ...


def plain_parts(block: PlainBlock, activation: Activation) -> BlockParts:
    """Return the layers of a block by role, if they have the usual names and the MLP has no gate.

    Args:
        block: the block; the caller has checked that its MLP has no gate.
        activation: the activation between the two layers of the MLP.
    """
    return BlockParts(
        containers=cast("tuple[nn.Module, ...]", (block, block.attn, block.mlp)),
        norm1=block.norm1,
        qkv=block.attn.qkv,
        proj=block.attn.proj,
        norm2=block.norm2,
        up=block.mlp.fc1,
        down=block.mlp.fc2,
        num_heads=block.attn.num_heads,
        activation=activation,
    )
