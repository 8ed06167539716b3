"""The classes of transformers that read the folder of a tower alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.oracles import BY_FAMILY
from vitgraph.seeded import SEEDED
from weights.families.family import TransformersClass

from .checkpoints import first_of_each

ROWS = {recipe: BY_FAMILY[seeded.family.name] for recipe, seeded in SEEDED.items()}
"""Recipe -> the first row of its family's towers."""


def class_of(recipe: str) -> TransformersClass | None:
    """Return the class of transformers that is the tower of a recipe, as the record says it.

    The class of the model type comes before that of the layout.
    """
    seeded = SEEDED[recipe]
    classes, config = seeded.family.classes, seeded.model.config
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    kinds = [str(part.get("model_type")).removesuffix("_vision") for part in parts]
    found = [classes[kind] for kind in (*kinds, seeded.layout.name) if kind in classes]
    return found[0] if seeded.layout.name in classes else None


TRANSFORMERS = {recipe: found for recipe in SEEDED if (found := class_of(recipe)) is not None}
"""Recipe -> the class of transformers that is its tower alone."""
TRANSFORMERS_TOWERS = first_of_each(TRANSFORMERS, lambda name: SEEDED[name].family.name)
"""One per family runs in a plain pytest."""
RENAMED = {recipe for recipe in TRANSFORMERS if ROWS[recipe].renamed}
"""Recipes whose tensors transformers renames, or permutes, while it reads them."""
RESAVED = first_of_each(
    {name: found for name, found in TRANSFORMERS.items() if not ROWS[name].filled},
    lambda name: SEEDED[name].family.name,
)
"""The recipes whose towers have the same tensors after transformers read and saved them."""


def misread(info: Mapping[str, Iterable[object]], recipe: str) -> set[object]:
    """Return what ``output_loading_info`` of transformers lists, but what the class fills."""
    return {found for listed in info.values() for found in listed} - {*ROWS[recipe].filled}


AUTO = {recipe for recipe, found in TRANSFORMERS.items() if found.auto}
"""Recipes whose towers ``AutoModel`` of transformers builds."""


def stored_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of a tower's folder."""
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def transformers_class(family: str) -> Any:
    found = TRANSFORMERS[family]
    module = importlib.import_module(f"transformers.models.{found.module}.modeling_{found.module}")
    return vars(module)[found.name]
