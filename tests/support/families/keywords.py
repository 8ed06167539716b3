"""Which families take which keywords of ``preprocess`` and ``encode``: their encoders are asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from PIL import Image

from encoders import Encoder
from encoders.streams import ResultSettings
from weights import FAMILIES
from weights.configs import build_config
from weights.families.family import Family

VALUES: dict[str, Any] = {
    "min_pixels": 90_000,
    "max_pixels": 300_000,
    "max_tiles": 2,
    "max_soft_tokens": 140,
    "fps": 2.0,
    "num_frames": 2,
}
"""Every keyword of ``preprocess`` that bounds sizes or samples videos, with a value to ask with."""
IMAGE = Image.new("RGB", (400, 300))
"""The image that encoders are asked with."""


def encoders_of(family: Family) -> Iterator[Encoder]:
    """Yield one encoder, on the meta device, per model type of the family's checkpoints."""
    by_type = {model.config.get("model_type"): model for model in family.facts.published}
    for model in by_type.values():
        yield family.on_meta(build_config(family, model.config, None, model.repo_id))


def refusal(encoder: Encoder, keyword: str) -> str | None:
    """Return the error of an encoder about a keyword of :data:`VALUES`, None if it takes that."""
    try:
        encoder.preprocessor([IMAGE], **{keyword: VALUES[keyword]})
    except ValueError as error:
        return str(error)
    return None


def takes(encoder: Encoder, keyword: Any) -> bool:
    """Return whether an encoder takes a keyword of :data:`VALUES` or a pool such as "cls"."""
    if keyword in VALUES:
        return refusal(encoder, keyword) is None
    try:
        encoder.item_encoder().check(ResultSettings(keyword))
    except ValueError:
        return False
    return True


MEANINGS = {
    "min_pixels": "`min_pixels`, the smallest area of an image in pixels",
    "max_pixels": "`max_pixels`, the largest area of an image in pixels",
    "max_tiles": "`max_tiles`, the most tiles of an image, a thumbnail not counted",
    "max_soft_tokens": "`max_soft_tokens`, the most tokens of an image or frame",
    "fps": "`fps` or `num_frames`, which sample the frames of videos",
    "cls": '`pool="cls"`, the class token',
    "head": '`pool="head"`, the vector that the checkpoint was trained to compare',
}
"""The rows of the table of keywords by the keyword or pool that encoders are asked about."""


def keyword_rows() -> Iterator[tuple[str, str]]:
    """Yield the cells of each row of the table of keywords: the keyword, and who takes it."""
    encoders = {family.facts.title: list(encoders_of(family)) for family in FAMILIES.values()}
    for keyword, meaning in MEANINGS.items():
        answers = {
            title: [takes(encoder, keyword) for encoder in asked]
            for title, asked in encoders.items()
        }
        titles = (
            title if all(answer) else f"{title} (some repos)"
            for title, answer in answers.items()
            if any(answer)
        )
        yield meaning, "; ".join(titles)
