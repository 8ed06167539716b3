"""Convert outputs to fields by name and back, and check the tensors that are given as ``out=``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from torch import Tensor

from encoders.contract import OUTPUT_FIELDS, EncoderOutput, PartialOutput


def is_per_row(name: str) -> bool:
    """Return whether a field has one entry per input row, rather than one per output token."""
    return name == "last_hidden_state"


def output_fields(
    output: EncoderOutput | PartialOutput, wanted: Sequence[str] = OUTPUT_FIELDS
) -> dict[str, Tensor]:
    """Return the wanted tensors of an output by name; DeepStack layers are numbered."""
    if not isinstance(output, EncoderOutput | PartialOutput):
        raise TypeError(
            f"the encoder returned a {type(output).__name__}: a forward returns "
            "encoders.contract.EncoderOutput(last_hidden_state, pooler_output, deepstack_features)"
        )
    fields: dict[str, Tensor] = {}
    values: tuple[Tensor | Sequence[Tensor] | None, ...] = output
    for name, value in zip(OUTPUT_FIELDS, values, strict=True):
        if name in wanted and isinstance(value, tuple | list):
            fields |= {f"{name}.{number}": layer for number, layer in enumerate(value)}
        elif name in wanted and value is not None:
            fields[name] = cast(Tensor, value)
    return fields


def as_output(fields: Mapping[str, Tensor], wanted: Sequence[str]) -> PartialOutput:
    """Return the output that has these fields: the reverse of :func:`output_fields`."""
    hidden, pooled, deepstack = OUTPUT_FIELDS
    layers = tuple([field for name, field in fields.items() if name.startswith(deepstack)])
    layers_wanted = layers if deepstack in wanted else None
    return PartialOutput(fields.get(hidden), fields.get(pooled), layers_wanted)


def owned(
    fields: Mapping[str, Tensor], lent: Iterable[Tensor], weights: frozenset[int]
) -> dict[str, Tensor]:
    """Return the fields, copied where they share memory with inputs, weights or one another."""
    seen, kept = {tensor.untyped_storage().data_ptr() for tensor in lent}, {}
    for name, field in fields.items():
        start = field.untyped_storage().data_ptr()
        kept[name] = field.clone() if start in seen or start in weights else field
        seen.add(start)
    return kept


def read_out(
    out: EncoderOutput | PartialOutput,
    like: Mapping[str, Tensor],
    rows: int,
    tokens: int,
    lent: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Return the caller's tensors by field name, checked before anything runs.

    The fields of ``like`` have the right trailing shapes, dtypes and devices. The tensors of
    ``lent``, such as pixels and buffers, must not be written over. It is a ValueError if a tensor
    is missing, superfluous, does not fit, or shares its storage with another one.
    """
    if not isinstance(out, EncoderOutput | PartialOutput):
        raise ValueError(
            f"out is a {type(out).__name__}: pass PartialOutput(last_hidden_state, pooler_output, "
            "deepstack_features), None for what is not returned"
        )
    given = output_fields(out)
    for name in given:
        if name not in like:
            raise ValueError(
                f"out.{name} would not be written: outputs are {', '.join(like)}; pass a tensor "
                "for each of these, DeepStack layers in a tuple, and None for others"
            )
    taken = [("the pixels or buffers of this call", tensor) for tensor in lent]
    for name, field in like.items():
        shape = (rows if is_per_row(name) else tokens, *field.shape[1:])
        if name not in given:
            raise ValueError(f"out has no {name}: pass a tensor of shape {shape} for it")
        target = given[name]
        _check_target(name, target, shape, field)
        for other, tensor in taken:
            if share_storage(target, tensor):
                raise ValueError(
                    f"out.{name} shares memory with {other}: one could overwrite the other; pass "
                    "tensors that each have a storage of their own"
                )
        taken.append((f"out.{name}", target))
    return given


def _check_target(name: str, target: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise a ValueError unless the results of a field can be written into the given tensor."""
    if not isinstance(target, Tensor):
        raise ValueError(f"out.{name} is a {type(target).__name__}: pass a tensor to write into")
    kind = f"{target.dtype} {tuple(target.shape)} on {target.device}"
    wanted = f"{like.dtype} {shape} on {like.device}"
    if kind != wanted:
        raise ValueError(f"out.{name} is {kind}: must be {wanted}")
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


def share_storage(one: Tensor, other: Tensor) -> bool:
    """Return whether the storages of two tensors overlap."""
    if not one.numel() or not other.numel() or one.device != other.device:
        return False
    first, second = one.untyped_storage(), other.untyped_storage()
    start, other_start = first.data_ptr(), second.data_ptr()
    return start < other_start + second.nbytes() and other_start < start + first.nbytes()
