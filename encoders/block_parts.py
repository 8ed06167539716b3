"""The layers of a block by role: what an accelerator asks of the blocks of an encoder.

Shapes: D tower width, B views of h*w patches, K width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

Gelu: TypeAlias = Literal["gelu", "gelu_tanh", "quick_gelu"]
Activation: TypeAlias = Literal[Gelu, "silu"]
PartNorm: TypeAlias = nn.LayerNorm | nn.RMSNorm | nn.Identity


class RelativePositions(NamedTuple):
    """The learned relative positions by which a block over views [B, h, w, D] attends (SAM)."""

    tables: Callable[[int, int], tuple[Tensor, Tensor]]
    """Takes height and width of what attends to itself; returns the tables [2*height - 1, K] and
    [2*width - 1, K] for the distances ``1 - size`` to ``size - 1`` between query and key."""
    window: int
    """Side of the windows of attention, or 0 for the whole view. Rows that the windows at the right
    and lower edges have beyond the view are zeros before ``qkv``, and take part in the softmax."""


class BlockParts(NamedTuple):
    """The layers of one pre-norm block by role, for code that runs its steps in another way.

    Each layer has the type given here, or is a module that replaces it (LoRA, quantised). A block
    computes ``x += scale1 * post_norm1(proj(attention(qkv(norm1(x)))))`` and ``x += scale2 *
    post_norm2(down(activation(up(norm2(x)))))``, the activation of ``gate`` times ``up`` if there
    is a gate.
    """

    containers: tuple[nn.Module, ...]
    """The block, its attention and its MLP: the modules on which a hook could be registered."""
    norm1: PartNorm
    qkv: nn.Linear
    """The fused projection of queries, keys and values: rows are [Q; K; V], each head-major."""
    proj: nn.Linear
    norm2: PartNorm
    up: nn.Linear
    down: nn.Linear
    num_heads: int
    activation: Activation
    gate: nn.Linear | None = None
    scale1: Tensor | None = None
    """The layer scale [D], which multiplies the output of the attention."""
    scale2: Tensor | None = None
    post_norm1: PartNorm | None = None
    post_norm2: PartNorm | None = None
    gate_limit: float | None = None
    """Largest input of the activation of ``gate``, and largest factor ``up`` of either sign."""
    q_norm: PartNorm | None = None
    """Norm over the query rows, all heads together or each by itself (``head_norms``)."""
    k_norm: PartNorm | None = None
    v_norm: PartNorm | None = None
    head_norms: bool = False
    """Whether these norms are over the rows of one head, with one weight for all or none."""
    softmax_scale: float | None = None
    """The factor of the products of queries and keys in softmax; None means K ** -0.5."""
    num_key_value_heads: int | None = None
    """Heads of keys and of values, each shared by a group of query heads; None: ``num_heads``."""
    windowed: bool = False
    """Whether attention stays inside ``cu_window_seqlens`` instead of ``cu_seqlens``."""
    rotary_pair_distance: int | None = None
    """Columns from one of a rotary pair to the other, inside groups of twice as many; None: as many
    as a row has angles, which is K/2 unless the last columns of a head pass as they are."""
    relative: RelativePositions | None = None
    """The relative positions of a block in which each view attends to itself alone, or None."""


@runtime_checkable
class NamesItsParts(Protocol):
    """A block that lists its layers by role."""

    def parts(self) -> BlockParts | None:
        """Return the layers by role, or None for a block that ``BlockParts`` does not describe."""
        ...
