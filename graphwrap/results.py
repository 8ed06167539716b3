"""Results: the caller's own memory, and what ``out=`` must be before anything is written there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from encoders.contract import EncoderOutput

from .buffers import output_fields
from .guards import FIELDS

Face: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype, torch.device]]
"""Trailing shape, dtype and device of every field that comes back."""


def face_of(fields: Mapping[str, Tensor]) -> Face:
    """What results look like, but for their length."""
    return {name: (tuple(x.shape[1:]), x.dtype, x.device) for name, x in fields.items()}


def by_row(name: str) -> bool:
    """Whether a field has an entry an input row; the others have one a token."""
    return name == "last_hidden_state"


def own(
    fields: Mapping[str, Tensor], lent: Sequence[Tensor], storages: frozenset[int]
) -> dict[str, Tensor]:
    """The fields in memory of their own.

    Args:
        fields: what an encoder returned: its input or a weight, perhaps, or one tensor twice.
        lent: tensors whose memory others use.
        storages: where more such memory starts.
    """
    seen, kept = {tensor.untyped_storage().data_ptr() for tensor in lent}, {}
    for name, field in fields.items():
        start = field.untyped_storage().data_ptr()
        kept[name] = field.clone() if start in seen or start in storages else field
        seen.add(start)
    return kept


def read_out(
    out: EncoderOutput,
    wanted: tuple[str, ...],
    face: Face,
    sizes: tuple[int, int],
    lent: Sequence[Tensor],
) -> dict[str, Tensor]:
    """The caller's tensors by field name, checked: nothing fails once something has run.

    Args:
        out: a tensor for every field that will be returned, None for the others.
        wanted: the fields asked for.
        face: what results look like.
        sizes: rows and tokens of the call.
        lent: tensors that must not be written over: pixels, buffers.

    Raises:
        TypeError: ``out`` is no :class:`EncoderOutput`, or holds something else than tensors.
        ValueError: a tensor is missing, superfluous, does not fit, or shares memory.
    """
    if not isinstance(out, EncoderOutput):
        raise TypeError(
            f"out is a {type(out).__name__}: pass EncoderOutput(last_hidden_state, pooler_output, "
            "deepstack_features), None for what is not returned"
        )
    given = output_fields(out, FIELDS)
    for name, target in given.items():
        if not isinstance(target, Tensor):
            raise TypeError(f"out.{name} is a {type(target).__name__}: pass a tensor to write into")
    for name, (trailing, dtype, device) in face.items():
        shape = (sizes[0] if by_row(name) else sizes[1], *trailing)
        if name not in given:
            raise ValueError(f"out has no {name}: pass a tensor of shape {shape} for it")
        _check_target(name, given[name], shape, dtype, device)
    for name in given:
        if name not in face:
            raise ValueError(
                f"out.{name} would not be written: outputs are {', '.join(wanted)} (fields "
                f"{', '.join(face)}); pass None for it"
            )
    _check_apart(given, lent)
    return given


def _check_target(
    name: str, target: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tuple(target.shape) != shape or target.dtype != dtype or target.device != device:
        raise ValueError(
            f"out.{name} is {target.dtype} {tuple(target.shape)} on {target.device}: must be "
            f"{dtype} {shape} on {device}"
        )
    if _folded(target):
        raise ValueError(
            f"out.{name} is expanded or unfolded: several of its entries are one place in memory; "
            "pass a tensor of its own (.contiguous())"
        )
    if target.is_inference():
        raise ValueError(
            f"out.{name} was made in inference mode and cannot be written outside: make it under "
            "torch.no_grad(), or pass its clone()"
        )


def _check_apart(given: Mapping[str, Tensor], lent: Sequence[Tensor]) -> None:
    taken = [("the pixels or buffers of this call", tensor) for tensor in lent]
    for name, target in given.items():
        for other, tensor in taken:
            if overlap(target, tensor):
                raise ValueError(
                    f"out.{name} shares memory with {other}: one would overwrite the other; pass "
                    "tensors that lie apart"
                )
        taken.append((f"out.{name}", target))


def _folded(tensor: Tensor) -> bool:
    """Whether a tensor may reach one place in two ways: a step no longer than all below it."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory; columns of one tensor may lie apart in one stretch."""
    if not one.numel() or not other.numel() or one.device != other.device:
        return False
    first, second = one.data_ptr(), other.data_ptr()
    if second >= first + _stretch(one) or first >= second + _stretch(other):
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    return np.shares_memory(np.asarray(_Addresses(one)), np.asarray(_Addresses(other)))


def _stretch(tensor: Tensor) -> int:
    """Bytes from a tensor's first entry to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return (1 + sum(stride * (size - 1) for stride, size in steps)) * tensor.element_size()


class _Addresses:
    """A tensor's places in memory as an array that nobody reads, on whatever device they are."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }
