"""The matrix products of a block in fp8, where a timing finds them faster than in bfloat16.

Inputs of products are quantised per row, by the kernel of the norm or of the MLP's activation
before the product; weights are quantised once, per output channel. Whether a step of a block runs
in fp8 is decided per shape: the step is timed both ways on random rows, and the decision is saved
and loaded with the choices of attention kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..block_parts import BlockParts
from ..layers.keyless_bias_linear import bias_of
from ..layers.torch_internals import fp8_product
from .attention.choices import rounded, saved_rows
from .derived import QuantisedWeights
from .obstacles import is_product
from .triton_kernels.quantise import Rows8, quantise

MULTIPLE = 16
"""torch's fp8 product takes weights whose rows and columns are multiples of this number."""

OUTLIER = 8.0
"""A weight column whose L2 norm is over this many times the median column's is an outlier: of 1,152
columns, it alone makes 64 / (1,151 + 64) = 5 % of a product's squared norm."""

Timer = Callable[[bool], float]
Aligned = Callable[[nn.Linear], tuple[Tensor, ...]]


class StepShape(NamedTuple):
    """A step of a block (qkv, proj or mlp), with the sizes that decide how long it takes."""

    step: str
    """"qkv" (norm and product), "proj" (only the product) or "mlp" (the MLP with its norm)."""
    rows: int
    columns: int
    """The number of columns of the input of the step."""
    inner: int
    """The number of columns of the first product of the step."""


class Fp8Products:
    """The fp8 weights of an encoder, and the linear layers and MLPs computed with them."""

    def __init__(self) -> None:
        self.derived = QuantisedWeights()
        self._runs_in_fp8: dict[StepShape, bool] = {}
        self._milliseconds: dict[StepShape, dict[str, float]] = {}
        self._even: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        """Whether the weight of each layer has no outlier columns, which fp8 would store badly."""
        self._untimed = False
        """Whether a capture left a step in bfloat16 that no run has timed."""

    def takes(self, step: str, parts: BlockParts, rows: Tensor, time: Timer) -> bool:
        """Return whether a step of a block is to run in fp8; a new shape is timed.

        Args:
            step: "qkv", "proj" or "mlp".
            parts: the layers of the block.
            rows: hidden rows [T, D]; only their count, dtype and device are read.
            time: runs the step in fp8 (True) or bfloat16 (False) and returns the milliseconds.
        """
        layers = _layers(step, parts)
        if rows.dtype != torch.bfloat16 or not all(map(_fits, layers)):
            return False
        inner, columns = layers[0].weight.shape
        # An MLP with a gate may have any width, because ``aligned_mlp`` pads it.
        padded = step == "mlp" and parts.gate is not None
        halves = 2 if step == "mlp" and parts.gate_in_up else 1
        if columns % MULTIPLE or (inner % (halves * MULTIPLE) and not padded):
            return False
        if step == "qkv" and any(len(layer.weight) % MULTIPLE for layer in layers):
            return False
        if not all(map(self._is_even, layers)):
            return False
        key = StepShape(step, rounded(len(rows)), columns, inner)
        in_fp8 = self._runs_in_fp8.get(key)
        if in_fp8 is None:
            if not rows.is_cuda:
                return self._runs_in_fp8.setdefault(key, True)
            if torch.cuda.is_current_stream_capturing():
                self._untimed = True
                return False  # a capture records kernels and runs none, so a later call times them
            times = {name: time(name == "fp8") for name in ("bf16", "fp8")}
            self._milliseconds[key] = times
            in_fp8 = self._runs_in_fp8[key] = times["fp8"] < times["bf16"]
        return in_fp8

    def _is_even(self, layer: nn.Linear) -> bool:
        """Return whether no input column of a weight is much larger than the others.

        Where a few columns dominate a product, their rounding errors do not average out: if three
        columns of every weight are 50 times as large, the tower is off by 20 % in fp8, and by 2 %
        in bfloat16 (Qwen2.5-VL-7B). Each weight is checked once, before its first product.
        """
        even = self._even.get(layer)
        if even is None:
            if layer.weight.is_cuda and torch.cuda.is_current_stream_capturing():
                self._untimed = True
                return False  # the values of a tensor cannot be read during a capture
            sizes = layer.weight.detach().float().norm(dim=0)
            even = self._even[layer] = bool(sizes.max() <= OUTLIER * sizes.median())
        return even

    def settle(self) -> bool:
        """Return whether every step of the captures since the last call had been timed by a run."""
        timed, self._untimed = not self._untimed, False
        return timed

    def linear(self, layer: nn.Linear, rows: Rows8) -> Tensor:
        """Apply a plain linear layer to quantised rows [T, K]; the result is bfloat16 [T, N]."""
        (weight,) = self.derived.of(layer, layer.weight)
        return product(rows, weight, bias_of(layer))

    def quantise(self, rows: Tensor) -> Rows8:
        """Quantise rows [T, K] to fp8 (e4m3), each with its own scale."""
        return quantise(rows)

    def mlp(self, parts: BlockParts, rows: Rows8, aligned: Aligned) -> Tensor:
        """Apply the MLP of a block to quantised rows [T, D]; the result is bfloat16 [T, D].

        The activation and the quantisation of its result are one kernel.

        Args:
            parts: the layers of the block.
            rows: the normalised rows.
            aligned: takes the gate layer and returns weights of padded width (gate and up as one,
                their bias, and down); called if the inner width is not a multiple of 16.
        """
        gate, up, down = parts.gate, parts.up, parts.down
        activated = partial(quantise, kind=parts.activation, limit=parts.gate_limit)
        if parts.gate_in_up:
            gated, up_rows = self.linear(up, rows).chunk(2, dim=-1)
            return self.linear(down, activated(gated, up=up_rows))
        if gate is None:
            return self.linear(down, activated(self.linear(up, rows)))
        if down.weight.shape[1] % MULTIPLE == 0:
            gated, up_rows = self.linear(gate, rows), self.linear(up, rows)
            return self.linear(down, activated(gated, up=up_rows))
        gate_and_up, bias, weight = aligned(gate)
        first, last = self.derived.of(parts.containers[-1], gate_and_up, weight)
        gated, up_rows = product(rows, first, bias).chunk(2, dim=-1)
        return product(activated(gated, up=up_rows), last, down.bias)

    def to_dict(self) -> list[dict[str, object]]:
        """Return which steps run in fp8, with the times measured, as plain data for JSON."""
        return [
            {**shape._asdict(), "fp8": in_fp8, "ms": self._milliseconds.get(shape, {})}
            for shape, in_fp8 in self._runs_in_fp8.items()
        ]

    def load(self, choices: object) -> None:
        """Use the choices that :meth:`to_dict` returned in another process.

        Raises:
            ValueError: ``choices`` has another form.
        """
        in_fp8 = {}
        try:
            for row in saved_rows(choices):
                shape = StepShape._make(row[name] for name in StepShape._fields)
                in_fp8[shape] = bool(row["fp8"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"these are not choices of products ({error!r}): "
                "pass the result of kernel_choices()"
            ) from error
        self._runs_in_fp8.update(in_fp8)


def product(rows: Rows8, weight: Rows8, bias: Tensor | None) -> Tensor:
    """Return the fp8 product ``rows @ weight.T + bias``, bfloat16 [T, N], of [T, K] and [N, K]."""
    return fp8_product(rows.values, weight.values, rows.scales, weight.scales, bias)


def _layers(step: str, parts: BlockParts) -> tuple[nn.Linear, ...]:
    """Return the linear layers of one step of a block: "qkv", "proj" or "mlp"."""
    if step == "mlp":
        return tuple(x for x in (parts.gate, parts.up, parts.down) if x is not None)
    return (parts.qkv, *(parts.key_value or ())) if step == "qkv" else (parts.proj,)


def _fits(layer: nn.Module) -> bool:
    """Return whether a layer is a plain bfloat16 product, which can run in fp8."""
    return is_product(layer) and layer.weight.dtype == torch.bfloat16
