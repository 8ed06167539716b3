"""Checks of the arguments of a graphed encoder: the encoder itself, and the settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import nn

from encoders.contract import OUTPUT_FIELDS, GraphableEncoder

BackendInUse: TypeAlias = Literal["cudagraph", "static", "eager"]
"""How batches run: "cudagraph" replays CUDA graphs, "static" runs the encoder on the same padded
buffers without graphs, and "eager" runs it without padding."""
Backend: TypeAlias = Literal["auto", BackendInUse]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
OnOverflow: TypeAlias = Literal["eager", "raise"]
"""Whether an item larger than every budget runs eagerly or raises an error."""
OVERFLOWS: tuple[OnOverflow, ...] = get_args(OnOverflow)


def require_graphable(encoder: object) -> None:
    """Raise a TypeError unless ``encoder`` is a module with the members of a graphable encoder.

    The members are read one by one: from Python 3.12 on, ``isinstance`` with a protocol does not
    find the members that a wrapper passes on from the module inside it.
    """
    if not isinstance(encoder, nn.Module):
        kind = "class" if isinstance(encoder, type) else type(encoder).__name__
        raise TypeError(
            f"encoder={encoder!r} is a {kind}, not a module: load one first, as "
            "vitgraph.load_encoder(repo_id) does, or pass an instance with weights"
        )
    graphable = cast(GraphableEncoder, encoder)
    try:
        _ = (graphable.budget_range, graphable.row_shape, graphable.grid_for, graphable.item_specs)
        _ = (graphable.prepare_encoder_metadata, graphable.split)
    except AttributeError as error:
        raise TypeError(
            f"{type(encoder).__name__} cannot be replayed as graphs: {error}; it needs "
            "budget_range, row_shape, grid_for, item_specs, prepare_encoder_metadata and split, "
            "see vitgraph.GraphableEncoder"
        ) from error


def as_module(encoder: object) -> nn.Module:
    """Return ``encoder``, checked by :func:`require_graphable`, with the type of a module."""
    assert isinstance(encoder, nn.Module)
    return encoder


def find_weights(encoder: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype of the first floating-point weight of 16 bits or more.

    Parameters come before buffers; a ValueError is raised if the encoder has no such weight.
    """
    for tensor in chain(encoder.parameters(), encoder.buffers()):
        # Weights of 8 bits do not say the dtype of pixels, which cannot be cast to 8 bits.
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            return tensor.device, tensor.dtype
    raise ValueError(
        f"{type(encoder).__name__} has no floating-point parameters or buffers: they say on which "
        "device and in which dtype its graphs run"
    )


def resolve_backend(backend: Backend, device: torch.device) -> BackendInUse:
    """Return the backend to use on the encoder's device; "auto" is "cudagraph" on CUDA.

    Raises:
        ValueError: graphs are asked for on a device that is not CUDA, or torch uses an allocator
            of device memory that is not its own.
    """
    if backend == "cudagraph" and device.type != "cuda":
        raise ValueError(
            f'backend="cudagraph" needs the encoder on CUDA, it is on {device}: move it, or use '
            '"static" or "eager"'
        )
    if backend == "auto":
        backend = "cudagraph" if device.type == "cuda" else "eager"
    if backend == "cudagraph" and torch.cuda.get_allocator_backend() != "native":
        raise ValueError(
            f"graphs need torch's own allocator, this is {torch.cuda.get_allocator_backend()}: "
            'leave "backend:" out of PYTORCH_ALLOC_CONF, or use backend="eager"'
        )
    return backend


def require_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise a ValueError unless the setting ``name`` has one of ``choices``, in value and type."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, choices))}")


def require_table(table: object) -> None:
    """Raise a ValueError unless the argument ``table`` is "auto", a path or None."""
    if table is not None and not (isinstance(table, str | os.PathLike) and os.fspath(table)):
        raise ValueError(f'table={table!r}: must be "auto", a file for measured times, or None')


def read_outputs(outputs: Sequence[str]) -> tuple[str, ...]:
    """Return the names of outputs without duplicates: fields, and extras such as "blocks.6".

    Raises:
        ValueError: no names, or a name that is neither a field nor, as extras are, has a dot.
    """
    is_sequence = isinstance(outputs, Iterable) and not isinstance(outputs, str)
    names = tuple(outputs) if is_sequence else ()
    if not names or any(name not in OUTPUT_FIELDS and "." not in str(name) for name in names):
        raise ValueError(
            f"outputs={names or outputs!r}: give a tuple of one or more of "
            f"{', '.join(OUTPUT_FIELDS)}, as ('pooler_output',), or of a block, as 'blocks.6'"
        )
    return tuple(dict.fromkeys(names))
