"""Writes ``docs/families.md`` from the records of the families.

``python -m tests.support.families.page`` writes the page anew.
``vllm_encoder_graphs.json``, beside this file, holds which architectures of vLLM have encoder
graphs.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import timm

from encoders import Qwen3VLEncoder
from encoders.allenai.molmo2_pixels import OverlapPreprocessor
from encoders.base.patch_encoder import PatchEncoder
from encoders.base.tile_encoder import TileEncoder
from encoders.clip.clip_pixels import CentreCropPreprocessor
from encoders.deepseek.deepseek_ocr_pixels import OcrPreprocessor
from encoders.deepseek.deepseek_vl2_pixels import CandidatePreprocessor
from encoders.deepseek.deepseek_vl_pixels import HybridPreprocessor, SquarePreprocessor
from encoders.gemma.gemma4_pixels import SoftTokenPreprocessor
from encoders.ibm.granite_docling_pixels import PagePreprocessor
from encoders.idefics.idefics3_pixels import SplitPreprocessor
from encoders.inputs.any_res import AnyResPreprocessor
from encoders.inputs.fixed_size import FixedSizePreprocessor, FixedSizeRules
from encoders.inputs.patches import PatchPreprocessor
from encoders.inputs.pixel_rules import PixelRules
from encoders.intern.intern_vit_pixels import TilePreprocessor
from encoders.lfm.lfm2_vl_pixels import PatchTilesPreprocessor
from encoders.llama.llama4_pixels import CanvasPreprocessor
from encoders.meta.sam3_pixels import Sam3Preprocessor
from encoders.minicpm.minicpm_v_pixels import SlicePreprocessor
from encoders.nvidia.nemotron_pixels import NemotronTilesPreprocessor
from encoders.siglip.siglip_pixels import StretchPreprocessor
from encoders.step.step3_pixels import CropPreprocessor
from tests.support.families.keywords import keyword_rows
from vitgraph.embedding import feature_store
from vitgraph.integrations import vllm
from vitgraph.integrations.model_towers.records import CALLS
from vitgraph.integrations.vllm_plugin.records import MODELS
from weights import FAMILIES
from weights.configs import build_config
from weights.families.family import Family
from weights.published import NO_VIDEO, PublishedModel

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
ENGINES = Path(__file__).with_name("vllm_encoder_graphs.json")
PARTS = {
    "merger": "merger",
    "deepstack_merger_list": "DeepStack mergers",
    "mlp1": "projector",
    "aligner": "projector",
    "projector": "projector",
    "connector": "connector",
    "resampler": "resampler",
    "embed_vision": "projector",
    "vit_large_projector": "projector",
    "pool": "pooling",
    "head": "pooling head",
}
"""Name of a layer of an encoder -> what it is, beside the tower."""
OTHER_FILES = ("glm5_next",)
"""Model types whose repos publish other processor files than the record of their layout has."""
TOP = """# Families

This page lists the families, their checkpoints, and the sizes of images and videos that each reads.
`vitgraph list` prints the same repos. `python -m tests.support.families.page` writes this page from
the records in `weights/families`.

## Where each runs

Every family works with `encode`, `embed`, `feature_maps` and `GraphedEncoder`. The columns on
the right are about other libraries:

- `as_vision_tower`: the tower can be put into [transformers' model](integrations.md#transformers).
- vLLM plug-in: the tower can run [inside vLLM](engines.md#vllm-our-towers-inside).
- vLLM features, vLLM stores: vLLM can read features that were encoded before,
  [in requests](engines.md#features-in-requests-to-vllm) or
  [from a store](engines.md#a-feature-store-for-vllm).
- Dynamo: [Dynamo](engines.md#an-encoder-for-dynamo) can call the encoder for a multimodal decoder.
  With a text-only decoder, any tower without DeepStack works.
"""
INPUTS = """
## What each reads

Parameters are counted for the tower and its merger, in millions; the parameters of a separate
projector follow in brackets. Limits are those of the published processor files; if the files of a
repo differ, the repo's own limits apply. The keywords `min_pixels`, `max_pixels`, `max_tiles` and
`max_soft_tokens` change the limits per call for the families that accept them. Each side is rounded
to a whole number of tokens.
"""
KEYWORDS = """
## Which keywords each takes

A keyword of `preprocess` or `encode` that has no meaning for a family is an error, which names the
keyword to use instead, if there is one. Options of commands have the same names.
"""


class Row(NamedTuple):
    """The facts about a published checkpoint that the page lists: parts, images and videos."""

    parts: str
    images: str
    videos: str


def page() -> str:
    """Return the text of ``docs/families.md``."""
    lines = [*TOP.splitlines(), "", *overview(), *KEYWORDS.splitlines(), ""]
    lines += [*table(("keyword", "families"), list(keyword_rows())), *INPUTS.splitlines()]
    for family in FAMILIES.values():
        lines += ["", f"### {family.facts.title}", "", *section(family)]
    return "\n".join([one for line in [*lines, "", *engines(), ""] for one in wrapped(line)])


def wrapped(line: str) -> list[str]:
    """Return the lines of at most 100 columns of a line of prose; rows of tables stay whole."""
    if line.startswith("|"):
        return [line]
    return textwrap.wrap(line, 100, break_on_hyphens=False) or [""]


def overview() -> Iterator[str]:
    """Yield the lines of ``docs/families.md`` with the table of families and integrations."""
    yield from table(
        (
            *("family", "class", "video", "graphs of images", "graphs of videos"),
            *("`as_vision_tower`", "vLLM plug-in", "vLLM features", "vLLM stores", "Dynamo"),
        ),
        [
            (
                *(link(family), f"`{encoder_class(family).__name__}`", family.facts.video),
                *(family.facts.replays["image"], family.facts.replays["video"]),
                yes(encoder_class(family) in CALLS),
                yes(any(record.family == family.name for record in MODELS.values())),
                yes(encoder_class(family) in vllm.TOWERS),
                yes(encoder_class(family) in feature_store.TOWERS),
                yes(encoder_class(family) is Qwen3VLEncoder),
            )
            for family in FAMILIES.values()
        ],
    )


def section(family: Family) -> Iterator[str]:
    """Yield the lines of ``docs/families.md`` about one family."""
    if not family.facts.verified:
        yield "No upstream implementation can be installed to compare this tower with."
        yield ""
    groups: dict[Row, list[PublishedModel]] = {}
    for model in family.facts.published:
        groups.setdefault(described(family, model), []).append(model)
    rows = [
        (repos(models), millions(models), row.parts, row.images, row.videos)
        for row, models in groups.items()
    ]
    yield from table(("repos", "parameters, millions", "read", "images", "videos"), rows)
    for kinds, reason in refusals(family):
        yield ""
        yield f"Not supported: {', '.join(f'`{kind}`' for kind in kinds)}, because {reason}."


def described(family: Family, model: PublishedModel) -> Row:
    """Return the loaded parts of a published checkpoint, and the sizes that its inputs take."""
    layout = next(layout for layout in family.layouts if layout.name == model.layout)
    encoder: Any = family.on_meta(build_config(family, model.config, None, model.repo_id))
    rules = encoder.preprocessor
    with suppress(ValueError):  # the files of another size of the family: the tower's own hold
        if model.config.get("model_type") not in OTHER_FILES:
            rules = rules.with_files(processor_files(family, model) or layout.processor_files)
    found = [PARTS[name] for name, layer in encoder.named_children() if in_use(name, layer)]
    parts = ", ".join(dict.fromkeys(["tower", *found]))
    videos = video_sizes(family, rules) if not layout.images_only else NO_VIDEO
    return Row(parts, f"{image_sizes(rules)}{tokens(encoder)}", videos)


def processor_files(family: Family, model: PublishedModel) -> dict[str, Any]:
    """Return the processor file that stands for the config of a checkpoint of timm, if any."""
    if family.processor_of is None or not model.repo_id.startswith("timm/"):
        return {}
    settings: Any = timm.get_pretrained_cfg(model.repo_id.removeprefix("timm/"))
    config = {**model.config, "pretrained_cfg": settings.to_dict()}
    return {"preprocessor_config": family.processor_of(config)}


def in_use(name: str, layer: Any) -> bool:
    """Return whether a submodule of an encoder is one of the listed parts and has weights."""
    return name in PARTS and any(True for _ in layer.parameters())


def image_sizes(rules: Any) -> str:
    """Describe the size to which preprocessing brings an image."""
    match rules:
        case SoftTokenPreprocessor():
            return f"any size, at most {soft_tokens(rules, rules.images)} soft tokens"
        case FixedSizePreprocessor(images=FixedSizeRules() as fixed):
            size = f"{fixed.width}x{fixed.height}"
            size = f"the middle {size}" if fixed.short_side else f"stretched to {size}"
            return f"{size}, or any size with `max_pixels`"
        case PatchPreprocessor():
            single = rules.temporal_patch_size == 1
            return f"any size, {area(rules.images, single=single)}"
        case PagePreprocessor():
            count = f"{rules.min_tiles} to {rules.max_tiles} tiles of {square(rules.image_size)}"
            return f"{count}, and the whole image"
        case TilePreprocessor():
            count = f"{rules.min_tiles} to {rules.max_tiles} tiles of {square(rules.image_size)}"
            return f"{count}, and a thumbnail" if rules.use_thumbnail else count
        case CentreCropPreprocessor():
            return f"the square in the middle, at {square(rules.image_size)}"
        case StretchPreprocessor() | Sam3Preprocessor():
            return f"stretched to {square(rules.image_size)}"
        case SplitPreprocessor():
            return (
                f"longest side {rules.longest_edge}, as tiles of {square(rules.image_size)}, and "
                "the whole image"
            )
        case CanvasPreprocessor():
            return (
                f"up to {rules.max_tiles} tiles of {square(rules.image_size)} and, if there are "
                "several, the whole image"
            )
        case NemotronTilesPreprocessor():
            return (
                f"up to {rules.max_tiles} tiles of {square(rules.image_size)}, and the whole image"
            )
        case PatchTilesPreprocessor():
            return (
                f"any size, {rules.min_pixels:,} to {rules.max_pixels:,} pixels, and tiles of "
                f"{square(rules.tile_size)} of larger ones; one token per {square(rules.factor)}"
            )
        case SlicePreprocessor():
            side = square(rules.resolution)
            return (
                f"the whole image at about {side}, and up to {rules.max_tiles} slices of about "
                f"{side} of larger ones; one token per {square(rules.factor)}"
            )
        case CropPreprocessor():
            return (
                f"the whole image at {square(rules.image_size)}, and tiles of "
                f"{square(rules.tile_size)} of larger ones"
            )
        case OverlapPreprocessor():
            side = square(rules.image_size)
            return f"the whole image at {side}, and up to {rules.max_tiles} crops of {side}"
        case OcrPreprocessor():
            several = "" if rules.tiles_several else "; no tiles of several images in one call"
            return (
                f"the whole image at {square(rules.base_size)}, and up to {rules.max_tiles} tiles "
                f"of {square(rules.tile_size)}{several}"
            )
        case HybridPreprocessor():
            return f"padded to {square(rules.low_size)} and to {square(rules.image_size)}"
        case SquarePreprocessor():
            return f"padded to {square(rules.image_size)}"
        case CandidatePreprocessor() | AnyResPreprocessor():
            pixels, side = rules.image_size**2, square(rules.image_size)
            sizes = rules.pinpoints if isinstance(rules, AnyResPreprocessor) else rules.candidates
            largest = max(width * height for width, height in sizes)
            return f"the whole image at {side}, and up to {largest // pixels} tiles of {side}"
    raise ValueError(f"{type(rules).__name__}: say in image_sizes what it makes of an image")


def video_sizes(family: Family, rules: Any) -> str:
    """Describe how a clip enters the tower."""
    if isinstance(rules, NemotronTilesPreprocessor):
        return f"one tile of {square(rules.image_size)} per frame"
    if family.facts.video == NO_VIDEO:
        return NO_VIDEO
    if not isinstance(rules, PatchPreprocessor):
        return family.facts.video
    if rules.images_alone:
        return NO_VIDEO
    if isinstance(rules, SoftTokenPreprocessor):
        return f"{family.facts.video}, at most {soft_tokens(rules, rules.videos)} soft tokens each"
    whole = " for all frames together" if rules.videos.bounds_all_frames else " per frame"
    return f"{family.facts.video}, {area(rules.videos, whole)}"


def soft_tokens(rules: SoftTokenPreprocessor, limits: PixelRules) -> int:
    """Return the most soft tokens that the largest area of an image makes."""
    return limits.max_pixels // (rules.patch_size * rules.pool) ** 2


def area(rules: PixelRules, of: str = "", single: bool = False) -> str:
    """Describe the bounds on an area in pixels; ``of`` says what has that area.

    ``single`` says whether patches have one frame, so that an image counts once.
    """
    if rules.longest_edge is not None:
        return f"longest side {rules.longest_edge}"
    twice = ", counted twice" if rules.bounds_all_frames and not (of or single) else ""
    least = f"{rules.min_pixels:,} to " if rules.min_pixels > 1 else "at most "
    return f"{least}{rules.max_pixels:,} pixels{of}{twice}"


def tokens(encoder: Any) -> str:
    """Describe how many tokens an image becomes; empty if the number varies."""
    if isinstance(encoder, TileEncoder):
        return f"; {encoder.budget_range[0]} tokens each"
    if not isinstance(encoder, PatchEncoder):
        return ""
    rules: Any = encoder.preprocessor
    patches = 12  # per side: whole tokens of 1, 2 or 3 patches
    (spec,) = encoder.item_specs([[1, patches, patches]])
    count = isqrt(spec.output_tokens)
    learned = "" if count**2 == spec.output_tokens else ", and learned ones"
    return f"; one token per {square(patches * rules.patch_size // count)}{learned}"


def engines() -> Iterator[str]:
    """Yield the lines of the page about vLLM's architectures with encoder graphs."""
    known = json.loads(ENGINES.read_text())
    here = towers_here()
    count, total = len(here), len(known["architectures"])
    yield "## vLLM's architectures with encoder graphs"
    yield ""
    yield (
        f"vLLM {known['vllm']} registers {total} architectures whose vision tower it can run as "
        f"CUDA graphs. This library has the towers of {count} of them."
    )
    yield ""
    rows = [
        (
            f"`{name}`",
            link(here[name]) if name in here else f"not supported: {absence(kind)}",
            yes(name in MODELS),
        )
        for name, kind in known["architectures"].items()
    ]
    yield from table(("architecture", "tower", "our plug-in"), rows)


def towers_here() -> Mapping[str, Family]:
    """Return the families of vLLM's architectures with encoder graphs that this library has."""
    names = json.loads(ENGINES.read_text())["architectures"]
    return {name: found for name in names if (found := family_of(name)) is not None}


def family_of(architecture: str) -> Family | None:
    """Return the family of the tower of a vLLM architecture, or None if no family has it.

    The architectures that published configs state are looked up first, since several families share
    the model types of DeepSeek.
    """
    kind = json.loads(ENGINES.read_text())["architectures"][architecture]
    stated = [
        family
        for family in FAMILIES.values()
        if any(
            architecture in dict[str, Any](one.config).get("architectures", ())
            for one in family.facts.published
        )
    ]
    found = stated or [family for family in FAMILIES.values() if kind in family.model_types]
    assert len(found) <= 1, (architecture, [family.name for family in found])
    return found[0] if found else None


def absence(kind: str) -> str:
    """Return the reason why this library has no tower for a model type."""
    for family in FAMILIES.values():
        if kind in family.refusals:
            return family.refusals[kind]
    reason: str = json.loads(ENGINES.read_text())["absent"][kind]
    return reason


def refusals(family: Family) -> list[tuple[list[str], str]]:
    """Return the model types that a family refuses, grouped by the reason."""
    kinds: dict[str, list[str]] = {}
    for kind, reason in family.refusals.items():
        kinds.setdefault(reason, []).append(kind)
    return [(found, reason) for reason, found in kinds.items()]


def repos(models: Sequence[PublishedModel]) -> str:
    """Return the repo ids of checkpoints as text, grouped by owner."""
    owners: dict[str, list[str]] = {}
    for model in models:
        owner, _, name = model.repo_id.partition("/")
        owners.setdefault(owner, []).append(name)
    return "; ".join(f"{owner}/ {', '.join(names)}" for owner, names in owners.items())


def millions(models: Sequence[PublishedModel]) -> str:
    """Return the numbers of parameters of towers as text, and those of projectors in brackets."""
    towers = between([model.parameters for model in models])
    projectors = [model.projector_parameters for model in models if model.projector_parameters]
    return f"{towers} ({between(projectors)})" if projectors else towers


def between(numbers: Sequence[int]) -> str:
    """Return the range of some numbers as text, in millions."""
    ends = dict.fromkeys(f"{number / 1e6:,.0f}" for number in (min(numbers), max(numbers)))
    return " to ".join(ends)


def encoder_class(family: Family) -> type:
    """Return the class of a family's encoder."""
    assert isinstance(family.encoder, type)
    return family.encoder


def link(family: Family) -> str:
    """Return the title of a family as a link to its section."""
    kept = (letter for letter in family.facts.title.lower() if letter.isalnum() or letter in " -_")
    return f"[{family.facts.title}](#{''.join(kept).replace(' ', '-')})"


def square(side: int) -> str:
    """Return the size of a square in pixels as text, such as "448x448"."""
    return f"{side}x{side}"


def yes(holds: bool) -> str:
    """Return a cell of a table: "yes" or "-"."""
    return "yes" if holds else "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
