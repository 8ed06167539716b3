"""The record of one family: its encoder, and how published checkpoints hold it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from encoders import Encoder

from ..layouts import Layout
from ..published import FamilyFacts, family_facts
from ..strict_json import JsonDict, JsonObject

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shapes of the tower's tensors, by the names that the encoder gives them."""
Fields: TypeAlias = Mapping[tuple[str, ...], Callable[[Shapes], object]]
"""All names of a field in published configs -> the function that reads its value from the shapes of
the tower's tensors, or raises a LookupError if they do not determine it. In a name like
``text_config.hidden_size``, the part before the dot is the section that has the field."""


class FamilyConfig(Protocol):
    """A dataclass with the sizes of an encoder, read from a published config."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    @classmethod
    def from_hf(cls, config: JsonObject) -> FamilyConfig: ...


@dataclass(frozen=True)
class TransformersClass:
    """A class of transformers whose checkpoints hold only a vision tower."""

    module: str
    """The name of the model's folder in ``transformers.models``."""
    name: str
    model_type: str
    auto: bool = True
    """Whether ``AutoModel`` of transformers builds the class."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Field of the published config -> the name that the class has for it, where they differ or the
    field is not in the config's part for the tower, but at its top."""
    make_fields: Callable[[JsonObject], JsonDict] = lambda section: {}
    """A function that takes the tower's part of a published config, and returns further fields that
    the class needs."""
    reads: Callable[[JsonObject], bool] = lambda section: True
    """Whether the class computes what the tower of a published config's part for it does."""


@dataclass(frozen=True)
class Family:
    """One encoder class, and how published checkpoints with its tower are recognised and read.

    ``weights.published`` says how this record, the family's JSON file and checkpoints relate.
    """

    name: str
    encoder: type[Encoder]
    config: type[FamilyConfig]
    """The config class of the encoder."""
    model_types: tuple[str, ...]
    signs: tuple[tuple[str, str], ...]
    """Pairs of endings of tensor names; a checkpoint with names for both of a pair is of this
    family. They decide if a config has no model type, or one that several families share."""
    layouts: tuple[Layout, ...]
    """The family's ways to name tensors; the first whose ``marks`` a checkpoint has is used."""
    without: tuple[str, ...] = ()
    """Endings of tensor names; a checkpoint with one of them is of another family, whatever signs
    it has."""
    by_type: bool = False
    """Whether tensors decide only without a model type of another model, because the family's own
    says how tokens of tiles join, which no tensor shows."""
    fields: Fields = field(default_factory=dict)
    """Fields of the config's part for the tower that tensor shapes supply if they are missing."""
    outer_fields: Fields = field(default_factory=dict)
    """Fields outside the tower's part of a config that tensor shapes supply if they are missing."""
    timm: Mapping[str, Callable[[JsonObject], JsonDict]] = field(default_factory=dict)
    """timm architecture -> the function that makes the tower's config from ``model_args`` of timm's
    config."""
    classes: Mapping[str, TransformersClass] = field(default_factory=dict)
    """Name of a layout -> the class of transformers that reads towers with its tensor names; also
    model type (without ``_vision``) -> its class, where that differs from the layout's class."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Model type that resembles the family but is not supported -> a clause for the error that
    says what differs."""
    processor_of: Callable[[JsonObject], JsonDict | None] | None = None
    """A function that takes a published config, and returns the processor file for images that it
    describes, as timm's configs do, or None; None if no config describes any."""
    parse_config: Callable[[JsonObject, Shapes], FamilyConfig] | None = None
    """A function that makes the encoder's config from the published one and the shapes of tensors;
    None if the encoder's ``config.from_hf`` suffices, which takes no shapes."""

    @property
    def facts(self) -> FamilyFacts:
        """The title, the published checkpoints and all other facts in the family's JSON file."""
        return family_facts(self.name)

    def on_meta(self, config: FamilyConfig) -> Encoder:
        """Build the encoder of a config on the meta device: its tensors have no memory.

        Raises:
            ValueError: sizes that the tower or its preprocessing cannot have.
        """
        with torch.device("meta"), _WithoutInit():
            encoder = self.encoder(config)
        _ = encoder.preprocessor  # built now, so that a bad size fails while loading
        return encoder


_INIT = frozenset(filter(callable, vars(init).values()))


class _WithoutInit(TorchFunctionMode):
    """Skip initialisation, which fills nothing on the meta device.

    On that device, ``torch.randn`` would import 500 modules of torch's compiler (0.3 s on a CPU
    core, 35 MB), and the initialisation of ``nn.Embedding`` 900 (1.1 s, 152 MB; torch 2.15).
    """

    def __torch_function__(  # type: ignore[explicit-any]  # called for every function of torch
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: JsonDict | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in _INIT:
            return args[0] if args else kwargs["tensor"]
        make: Callable[..., object] = func  # type: ignore[explicit-any]  # any of these functions
        if func is torch.randn:
            make = torch.empty
        return make(*args, **kwargs)


def with_vision(*model_types: str) -> tuple[str, ...]:
    """Return the model types, then each once more with "_vision", as vision configs have it."""
    return (*model_types, *(f"{model_type}_vision" for model_type in model_types))


def length(tensor: str, axis: int) -> Callable[[Shapes], int]:
    """Return a function that reads the length of ``axis`` of the tensor ``tensor`` from shapes."""
    return lambda shapes: shapes[tensor][axis]


def block_count(prefix: str) -> Callable[[Shapes], int]:
    """Return a function that counts blocks by names: the highest number after ``prefix``, plus 1.

    Numbers have at most three digits, because no tower has a thousand blocks. The loader reports
    tensors with longer numbers as unexpected.
    """
    block = re.compile(re.escape(prefix) + r"([0-9]{1,3})(\.|\Z)")

    def count(shapes: Shapes) -> int:
        numbers = [int(match[1]) for name in shapes if (match := block.match(name))]
        if not numbers:
            raise LookupError(f"no tensor is called {prefix}0")
        return max(numbers) + 1

    return count


def square(positions: str, axis: int, patch: str, *, extra: int) -> Callable[[Shapes], int]:
    """Return a function that reads the side in pixels of the square images of a tower.

    Args:
        positions: name of the tensor of position embeddings.
        axis: the axis of that tensor that has one entry per patch.
        patch: name of the weight that embeds patches, whose last axis is the side of a patch.
        extra: number of entries on the axis that are for no patch, such as 1 for a class token.
    """
    return lambda shapes: round((shapes[positions][axis] - extra) ** 0.5) * shapes[patch][-1]
