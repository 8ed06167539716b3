"""The record of one family: its encoder, and how published checkpoints hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from encoders import Encoder

from ..layouts import Layout

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of the tower's tensors by the encoder's names."""
Fields: TypeAlias = dict[tuple[str, ...], Any]
"""Values of config fields, by all the names that published configs give the field."""
Sizes: TypeAlias = Mapping[tuple[str, int], tuple[str, ...]]
"""Name and axis of a tensor -> all names of the config field that states the axis's length."""


@dataclass(frozen=True)
class PublishedModel:
    """The vision tower of one published checkpoint."""

    repo_id: str
    family: str
    layout: str
    prefix: str
    parameters: int
    """Parameters of the tower, merger included."""
    projector_parameters: int
    """Parameters of InternVL's ``mlp1``, which lies outside the tower; 0 elsewhere."""
    config: Mapping[str, Any]
    """The published ``config.json``, cut down to the fields that describe the tower."""


@dataclass(frozen=True)
class SmallCheckpoint:
    """The published repo that a small checkpoint with random weights imitates.

    The demo, the notebooks and the tests use such checkpoints; ``vitgraph.seeded`` writes them.
    """

    repo_id: str
    title: str = ""
    """Name in the demo; the demo leaves a checkpoint without a title out."""
    layout: str = ""
    """Name of the layout to write if it is not the published one."""


@dataclass(frozen=True)
class Family:
    """One encoder and the published checkpoints that hold it."""

    name: str
    title: str
    encoder: Callable[..., Encoder]
    config: Any
    """The encoder's config class, which has ``from_hf``."""
    model_types: tuple[str, ...]
    signs: tuple[tuple[str, str], ...]
    """Pairs of tensor names that no other family has together, for configs without a model type."""
    layouts: tuple[Layout, ...]
    """Layouts of the family's checkpoints; the first one whose marks are found is taken."""
    fields: Callable[[Shapes], Fields]
    """Reads the config fields that the shapes of the tower's tensors determine."""
    published: tuple[PublishedModel, ...]
    small: Mapping[str, SmallCheckpoint]
    """Small checkpoints by the name that ``write_seeded_checkpoint`` takes."""
    video: str
    """How a clip enters the tower, for ``vitgraph list``."""
    replays: Mapping[str, str]
    """What replays as CUDA graphs, for "image" and "video", for ``vitgraph list``."""
    verified: bool = True
    """Whether tests compare the tower with an upstream implementation instead of our own twin."""
    timm: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    """Timm architecture -> function from its ``model_args`` to the tower's config."""
    read_config: Callable[[Mapping[str, Any], Shapes | None], Any] | None = None
    """Reads a completed config and shapes, if ``config.from_hf`` alone does not suffice."""

    def on_meta(self, config: Any) -> Encoder:
        """Build the encoder with tensors that have shapes and no memory.

        Args:
            config: an instance of ``self.config``.

        Returns:
            The encoder on the meta device, not initialised.
        """
        with torch.device("meta"), _WithoutInit():
            return self.encoder(config)


_INIT = {
    init.normal_,
    init.trunc_normal_,
    init.uniform_,
    init.kaiming_uniform_,
    init.xavier_uniform_,
}


class _WithoutInit(TorchFunctionMode):
    """Skip initialisation, which fills nothing on the meta device.

    On that device, ``torch.randn`` and the initialisation of ``nn.Embedding`` would import 500 and
    900 modules of torch's compiler (0.9 s and 36 MB, 1.9 s and 149 MB).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INIT:
            return args[0] if args else kwargs["tensor"]
        return (torch.empty if func is torch.randn else func)(*args, **kwargs)


def count_blocks(shapes: Shapes, prefix: str) -> int:
    """Return one more than the highest block number among the names that start with ``prefix``."""
    words = [name.split(".")[1] for name in shapes if name.startswith(prefix)]
    # No tower has a thousand blocks; other names are left over, and the loader lists them.
    numbers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 4]
    return max(numbers, default=-1) + 1


def read_sizes(shapes: Shapes, sizes: Sizes) -> Fields:
    """Read config fields from tensor shapes; tensors and axes that are absent are left out."""
    return {
        names: shapes[tensor][axis]
        for (tensor, axis), names in sizes.items()
        if len(shapes.get(tensor, ())) > (axis if axis >= 0 else -axis - 1)
    }
