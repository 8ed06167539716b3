"""Setting an encoder's preprocessing to the values of the checkpoint's processor files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from encoders import Encoder
from encoders.inputs import (
    PatchPreprocessor,
    Preprocessor,
    TilePreprocessor,
    ViewPreprocessor,
    WindowPreprocessor,
)

from .contents import PROCESSOR_FILES
from .errors import CheckpointError
from .plan import Tower


def set_up_preprocessing(encoder: Encoder, tower: Tower) -> dict[str, dict[str, Any]]:
    """Give ``encoder`` the preprocessing that the checkpoint of ``tower`` describes.

    A bad value for images is a CheckpointError, one for videos at the first video. If no file says
    how images are prepared, the caller of the function that calls this one is warned.

    Returns:
        The processor files that the checkpoint has: name without ``.json`` -> content.
    """
    snapshot = tower.contents.snapshot
    found = {name: snapshot.read_json(f"{name}.json") for name in PROCESSOR_FILES}
    files = {name: content for name, content in found.items() if content is not None}

    def bad_value(message: str) -> CheckpointError:
        return CheckpointError(f"{snapshot.label}: processor files: {message}")

    preprocessor = encoder.preprocessor.with_files(files, bad_value)
    if tower.layout.images_only:
        assert isinstance(preprocessor, PatchPreprocessor | TilePreprocessor)
        no_videos = CheckpointError(f"{snapshot.label}: {tower.layout.images_only}")
        preprocessor = replace(preprocessor, video_error=no_videos)
    encoder.preprocessor = preprocessor
    # The repos of timm and StepFun have no such files: their code has the values, as ours has.
    if not _describe_images(files) and tower.layout.processor_files:
        warnings.warn(_defaults_used(tower, encoder.preprocessor), stacklevel=3)
    return files


def _describe_images(files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a file describes images; old ``processor_config.json`` only name a class.

    That of DeepSeek-VL2 and DeepSeek-OCR describes them at its top level.
    """
    processor = files.get("processor_config", {})
    nested = isinstance(processor.get("image_processor"), Mapping) or "image_mean" in processor
    return "preprocessor_config" in files or nested


def _defaults_used(tower: Tower, preprocessor: Preprocessor) -> str:
    """Return the warning for a checkpoint without such files; ``save_pretrained`` writes none."""
    snapshot = tower.contents.snapshot
    offline = snapshot.offline
    values, keyword = _shown(preprocessor, tower.contents.config)
    fix = "copy preprocessor_config.json from the original repo"
    if keyword:
        fix += f", or pass {keyword}=..."
    if offline:
        fix = f"load once with a connection, {fix}"
    return (
        f"{snapshot.label}: no preprocessor_config.json or processor_config.json "
        f"{'in the cache ' if offline else ''}says how images are prepared, so "
        f"{tower.family.title}'s defaults are used ({values}), which may not be what the model was "
        f"trained with: {fix}"
    )


def _shown(preprocessor: Preprocessor, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the defaults that no file sets, and the keyword that overrides them, or none."""
    if isinstance(preprocessor, PatchPreprocessor):
        rules = preprocessor.images
        sizes = f"min_pixels={rules.min_pixels}, max_pixels={rules.max_pixels}"
        return f"{sizes}, mean={rules.mean}, std={rules.std}", "max_pixels"
    if isinstance(preprocessor, WindowPreprocessor | ViewPreprocessor):
        return f"mean={preprocessor.mean}, std={preprocessor.std}", ""
    assert isinstance(preprocessor, TilePreprocessor)
    colours = f"mean={preprocessor.mean}, std={preprocessor.std}"
    if "max_dynamic_patch" in config:  # chat repos: their config says how images are tiled
        return colours, ""
    sizes = f"image_size={preprocessor.image_size}, max_tiles={preprocessor.max_tiles}"
    return f"{sizes}, {colours}", "max_tiles"
