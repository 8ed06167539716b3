"""The arena: static input, metadata and output buffers, of which every budget uses a prefix.

Metadata of a replay is one block of bytes, laid out by the shapes that its capacities give, so that
a grid seen before is written with a single copy. Its first entry says which input rows are padding:
the graph reads it on the device and clears those rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from encoders.contract import EncoderOutput, Metadata

ALIGN = 16
PADDING = "__padding__"
Place: TypeAlias = tuple[int, tuple[int, ...], torch.dtype]
"""Offset in bytes, shape and dtype of one entry."""


@dataclass(frozen=True)
class Layout:
    """Where each metadata entry of one budget lies in the block of bytes."""

    entries: dict[str, Place]
    constants: dict[str, Tensor]
    """0-dim entries: on the host, baked into the graph, decided by the capacities alone."""
    nbytes: int

    @classmethod
    def of(cls, metadata: Metadata, rows: int) -> Layout:
        """Lay out what ``prepare_encoder_metadata`` gives for a budget's capacities.

        Args:
            metadata: of an empty grid.
            rows: input rows of the budget.

        Raises:
            ValueError: an entry that is no tensor.
        """
        for name, value in metadata.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"prepare_encoder_metadata gave {name}={value!r}: every entry must be a "
                    "tensor, a number a 0-dim one"
                )
        constants = {name: value for name, value in metadata.items() if value.ndim == 0}
        entries: dict[str, Place] = {PADDING: (0, (rows,), torch.bool)}
        offset = -(-rows // ALIGN) * ALIGN
        for name, value in metadata.items():
            if value.ndim:
                entries[name] = (offset, tuple(value.shape), value.dtype)
                offset += -(-value.numel() * value.element_size() // ALIGN) * ALIGN
        return cls(entries, constants, offset)

    def views(self, block: Tensor) -> Metadata:
        """The entries as tensors inside a block of bytes."""
        return {
            name: block[offset : offset + _nbytes(shape, dtype)].view(dtype).view(shape)
            for name, (offset, shape, dtype) in self.entries.items()
        }

    def write(self, block: Tensor, metadata: Metadata, rows: int) -> None:
        """Write a call's metadata into a block of bytes on the host.

        Args:
            block: the bytes.
            metadata: of the call's grid, padded to the budget's capacities.
            rows: real input rows of the call; those beyond are padding.

        Raises:
            ValueError: entries, or an entry's shape, dtype or constant, are not those that the
                graph was made for.
        """
        views = self.views(block)
        views[PADDING][:rows] = False
        views[PADDING][rows:] = True
        expected = {*self.constants, *views} - {PADDING}
        if metadata.keys() != expected:
            raise ValueError(
                f"prepare_encoder_metadata gave the entries {sorted(metadata)} for this grid and "
                f"{sorted(expected)} for an empty one: they must not depend on the grid"
            )
        for name, value in metadata.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"prepare_encoder_metadata gave {name}={value!r} for this grid: every entry "
                    "must be a tensor"
                )
            if name in self.constants:
                if value.shape != () or not torch.equal(value, self.constants[name]):
                    raise ValueError(
                        f"prepare_encoder_metadata gave {name}={value.tolist()}: the graph has "
                        f"{self.constants[name].item()}; it must depend on the capacities alone"
                    )
                continue
            if value.shape != views[name].shape or value.dtype != views[name].dtype:
                raise ValueError(
                    f"prepare_encoder_metadata gave {name} as {value.dtype} "
                    f"{tuple(value.shape)}, the graph has "
                    f"{views[name].dtype} {tuple(views[name].shape)}: shapes must depend on the "
                    "capacities alone"
                )
            views[name].copy_(value)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


class Arena:
    """Buffers as large as the largest budget needs."""

    def __init__(
        self,
        rows: int,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        block_bytes: int,
    ) -> None:
        self.pixels = torch.zeros(rows, *row_shape, dtype=dtype, device=device)
        self.block = torch.zeros(block_bytes, dtype=torch.uint8, device=device)
        self.outputs: dict[str, Tensor] = {}

    def output(self, name: str, like: Tensor) -> Tensor:
        """The buffer of an output field, a prefix as long as ``like``; grown to the first asked."""
        held = self.outputs.get(name)
        if held is None:
            held = self.outputs[name] = torch.zeros_like(
                like, memory_format=torch.contiguous_format
            )
        return held[: like.shape[0]]

    @property
    def buffers(self) -> list[Tensor]:
        """All of them."""
        return [self.pixels, self.block, *self.outputs.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def mark_stream(self, stream: torch.cuda.Stream) -> None:
        """Nobody else gets this memory before what the stream was given is done."""
        for buffer in self.buffers:
            if buffer.is_cuda:
                buffer.record_stream(stream)

    def poison(self) -> None:
        """Fill everything with NaN (for tests): no result may change."""
        for buffer in (self.pixels, *self.outputs.values()):
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
        self.block.fill_(0xFF)


def output_fields(output: EncoderOutput, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """The wanted tensors of an output by name; DeepStack layers are numbered.

    Raises:
        TypeError: no :class:`EncoderOutput`.
    """
    if not isinstance(output, EncoderOutput):
        raise TypeError(
            f"the encoder returned a {type(output).__name__}: a forward returns "
            "encoders.contract.EncoderOutput(last_hidden_state, pooler_output, deepstack_features)"
        )
    fields: dict[str, Tensor] = {}
    if "last_hidden_state" in wanted and output.last_hidden_state is not None:
        fields["last_hidden_state"] = output.last_hidden_state
    if "pooler_output" in wanted and output.pooler_output is not None:
        fields["pooler_output"] = output.pooler_output
    if "deepstack_features" in wanted and output.deepstack_features is not None:
        for number, layer in enumerate(output.deepstack_features):
            fields[f"deepstack_features.{number}"] = layer
    return fields


def as_output(fields: Mapping[str, Tensor], wanted: tuple[str, ...]) -> EncoderOutput:
    """The inverse of :func:`output_fields`; fields not wanted are None."""
    deepstack = tuple(
        fields[name] for name in sorted(fields, key=_layer) if name.startswith("deepstack")
    )
    return EncoderOutput(
        fields.get("last_hidden_state"),
        fields.get("pooler_output"),
        deepstack if "deepstack_features" in wanted else None,
    )


def _layer(name: str) -> int:
    return int(name.rpartition(".")[2]) if "." in name else -1
