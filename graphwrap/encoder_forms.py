"""The form of an encoder that is captured: as it is, or accelerated.

An encoder may have several named input paths, such as one for whole images and one for tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from torch import nn

from encoders.contract import (
    OUTPUT_FIELDS,
    Accelerable,
    AcceleratesItself,
    Accelerator,
    GivesExtras,
    GraphableEncoder,
    Grid,
    Kernels,
    Metadata,
    MultiPathEncoder,
    Output,
    Precision,
    VisionInputs,
)
from encoders.grids import read_grid

from .budgets import Budget
from .settings import BackendInUse, as_module, require_graphable

FormKernels: TypeAlias = Literal[Kernels, "reference"]
"""Attention kernels: an argument of ``accelerated()``, or "reference" for the encoder as it is."""


class FormSettings(NamedTuple):
    """The user's settings that say which form of the encoder runs."""

    kernels: FormKernels = "auto"
    """The attention kernels: "reference" runs the module as it is, and any other name is passed to
    its method ``accelerated()``."""
    precision: Precision = "bf16"
    """The ``precision`` passed to ``accelerated()``: "bf16" keeps the encoder's dtype, whichever it
    is, and "fp8" computes matrix products in e4m3 where that is faster."""


@dataclass(frozen=True)
class EncoderForm:
    """The form of an encoder that is captured, where it runs, and which outputs are kept."""

    encoder: GraphableEncoder
    """The encoder, perhaps in its accelerated form, that is captured and that runs eagerly."""
    accelerator: Accelerator | None
    device: torch.device
    dtype: torch.dtype
    outputs: tuple[str, ...]
    """The fields that are kept, and extras by name; all extras that the encoder gives are."""
    backend: BackendInUse
    settings: FormSettings

    @property
    def has_graphs(self) -> bool:
        """Whether fixed-size runs are captured as CUDA graphs or executed directly."""
        return self.backend == "cudagraph"


class OnePath(NamedTuple):
    """Presents an encoder of one input path ("image") as a :class:`MultiPathEncoder`."""

    encoder: GraphableEncoder

    @property
    def paths(self) -> Mapping[str, GraphableEncoder]:
        """The wrapped encoder under "image", the name of its only input path."""
        return {"image": self.encoder}

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Split the output of the only path, ``outputs["image"]``, into one output per item.

        The ``inputs`` are the result of ``preprocess``, which says how many tokens each item has.
        """
        return self.encoder.split(outputs["image"], inputs.grid_thw) if outputs else []


def with_extras(encoder: object, outputs: Sequence[str]) -> object:
    """Return the encoder in a form that gives the extras among ``outputs``, such as "blocks.6".

    Raises:
        ValueError: the encoder does not give these extras; the message lists what it gives.
    """
    names = [name for name in outputs if name not in OUTPUT_FIELDS]
    if not names:
        return encoder
    fields = f"outputs={tuple(outputs)!r}: the fields are {', '.join(OUTPUT_FIELDS)}"
    # A wrapper that passes on its module's attributes would lose the steps of its own forward.
    if not issubclass(type(encoder), GivesExtras):
        raise ValueError(f"{fields}, and {type(encoder).__name__} has no other outputs")
    try:
        return cast(GivesExtras, encoder).with_extras(names)
    except ValueError as error:
        raise ValueError(f"{fields}, and {error}") from error


def with_paths(encoder: object) -> MultiPathEncoder:
    """Return the encoder in a form that has its input paths by name, such as "image" and "tiles".

    An encoder without named paths becomes the only path, "image". So does a wrapper that passes on
    the attributes of a single-path encoder: to run the ``paths["image"]`` of the wrapped module
    would leave out the steps of the wrapper's own forward.

    Raises:
        TypeError: not a module, or a path lacks a member of :class:`GraphableEncoder`.
    """
    if not isinstance(encoder, nn.Module):
        require_graphable(encoder)
    # The members are checked below: isinstance does not find those that a wrapper passes on.
    path_encoder: MultiPathEncoder = OnePath(cast(GraphableEncoder, encoder))
    if isinstance(encoder, MultiPathEncoder) and not _passes_on_its_path(encoder):
        path_encoder = encoder
    for path in path_encoder.paths.values():
        require_graphable(path)
    return path_encoder


def joins_paths(paths: Mapping[str, object], encoder: object) -> bool:
    """Return whether ``encoder`` joins the outputs of ``paths``, rather than being one of them."""
    return paths["image"] is not encoder


def _passes_on_its_path(encoder: MultiPathEncoder) -> bool:
    """Return whether a module wraps its ``paths["image"]`` and passes on the ``join`` of that."""
    path: object = encoder.paths.get("image")
    return path is not encoder and isinstance(path, MultiPathEncoder) and path.join == encoder.join


def choose_form(
    encoder: GraphableEncoder, settings: FormSettings
) -> tuple[GraphableEncoder, Accelerator | None]:
    """Return the form of an encoder that ``settings`` ask for, and its accelerator if it has one.

    The form is the encoder itself or what its ``accelerated()`` returns.

    Raises:
        ValueError: settings that ask for kernels or a precision that this encoder does not offer.
    """
    accelerator = _find_accelerator(encoder)
    # A wrapper that passes on its module's attributes is not accelerated: `accelerated()` would be
    # a form of only the wrapped module, without the steps of the wrapper's own forward.
    accelerates_itself = issubclass(type(encoder), AcceleratesItself)
    if accelerator is not None:
        reason = "this encoder is accelerated already (pass the one accelerated() was called on)"
    elif not (accelerates_itself and isinstance(encoder, Accelerable)):
        reason = f"{type(encoder).__name__} has no accelerated form"
    elif settings.kernels == "reference":
        reason = 'kernels="reference" takes the encoder as it is'
    else:
        form = encoder.accelerated(settings.kernels, settings.precision)
        return form, _find_accelerator(form)
    for (name, value), default in zip(settings._asdict().items(), FormSettings(), strict=True):
        allowed = accelerator is None and value == "reference"
        if value != default and not allowed:
            raise ValueError(
                f"{name}={value!r}: {reason}, so there is no choice: leave {name}={default!r}"
            )
    return encoder, accelerator


def _find_accelerator(encoder: GraphableEncoder) -> Accelerator | None:
    """Return the accelerator of an encoder or of a module inside it, None if there is none."""
    for module in as_module(encoder).modules():
        if isinstance(module, Accelerable) and module.accelerator is not None:
            return module.accelerator
    return None


def capacity_metadata(encoder: GraphableEncoder, budget: Budget, grids: Sequence[Grid]) -> Metadata:
    """Return the encoder's metadata for items with these grids, padded to a budget's capacities.

    The tensors are on the CPU. If ``grids`` is empty, they describe only padding.
    """
    return encoder.prepare_encoder_metadata(
        read_grid(grids),
        max_frames_per_batch=budget.segments,
        max_seqlen_override=budget.longest_segment,
        max_input_size=budget.rows,
        max_windows_per_batch=budget.windows or None,
        device="cpu",
    )
