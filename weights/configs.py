"""The sizes of a tower: a published config, completed by the shapes of tensors.

Published configs may omit fields that transformers has defaults for. Most of them follow from the
shapes of tensors, and a family's record says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from .errors import CheckpointError
from .families.family import Family, FamilyConfig, Fields, Shapes
from .files.tower_folder import vision_section
from .strict_json import JsonDict, JsonObject


def build_config(
    family: Family, config: JsonObject, shapes: Shapes | None, label: str
) -> FamilyConfig:
    """Build an instance of ``family.config`` from a whole published ``config.json``.

    Args:
        family: the record of the family.
        config: the published config.
        shapes: shapes of the tower's tensors by the encoder's names, None if there are no tensors.
            They supply the fields that the config leaves out. Fields that the config states are
            taken as they are, and the loader reports tensors that disagree with them.
        label: name of the checkpoint in messages.

    Raises:
        CheckpointError: a size in the config is missing, or the encoder cannot have it.
    """
    try:
        completed = _complete_config(family, config, shapes or {})
        if shapes is not None and family.parse_config is not None:
            return family.parse_config(completed, shapes)
        return family.config.from_hf(completed)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{label}: config.json: {error}") from error


def _complete_config(family: Family, config: JsonObject, shapes: Shapes) -> JsonDict:
    """Return a copy of ``config`` whose missing fields are read from the ``shapes`` of tensors.

    In the copy, the section ``vision_config`` describes the tower; if ``config`` is the config of
    a tower alone, the whole copy does.
    """
    section, parents = vision_section(config)
    read_timm = family.timm.get(str(config.get("architecture")))
    if "model_type" not in config and read_timm is not None:
        arguments = config.get("model_args")
        section = read_timm(arguments if isinstance(arguments, Mapping) else {})
    completed = _fill_fields(section, family.fields, shapes)
    outer = {**config, "vision_config": completed} if parents else completed
    return _fill_fields(outer, family.outer_fields, shapes)


def _fill_fields(config: JsonObject, fields: Fields, shapes: Shapes) -> JsonDict:
    """Return a copy of ``config`` in which missing fields are supplied by shapes of tensors."""
    filled = dict(config)
    for names, read_value in fields.items() if shapes else ():
        paths = [name.rpartition(".") for name in names]
        if all(_section(filled, outer).get(name) is None for outer, _, name in paths):
            outer, _, name = paths[0]
            with suppress(LookupError):
                section = {**_section(filled, outer), name: read_value(shapes)}
                filled |= {outer: section} if outer else section
    return filled


def _section(config: JsonObject, name: str) -> JsonObject:
    section = config.get(name) if name else config
    return section if isinstance(section, Mapping) else {}
