"""Which tower is this? The family, layout and prefix of the vision tower in a checkpoint.

:func:`find_encoder` asks in this order:

1. The family: by the model type in ``config.json``, else by the timm architecture. If several
   families share it, or there is none, the names of tensors decide, then what fits.
2. The layout of that family by which the tensors are named, and their prefix.
3. Whether the tensors are exactly those of the encoder that the config makes (``tower``, ``fit``).
"""

from __future__ import annotations

from collections.abc import Iterable

from encoders import Encoder

from .errors import CheckpointError, DamagedError, legible
from .families import FAMILIES
from .families.family import Family
from .files.checkpoint import Checkpoint
from .files.index import Contents, read_contents
from .files.tower_folder import vision_section
from .fit import build_encoder, left_out
from .layouts import Layout, Prefix
from .tower import FoundTower, read_tower


def find_encoder(checkpoint: Checkpoint, family: str | None = None) -> tuple[FoundTower, Encoder]:
    """Find the vision tower in a checkpoint, and build the encoder that its tensors fit.

    The first value says where the tower's tensors lie in the files. The second has parameters on
    the meta device, which have shapes but no values yet.

    Args:
        checkpoint: the opened checkpoint.
        family: name of the family to take if the checkpoint's model type is not known, or None.

    Raises:
        CheckpointError: the checkpoint has no known tower, or tensors that do not fit its config.
    """
    contents = read_contents(checkpoint)
    tower = _find_tower(contents, find_family(contents, family))
    return tower, build_encoder(tower)


def _find_tower(contents: Contents, family: Family) -> FoundTower:
    """Return the tower of a family in a checkpoint; raise a CheckpointError if it has none."""
    try:
        layout, prefix = _find_layout(contents, family)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{left_out(contents)}") from error
    return read_tower(contents, family, layout, prefix)


def _fits(contents: Contents, family: Family) -> bool:
    """Return whether the config and the tensors of a checkpoint make a tower of a family."""
    try:
        build_encoder(_find_tower(contents, family))
    except DamagedError:
        raise
    except CheckpointError:
        return False
    return True


def find_family(contents: Contents, family_name: str | None = None) -> Family:
    """Find the family of a checkpoint by its model type, else by its timm architecture.

    The names of tensors decide if the config has no model type, or one that several families have.
    The config of an extracted tower states the family.

    Args:
        contents: config and tensor names of the checkpoint.
        family_name: the user's choice, taken if the checkpoint's model type is unknown; or None.

    Raises:
        CheckpointError: no family is found, or another one than ``family_name``.
    """
    label = contents.checkpoint.label
    section, parents = vision_section(contents.config)
    types = [part.get("model_type") for part in (section, *parents)]
    _check_refused(types, label)
    kind = _deciding_type(types)
    if contents.family is not None:
        candidates, description = [FAMILIES[contents.family]], ""
    else:
        candidates, description = _families_of_type(kind, contents.config.get("architecture"))
    if len(candidates) > 1:  # several families share the model type, so tensor names decide
        outer_types = {other for other in types if isinstance(other, str) and other != kind}
        of_model = "".join(f" of a {legible(other)} model" for other in sorted(outer_types)[:1])
        description = f"{description}, with tensors of no known tower{of_model},"
        candidates = _families_of_tensors(contents, candidates, outer_types)
    if len(candidates) > 1:  # SigLIP and SigLIP2 NaFlex differ only in the shape of a tensor
        candidates = [family for family in candidates if _fits(contents, family)] or candidates
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
    raise _unsupported(contents, description)


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


def _deciding_type(types: Iterable[object]) -> str | None:
    """Return the first model type in ``types`` that decides the tower's family, None without one.

    ``types`` begins with the type of the tower's part of the config and ends with that of the whole
    model, which decides for MiniMax-M3: its tower has the type clip_vision_model of CLIP's towers.
    """
    model_types = [kind for kind in types if isinstance(kind, str)]
    deciding_types = [kind for kind in model_types if kind != "clip_vision_model"]
    return next(iter(deciding_types or model_types), None)


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
    contents: Contents, candidates: list[Family], outer_types: set[str]
) -> list[Family]:
    """Return the candidates that agree with the tensor names and the type of the whole model.

    There are none if that type is known, but as that of models with another tower.
    """
    of_outer_type = [
        family for family in FAMILIES.values() if outer_types.intersection(family.model_types)
    ]
    if of_outer_type:
        of_outer_type = [family for family in of_outer_type if family in candidates]
        if not of_outer_type:
            return []
    elif outer_types:
        candidates = [family for family in candidates if not family.by_type]
    with_signs = [one for one in of_outer_type or candidates if _has_signs(one, contents.files)]
    if with_signs or len(of_outer_type) == 1:
        return with_signs or of_outer_type
    return [family for family in candidates if not outer_types and _fits(contents, family)]


def _has_signs(family: Family, names: Iterable[str]) -> bool:
    def has(sign: str) -> bool:
        return any(name.endswith(sign) for name in names)

    own = any(has(first) and has(second) for first, second in family.signs)
    return own and not any(map(has, family.without))


def _unsupported(contents: Contents, description: str) -> CheckpointError:
    """Return the error for an unsupported checkpoint, which suggests every family that fits.

    ``description`` names its model type or architecture.
    """
    kinds = dict.fromkeys(kind for family in FAMILIES.values() for kind in family.model_types)
    timm = ", ".join(name for family in FAMILIES.values() for name in family.timm)
    suggestion = "".join(
        f"; its config and tensors fit the {family.facts.title} tower: pass family={family.name!r} "
        f"(--family {family.name}) to load it as one"
        for family in FAMILIES.values()
        if _fits(contents, family)
    )
    return CheckpointError(
        f"{contents.checkpoint.label}: {description} is not supported{suggestion}; supported model "
        f"types: {', '.join(kinds)}; timm architectures: {timm}"
    )


def _find_layout(contents: Contents, family: Family) -> tuple[Layout, Prefix]:
    """Return the first layout of a family whose ``marks`` the tensor names have, and the prefix.

    A CheckpointError is raised if no layout fits, if the checkpoint has towers under several
    prefixes, or if the layout is one that is not loaded (see ``Layout.refusal``).
    """
    names, label = contents.files, contents.checkpoint.label
    for layout in family.layouts:
        starts = {p: tuple(p.full + mark for mark in layout.marks) for p in layout.prefixes}
        prefixes = [p for p in layout.prefixes if any(name.startswith(starts[p]) for name in names)]
        if layout.needed:
            needed = {p: tuple(p.root + start for start in layout.needed) for p in prefixes}
            prefixes = [p for p in prefixes if any(name.startswith(needed[p]) for name in names)]
        if len(prefixes) > 1:
            raise CheckpointError(
                f"{label}: holds several towers, under "
                f"{' and '.join(repr(p.full) for p in prefixes)}: keep one of them"
            )
        if prefixes and layout.refusal:
            raise CheckpointError(f"{label}: {layout.refusal}")
        if prefixes:
            return layout, prefixes[0]
    tried_prefixes = dict.fromkeys(
        p.full or "(none)" for layout in family.layouts for p in layout.prefixes
    )
    first_words = ", ".join(
        legible(word) for word in sorted({name.split(".")[0] for name in names})[:12]
    )
    raise CheckpointError(
        f"{label}: no {family.name} vision tower among its {len(names)} tensors: looked under the "
        f"prefixes {', '.join(tried_prefixes)}; the names begin with {first_words or 'nothing'}"
    )
