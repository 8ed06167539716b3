"""The families: one record per encoder, and functions that find a checkpoint's family and config.

A family has a record, which is Python (``family`` defines its class), and ``facts/<family>.json``,
which lists its published checkpoints. A module holds the records of one maker, and is named as the
folder of its towers in ``encoders``.

A new family is a record, an entry in ``FAMILIES`` and a file of facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from ..errors import CheckpointError, legible
from ..files.tower_folder import vision_section
from ..strict_json import JsonDict, JsonObject
from .baidu import ERNIE4_5_VL
from .deepseek import DEEPSEEK_OCR, DEEPSEEK_VL, DEEPSEEK_VL2, DEEPSEEK_VL_HYBRID
from .family import Family, FamilyConfig, Fields, Shapes
from .gemma import GEMMA4
from .glm import GLM4V, GLM_OCR
from .idefics import IDEFICS3
from .intern import INTERN_VIT
from .kimi import MOONVIT
from .lfm import LFM2_VL
from .llama import LLAMA4
from .minimax import MINIMAX_M3
from .mistral import PIXTRAL
from .paddleocr_vl import PADDLEOCR_VL
from .qwen import QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from .siglip import GEMMA3, SIGLIP, SIGLIP2
from .step import STEP3, STEP3_VL

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        INTERN_VIT,
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        STEP3_VL,
        STEP3,
        DEEPSEEK_OCR,
        DEEPSEEK_VL,
        DEEPSEEK_VL_HYBRID,
        DEEPSEEK_VL2,
        GLM4V,
        GLM_OCR,
        SIGLIP,
        SIGLIP2,
        GEMMA3,
        PIXTRAL,
        GEMMA4,
        PADDLEOCR_VL,
        IDEFICS3,
        MOONVIT,
        LLAMA4,
        LFM2_VL,
        MINIMAX_M3,
        ERNIE4_5_VL,
    )
}
"""Every family by name."""


def find_family(
    config: JsonObject,
    names: Iterable[str],
    label: str,
    family_name: str | None,
    fits: Callable[[Family], bool],
    saved: str | None = None,
) -> Family:
    """Find the family of a checkpoint by its model type, else by its timm architecture.

    Args:
        config: the whole ``config.json``.
        names: the checkpoint's tensor names; they decide if the config has no model type, or one
            that several families have.
        label: name of the checkpoint in errors.
        family_name: the user's choice, taken if the checkpoint's model type is unknown; or None.
        fits: returns whether the checkpoint's config and tensors fit a family; called if tensor
            names leave several families, and to suggest families in the error.
        saved: name of the family that the config of an extracted tower states, which decides; None
            for any other checkpoint.

    Raises:
        CheckpointError: no family is found, or another one than ``family_name``.
    """
    section, parents = vision_section(config)
    types = [part.get("model_type") for part in (section, *parents)]
    _check_refused(types, label)
    kind = _telling_type(types)
    if saved is not None:
        candidates, description = [FAMILIES[saved]], ""
    else:
        candidates, description = _families_of_type(kind, config.get("architecture"))
    if len(candidates) > 1:  # several families share the model type, so tensor names decide
        description = f"{description}, with tensors of no known tower,"
        outer_types = {other for other in types if isinstance(other, str) and other != kind}
        candidates = _families_of_tensors(candidates, outer_types, [*names], fits)
    if len(candidates) > 1:  # SigLIP and SigLIP2 NaFlex differ only in the shape of a tensor
        candidates = [family for family in candidates if fits(family)] or candidates
    if candidates and family_name not in (None, candidates[0].name):
        raise CheckpointError(
            f"{label}: its tower is of the family {candidates[0].name!r}, not of "
            f"family={family_name!r}: leave family (--family) out; it is for types that are "
            "not known"
        )
    if candidates:
        return candidates[0]
    if family_name is not None:
        return FAMILIES[family_name]
    raise _unsupported(description, label, fits)


def _telling_type(types: Iterable[object]) -> str | None:
    """Return the first model type in ``types`` that tells the tower's family, None without one.

    ``types`` begins with the type of the tower's part of the config and ends with that of the whole
    model, which decides for MiniMax-M3: its tower has the type clip_vision_model of CLIP's towers.
    """
    model_types = [kind for kind in types if isinstance(kind, str)]
    telling_types = [kind for kind in model_types if kind != "clip_vision_model"]
    return next(iter(telling_types or model_types), None)


def _families_of_type(kind: str | None, architecture: object) -> tuple[list[Family], str]:
    """Return the families of a model type or timm architecture, and a phrase that names it.

    Without a model type (``kind``) the ``architecture`` decides; without both, any family may fit.
    """
    families = list(FAMILIES.values())
    if kind is not None:
        of_type = [family for family in families if kind in family.model_types]
        return of_type, f"model_type {legible(kind)!r}"
    if isinstance(architecture, str):
        of_timm = [family for family in families if architecture in family.timm]
        return of_timm, f"timm architecture {legible(architecture)!r}"
    return families, "a config.json without model_type"


def _families_of_tensors(
    candidates: list[Family],
    outer_types: set[str],
    names: list[str],
    fits: Callable[[Family], bool],
) -> list[Family]:
    """Return the candidates that agree with the tensor names and the type of the whole model.

    Args:
        candidates: the families that have the model type of the tower.
        outer_types: the model types of the config outside the tower's part.
        names: the checkpoint's tensor names.
        fits: returns whether the checkpoint's config and tensors fit a family.
    """
    of_outer_type = [
        family for family in candidates if outer_types.intersection(family.model_types)
    ]
    with_signs = [family for family in of_outer_type or candidates if _has_signs(family, names)]
    if with_signs or len(of_outer_type) == 1:
        return with_signs or of_outer_type
    return [family for family in candidates if not outer_types and fits(family)]


def _unsupported(description: str, label: str, fits: Callable[[Family], bool]) -> CheckpointError:
    """Return the error for an unsupported checkpoint, which suggests every family that ``fits``.

    ``description`` names its model type or architecture, ``label`` the checkpoint.
    """
    kinds = dict.fromkeys(kind for family in FAMILIES.values() for kind in family.model_types)
    timm = ", ".join(name for family in FAMILIES.values() for name in family.timm)
    suggestion = "".join(
        f"; its config and tensors fit the {family.facts.title} tower: pass family={family.name!r} "
        f"(--family {family.name}) to load it as one"
        for family in FAMILIES.values()
        if fits(family)
    )
    return CheckpointError(
        f"{label}: {description} is not supported{suggestion}; supported model types: "
        f"{', '.join(kinds)}; timm architectures: {timm}"
    )


def _check_refused(types: Iterable[object], label: str) -> None:
    """Raise a CheckpointError if one of a config's model ``types`` is known not to be supported.

    The error names the checkpoint by ``label``, and says what differs from the similar family.
    """
    for kind in types:
        for family in FAMILIES.values():
            if isinstance(kind, str) and kind in family.refusals:
                raise CheckpointError(
                    f"{label}: model_type {legible(kind)!r} is not supported: "
                    f"{family.refusals[kind]}; run it with the code of its own repo, or with vLLM"
                )


def _has_signs(family: Family, names: list[str]) -> bool:
    def has(sign: str) -> bool:
        return any(name.endswith(sign) for name in names)

    return any(has(first) and has(second) for first, second in family.signs)


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
    """Return a copy of ``config`` in which missing fields are supplied by shapes of tensors.

    Args:
        config: a published config, or the tower's part of one.
        fields: all names of a field -> the function that reads its value from shapes. A field is
            missing if the config has none of its names; it is then added under the first name,
            unless the function raises a LookupError because the shapes do not tell the value.
        shapes: shapes of the tower's tensors by the encoder's names; if empty, nothing is added.
    """
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
