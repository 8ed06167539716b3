"""The weights of a gated MLP whose inner width is padded, so that matrix products run fast."""

from __future__ import annotations

from torch import Tensor, nn

from ..block_parts import BlockParts
from .derived import DerivedWeights, Pair

ALIGNED = 64
"""Inner widths that are no multiple of 8 are padded to a multiple of this many columns. For times
see :func:`aligned_mlp`."""


def aligned_mlp(derived: DerivedWeights, parts: BlockParts, gate: nn.Linear) -> tuple[Tensor, ...]:
    """Return the weights of a gated MLP, its inner width padded with zeros to W columns.

    A width such as 3,420 is not a multiple of 8, and cuBLAS has no fast kernel for it: 6,272 rows
    take 283 us on an H200, and 82 us with a width of 3,456.

    Args:
        derived: keeps the padded weights, and updates them when the layers' weights change.
        parts: the layers of the block that contains the MLP.
        gate: the gate layer of the MLP.

    Returns:
        For hidden states of D columns: the weight of gate and up [2W, D], their bias [2W], and the
        weight of down [D, W].

    Raises:
        ValueError: the weights have different dtypes.
    """
    up, down = parts.up, parts.down
    biases = [layer.bias for layer in (gate, up)]
    sources = [gate.weight, up.weight, down.weight, *(x for x in biases if x is not None)]

    def make() -> tuple[tuple[Tensor, ...], list[Pair]]:
        if len(dtypes := sorted({str(x.dtype) for x in sources})) > 1:
            raise ValueError(
                f"the weights of an MLP are {' and '.join(dtypes)}: cast the encoder to one of "
                "them, encoder.to(dtype)"
            )
        width, columns = gate.weight.shape
        pad = -width % ALIGNED
        gate_and_up = gate.weight.new_zeros(2, width + pad, columns)
        bias = gate.weight.new_zeros(2, width + pad)
        padded_down = down.weight.new_zeros(len(down.weight), width + pad)
        pairs: list[Pair] = [
            (layer.weight, gate_and_up[n, :width]) for n, layer in enumerate((gate, up))
        ]
        pairs += [(down.weight, padded_down[:, :width])]
        pairs += [(x, bias[n, :width]) for n, x in enumerate(biases) if x is not None]
        return (gate_and_up.flatten(0, 1), bias.flatten(), padded_down), pairs

    return derived.get(parts.containers[-1], sources, make)
