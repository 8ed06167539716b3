"""Checks of the arguments of an encoder's methods; each raises a ValueError that says the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsIndex

import torch
from torch import Tensor

from ..data import EncoderOutput, PartialOutput


def require_tensor(pixel_values: object) -> None:
    """Raise a ValueError unless ``pixel_values`` is a tensor."""
    if isinstance(pixel_values, Tensor):
        return
    fix = "call encoder.preprocess on the images, or encoder.encode"
    if isinstance(pixel_values, tuple):
        fix = (
            "call encoder(inputs) with what preprocess returned; forward takes "
            "inputs.pixel_values, inputs.grid_thw"
        )
    raise ValueError(
        f"pixel_values is of type {type(pixel_values).__name__}: the tower takes a tensor of "
        f"normalised pixels; {fix}"
    )


def require_output(output: object) -> None:
    """Raise a ValueError unless ``output``, the argument of ``split``, is an EncoderOutput."""
    if not isinstance(output, EncoderOutput | PartialOutput):
        raise ValueError(
            f"output is of type {type(output).__name__}: split takes the EncoderOutput that the "
            "encoder returned; a tensor of it can be split by the rows that item_specs returns"
        )


def require_metadata(metadata: object, needed: str = "cu_seqlens") -> None:
    """Raise a ValueError unless ``metadata`` is a dict of tensors with the key ``needed``."""
    fix = "pass what this encoder's prepare_encoder_metadata returned"
    if not isinstance(metadata, Mapping) or needed not in metadata:
        raise ValueError(
            f"encoder_metadata is of type {type(metadata).__name__} and must be a dict of tensors "
            f"that has {needed!r}: {fix}"
        )
    for name, value in metadata.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"encoder_metadata[{name!r}] is of type {type(value).__name__}: must be a tensor; "
                f"{fix}"
            )


def missing_grid(pixel_values: Tensor, patch_size: int) -> str:
    """Return the message of an error about a missing ``grid_thw``; for tiles it has a grid."""
    fix = (
        f"pixel_values of shape {tuple(pixel_values.shape)} came without the grid of their items: "
        "pass grid_thw, or encoder_metadata made by prepare_encoder_metadata"
    )
    if pixel_values.ndim != 4:
        return fix
    count, _, height, width = pixel_values.shape
    grid = [[count, height // patch_size, width // patch_size]]
    return f"{fix}; if these tiles are one item, grid_thw is {grid}"


def check_pixels(
    pixel_values: Tensor, row_shape: tuple[int, ...], rule: str, device: torch.device
) -> None:
    """Check that pixels are floating-point rows of one shape, on the CPU or on ``device``.

    Args:
        pixel_values: the argument of ``forward``.
        row_shape: the shape that ``pixel_values`` must have after its first axis.
        rule: a sentence for the message that says which rows the encoder takes.
        device: the device of the encoder.

    Raises:
        ValueError: no tensor, integer pixels, rows of a wrong shape, or pixels on a device that is
            neither the CPU nor ``device``.
    """
    require_tensor(pixel_values)
    if not pixel_values.is_floating_point():
        raise ValueError(
            f"pixel_values are {pixel_values.dtype}: the tower takes normalised floating-point "
            "pixels; call encoder.preprocess on the images"
        )
    if tuple(pixel_values.shape[1:]) != row_shape:
        raise ValueError(
            f"pixel_values of shape {tuple(pixel_values.shape)}: {rule}"
            f"{_looks_like(pixel_values)}; call this encoder's preprocess on the images"
        )
    if pixel_values.device != device and pixel_values.device.type != "cpu":
        raise ValueError(
            f"pixel_values are on {pixel_values.device}, and the encoder is on {device}: "
            "pass them on the CPU or move them to the encoder's device"
        )


def _looks_like(pixel_values: Tensor) -> str:
    """Return a hint that pixels with so many axes are for another kind of tower, or ""."""
    kinds = {2: "rows of patches", 4: "whole images or tiles"}
    kind = kinds.get(pixel_values.ndim)
    return f"; these look like {kind} for another tower" if kind else ""


def check_rows(rows: int, expected: int, between: str) -> None:
    """Check the number of rows of ``pixel_values``.

    Args:
        rows: rows that ``pixel_values`` has.
        expected: rows that it must have.
        between: the words of the message between the two numbers, such as "but the grid makes".

    Raises:
        ValueError: the two numbers differ.
    """
    if rows != expected:
        raise ValueError(
            f"pixel_values has {rows} rows {between} {expected}: pass the grid_thw that belongs to "
            "these pixels (one row t, h, w per item), or the encoder_metadata made of it"
        )


def check_input_size(rows: int, max_input_size: int | None, group: int = 1) -> int:
    """Return how many rows metadata with one row per patch must have, padding included.

    Args:
        rows: rows that the grid makes.
        max_input_size: rows to pad to; None pads none.
        group: patches per token, of which ``max_input_size`` must be a multiple.

    Raises:
        ValueError: more rows than ``max_input_size``, or a size that is no multiple of ``group``.
    """
    if max_input_size is None:
        return rows
    if not isinstance(max_input_size, SupportsIndex) or max_input_size % group:
        raise ValueError(
            f"max_input_size={max_input_size!r}: must be a multiple of {group}, the patches "
            "of a token"
        )
    if rows > max_input_size:
        raise ValueError(
            f"{rows} rows do not fit max_input_size={max_input_size}: raise it or pass fewer items"
        )
    return max_input_size
