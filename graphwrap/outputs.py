"""Outputs as tensors by field name, and tensors by field name as outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, cast

from torch import Tensor

from encoders.contract import OUTPUT_FIELDS, EncoderOutput, PartialOutput, is_of_prefix

Unit: TypeAlias = Literal["rows", "hidden", "tokens", "segments"]
"""What an output field has one entry for: an input row, a row of the hidden state after the last
block, an output token, or a segment."""


def unit_of(name: str) -> Unit:
    """Return the unit of which the field or extra ``name`` of an output has one entry each."""
    if is_of_prefix(name):
        return "segments"
    if name == "last_hidden_state":
        return "hidden"
    is_of_tokens = name.startswith(("pooler_output", "deepstack_features"))
    return "tokens" if is_of_tokens else "rows"


def output_fields(
    output: EncoderOutput | PartialOutput, names: Sequence[str] = OUTPUT_FIELDS
) -> dict[str, Tensor]:
    """Return the tensors of an output that ``names`` lists, by name, without fields that are None.

    The field "deepstack_features" becomes one tensor per layer, "deepstack_features.0" and so on;
    all extras are among them, because the encoder gives only those that were asked for.
    An ``output`` of another type raises a TypeError.
    """
    if not isinstance(output, EncoderOutput | PartialOutput):
        raise TypeError(
            f"the encoder returned a {type(output).__name__}: a forward returns "
            "vitgraph.EncoderOutput(last_hidden_state, pooler_output, deepstack_features)"
        )
    fields: dict[str, Tensor] = {}
    values: tuple[Tensor | Sequence[Tensor] | None, ...] = output[:3]
    for name, value in zip(OUTPUT_FIELDS, values, strict=True):
        if name in names and isinstance(value, tuple | list):
            fields |= {f"{name}.{number}": layer for number, layer in enumerate(value)}
        elif name in names and value is not None:
            fields[name] = cast(Tensor, value)
    return {**fields, **output.extras}


def as_output(fields: Mapping[str, Tensor], names: Sequence[str]) -> PartialOutput:
    """Return the output with these ``fields``, whose keys are those of :func:`output_fields`.

    DeepStack features are None unless ``names`` has them, and may be an empty tuple if it does.
    """
    hidden, pooled, deepstack = OUTPUT_FIELDS
    layers = tuple([field for name, field in fields.items() if name.startswith(deepstack)])
    layers_or_none = layers if deepstack in names else None
    extras = {k: field for k, field in fields.items() if not k.startswith(OUTPUT_FIELDS)}
    return PartialOutput(fields.get(hidden), fields.get(pooled), layers_or_none, extras)


def copy_shared(
    fields: Mapping[str, Tensor], inputs: Iterable[Tensor], weights: frozenset[int]
) -> dict[str, Tensor]:
    """Return the fields, copied where they share memory with other tensors or with one another.

    Args:
        fields: outputs of the encoder by name.
        inputs: inputs of the run, whose memory an output may be a view of.
        weights: addresses of the storages of the encoder's weights.
    """
    storages, own_fields = {tensor.untyped_storage().data_ptr() for tensor in inputs}, {}
    for name, field in fields.items():
        start = field.untyped_storage().data_ptr()
        own_fields[name] = field.clone() if start in storages or start in weights else field
        storages.add(start)
    return own_fields


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether the storages of two tensors overlap."""
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    first, second = a.untyped_storage(), b.untyped_storage()
    start, other_start = first.data_ptr(), second.data_ptr()
    return start < other_start + second.nbytes() and other_start < start + first.nbytes()
