"""Convert outputs to tensors by field name and back, and check a caller's ``out`` tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, cast

from torch import Tensor

from encoders.contract import OUTPUT_FIELDS, EncoderOutput, PartialOutput

Unit: TypeAlias = Literal["rows", "tokens", "segments"]
"""What an output field has one entry for: an input row, an output token, or a segment."""


def unit_of(name: str) -> Unit:
    """Return what the field or extra ``name`` of an output has one entry for."""
    if name == "prefix":
        return "segments"
    return "rows" if name == "last_hidden_state" else "tokens"


def output_fields(
    output: EncoderOutput | PartialOutput, names: Sequence[str] = OUTPUT_FIELDS
) -> dict[str, Tensor]:
    """Return the tensors of an output that ``names`` lists, by name, without fields that are None.

    The field "deepstack_features" becomes one tensor per layer, "deepstack_features.0" and so on;
    the extra "prefix" is always among them, if the encoder has it.
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
            fields[name] = cast(Tensor, value)  # `_check_target` refuses any other type in `out`
    if "prefix" in output.extras:
        fields["prefix"] = output.extras["prefix"]
    return fields


def as_output(fields: Mapping[str, Tensor], names: Sequence[str]) -> PartialOutput:
    """Return the output with these ``fields``, whose keys are those of :func:`output_fields`.

    DeepStack features are None unless ``names`` has them, and may be an empty tuple if it does.
    """
    hidden, pooled, deepstack = OUTPUT_FIELDS
    layers = tuple([field for name, field in fields.items() if name.startswith(deepstack)])
    layers_or_none = layers if deepstack in names else None
    extras = {"prefix": fields["prefix"]} if "prefix" in fields else {}
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


def read_out(
    out: EncoderOutput | PartialOutput,
    templates: Mapping[str, Tensor],
    counts: Mapping[Unit, int],
    call_tensors: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Return the tensors of ``out`` by field name, checked before anything runs.

    Args:
        out: the tensors into which the caller wants the results written.
        templates: a tensor per field with the right dtype, device and shape after the first axis.
        counts: numbers of input rows, output tokens and segments of the call.
        call_tensors: pixels and buffers of the call, which must not be written over.

    Raises:
        ValueError: a tensor is missing, superfluous, does not fit, or shares its storage with
            another one.
    """
    if not isinstance(out, EncoderOutput | PartialOutput):
        raise ValueError(
            f"out is a {type(out).__name__}: pass PartialOutput(last_hidden_state, pooler_output, "
            "deepstack_features), None for what is not returned"
        )
    targets = output_fields(out)
    for name in targets:
        if name not in templates:
            raise ValueError(
                f"out.{name} would not be written: outputs are {', '.join(templates)}; pass a "
                "tensor for each of these, DeepStack layers in a tuple, and None for others"
            )
    other_tensors = [("the pixels or buffers of this call", tensor) for tensor in call_tensors]
    for name, template in templates.items():
        shape = (counts[unit_of(name)], *template.shape[1:])
        if name not in targets:
            raise ValueError(f"out has no {name}: pass a tensor of shape {shape} for it")
        target = targets[name]
        _check_target(name, target, shape, template)
        for other_name, tensor in other_tensors:
            if share_storage(target, tensor):
                raise ValueError(
                    f"out.{name} shares memory with {other_name}: one could overwrite the other; "
                    "pass tensors that each have a storage of their own"
                )
        other_tensors.append((f"out.{name}", target))
    return targets


def _check_target(name: str, target: Tensor, shape: tuple[int, ...], template: Tensor) -> None:
    """Raise a ValueError unless the field ``name`` can be written into the tensor ``target``.

    It must have this ``shape`` and the dtype and device of ``template``. A tensor made in inference
    mode, or with several entries at one address, cannot be written.
    """
    if not isinstance(target, Tensor):
        raise ValueError(f"out.{name} is a {type(target).__name__}: pass a tensor to write into")
    kind = f"{target.dtype} {tuple(target.shape)} on {target.device}"
    expected = f"{template.dtype} {shape} on {template.device}"
    if kind != expected:
        raise ValueError(f"out.{name} is {kind}: must be {expected}")
    if target.is_inference() or _overlaps_itself(target):
        raise ValueError(
            f"out.{name} was made in inference mode, or is expanded or unfolded (several of its "
            "entries are one place in memory), and cannot be written: pass its clone(), made under "
            "torch.no_grad()"
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Return whether several entries of a tensor are the same place in memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether the storages of two tensors overlap."""
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    first, second = a.untyped_storage(), b.untyped_storage()
    start, other_start = first.data_ptr(), second.data_ptr()
    return start < other_start + second.nbytes() and other_start < start + first.nbytes()
