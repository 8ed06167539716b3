"""Results by field name: taken apart, put together, in whose memory, and the rules of ``out=``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from encoders.contract import EncoderOutput

FIELDS = EncoderOutput._fields


def is_per_row(name: str) -> bool:
    """Return whether a field has one entry per input row; the others have one per token."""
    return name == "last_hidden_state"


def output_fields(output: EncoderOutput, wanted: Sequence[str]) -> dict[str, Tensor]:
    """Return the wanted tensors of an output by name; DeepStack layers are numbered.

    Raises:
        TypeError: the encoder returned something else than an :class:`EncoderOutput`.
    """
    if not isinstance(output, EncoderOutput):
        raise TypeError(
            f"the encoder returned a {type(output).__name__}: a forward returns "
            "encoders.contract.EncoderOutput(last_hidden_state, pooler_output, deepstack_features)"
        )
    hidden, pooled, layers = FIELDS
    values = {hidden: output.last_hidden_state, pooled: output.pooler_output}
    fields = {name: x for name, x in values.items() if x is not None and name in wanted}
    if output.deepstack_features is not None and layers in wanted:
        for number, layer in enumerate(output.deepstack_features):
            fields[f"{layers}.{number}"] = layer
    return fields


def as_output(fields: Mapping[str, Tensor], wanted: Sequence[str]) -> EncoderOutput:
    """Return the output that :func:`output_fields` took apart, in its order of layers."""
    hidden, pooled, deepstack = FIELDS
    layers = tuple([field for name, field in fields.items() if name.startswith(deepstack)])
    layers_wanted = layers if deepstack in wanted else None
    return EncoderOutput(fields.get(hidden), fields.get(pooled), layers_wanted)


def owned(
    fields: Mapping[str, Tensor], lent: Iterable[Tensor], weights: frozenset[int]
) -> dict[str, Tensor]:
    """Return fields in memory of their own, which an encoder's results need not be.

    Args:
        fields: what an encoder returned: perhaps its input or a weight, or one tensor twice.
        lent: tensors whose memory others use.
        weights: addresses at which the storages of weights start.
    """
    seen, kept = {tensor.untyped_storage().data_ptr() for tensor in lent}, {}
    for name, field in fields.items():
        start = field.untyped_storage().data_ptr()
        kept[name] = field.clone() if start in seen or start in weights else field
        seen.add(start)
    return kept


def read_out(
    out: EncoderOutput,
    wanted: Sequence[str],
    like: Mapping[str, Tensor],
    rows: int,
    tokens: int,
    lent: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Return the caller's tensors by field name, checked before anything runs.

    Args:
        out: a tensor for every field that will be returned, None for the others.
        wanted: the fields asked for.
        like: fields of the right trailing shapes, dtypes and devices.
        rows: input rows of the call.
        tokens: output tokens of the call.
        lent: tensors that must not be written over, such as pixels and buffers.

    Raises:
        ValueError: ``out`` is not an :class:`EncoderOutput` of tensors, or a tensor is missing,
            superfluous, does not fit, or shares its storage with another one.
    """
    if not isinstance(out, EncoderOutput):
        raise ValueError(
            f"out is a {type(out).__name__}: pass EncoderOutput(last_hidden_state, pooler_output, "
            "deepstack_features), None for what is not returned"
        )
    layers: Any = out.deepstack_features
    if not isinstance(layers, tuple | list | None):
        raise ValueError(
            f"out.deepstack_features is a {type(layers).__name__}: pass a tuple of tensors"
        )
    given = output_fields(out, FIELDS)
    for name, field in like.items():
        shape = (rows if is_per_row(name) else tokens, *field.shape[1:])
        if name not in given:
            raise ValueError(f"out has no {name}: pass a tensor of shape {shape} for it")
        _check_target(name, given[name], shape, field)
    for name in given:
        if name not in like:
            raise ValueError(
                f"out.{name} would not be written: outputs are {', '.join(wanted)} (fields "
                f"{', '.join(like)}); pass None for it"
            )
    taken = [("the pixels or buffers of this call", tensor) for tensor in lent]
    for name, target in given.items():
        for other, tensor in taken:
            if share_storage(target, tensor):
                raise ValueError(
                    f"out.{name} shares memory with {other}: one could overwrite the other; pass "
                    "tensors that each have a storage of their own"
                )
        taken.append((f"out.{name}", target))
    return given


def _check_target(name: str, target: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise unless a field's results can be written into a tensor."""
    if not isinstance(target, Tensor):
        raise ValueError(f"out.{name} is a {type(target).__name__}: pass a tensor to write into")
    if tuple(target.shape) != shape or target.dtype != like.dtype or target.device != like.device:
        raise ValueError(
            f"out.{name} is {target.dtype} {tuple(target.shape)} on {target.device}: must be "
            f"{like.dtype} {shape} on {like.device}"
        )
    if _overlaps_itself(target):
        raise ValueError(
            f"out.{name} is expanded or unfolded: several of its entries are one place in memory; "
            "pass a tensor of its own (.contiguous())"
        )
    if target.is_inference():
        raise ValueError(
            f"out.{name} was made in inference mode and cannot be written outside: make it under "
            "torch.no_grad(), or pass its clone()"
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Return whether a step along one dimension is no longer than all that lies below it."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def share_storage(one: Tensor, other: Tensor) -> bool:
    """Return whether the storages of two tensors overlap, wherever in them the tensors lie."""
    if not one.numel() or not other.numel() or one.device != other.device:
        return False
    first, second = one.untyped_storage(), other.untyped_storage()
    start, other_start = first.data_ptr(), second.data_ptr()
    return start < other_start + second.nbytes() and other_start < start + first.nbytes()
