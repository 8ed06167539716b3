"""Comparisons of outputs for the tests of graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from encoders.contract import EncoderOutput, OutputField, PartialOutput

Output = EncoderOutput | PartialOutput
EVERY_FIELD: tuple[OutputField, ...] = ("last_hidden_state", "pooler_output", "deepstack_features")


def fields(output: Output) -> dict[str, Tensor]:
    """Return the tensors of an output by name, without the fields that are None."""
    named = {
        "last_hidden_state": output.last_hidden_state,
        "pooler_output": output.pooler_output,
        **{f"deepstack_features[{n}]": x for n, x in enumerate(output.deepstack_features or ())},
    }
    return {name: value for name, value in named.items() if value is not None}


def assert_same_bits(ours: Output, theirs: Output) -> None:
    assert fields(ours).keys() == fields(theirs).keys()
    for name, value in fields(ours).items():
        assert torch.equal(value, fields(theirs)[name]), name


def worst_distance(ours: Output, theirs: Output) -> float:
    """Return the largest relative L2 distance of any field of two outputs."""
    assert fields(ours).keys() == fields(theirs).keys()
    worst = 0.0
    for name, value in fields(ours).items():
        value, other = value.double(), fields(theirs)[name].double()
        assert value.shape == other.shape, name
        worst = max(worst, float((value - other).norm() / other.norm().clamp(min=1e-30)))
    return worst


def copy_of(output: Output) -> PartialOutput:
    """Return a copy of an output in other memory."""
    hidden, pooled, deep, *_ = output
    return PartialOutput(
        None if hidden is None else hidden.clone(),
        None if pooled is None else pooled.clone(),
        None if deep is None else tuple(layer.clone() for layer in deep),
    )
