"""Which families take which keywords of ``preprocess`` and ``encode``: their encoders are asked."""

from __future__ import annotations

from collections.abc import Iterator

from PIL import Image

from encoders import Encoder
from weights.families import build_config
from weights.families.family import Family

VALUES: dict[str, int | float] = {
    "min_pixels": 90_000,
    "max_pixels": 200_000,
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
    by_type = {model.config.get("model_type"): model for model in family.published}
    for model in by_type.values():
        yield family.on_meta(build_config(family, model.config, None, model.repo_id))


def refusal(encoder: Encoder, keyword: str) -> str | None:
    """Return the error of an encoder about a keyword of :data:`VALUES`, None if it takes that."""
    try:
        encoder.preprocessor([IMAGE], **{keyword: VALUES[keyword]})
    except ValueError as error:
        return str(error)
    return None
