"""An encoder's preprocessing set up as the checkpoint's processor files say, or a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from encoders import VisionEncoder
from encoders.images import PatchPreprocessor, Preprocessor, TilePreprocessor

from .contents import PROCESSOR_FILES
from .errors import CheckpointError
from .hub import HubSnapshot
from .plan import Tower
from .snapshot import Snapshot


def set_up_preprocessing(encoder: VisionEncoder, tower: Tower) -> dict[str, dict[str, Any]]:
    """Give ``encoder`` the preprocessing that the checkpoint of ``tower`` describes.

    Warns, as from the caller's caller, if no file says how images are prepared.

    Returns:
        The processor files that the checkpoint has: name without ``.json`` -> content.

    Raises:
        CheckpointError: a file that cannot be had or read, or a value that is not implemented.
    """
    snapshot = tower.contents.snapshot
    files = _read_files(snapshot)
    try:
        encoder.preprocessor = encoder.preprocessor.with_files(files)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{snapshot.label}: processor files: {error}") from error
    # timm's repos have no such files: its towers take the ImageNet mean and std, as ours do.
    if not _describe_images(files) and tower.layout.name != "timm":
        warnings.warn(_defaults_used(tower, encoder.preprocessor), stacklevel=3)
    return files


def _read_files(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """What the checkpoint says about preprocessing: file name without ``.json`` -> its content."""
    with ThreadPoolExecutor(
        len(PROCESSOR_FILES)
    ) as pool:  # on the Hub, one round trip and not three
        found = pool.map(lambda name: snapshot.read_json(f"{name}.json"), PROCESSOR_FILES)
        pairs = zip(PROCESSOR_FILES, found, strict=True)
        return {name: content for name, content in pairs if content is not None}


def _describe_images(files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether one says how images are prepared; old ``processor_config.json`` name a class only."""
    nested = files.get("processor_config", {}).get("image_processor")
    return "preprocessor_config" in files or isinstance(nested, Mapping)


def _defaults_used(tower: Tower, preprocessor: Preprocessor) -> str:
    """The warning where no file speaks: model.save_pretrained, for one, writes none."""
    snapshot = tower.contents.snapshot
    offline = isinstance(snapshot, HubSnapshot) and snapshot.repo.offline
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
    """What nothing in the checkpoint says, and the keyword that says otherwise, if there is one."""
    if isinstance(preprocessor, PatchPreprocessor):
        rules = preprocessor.images
        sizes = f"min_pixels={rules.min_pixels}, max_pixels={rules.max_pixels}"
        return f"{sizes}, mean={rules.mean}, std={rules.std}", "max_pixels"
    assert isinstance(preprocessor, TilePreprocessor)
    colours = f"mean={preprocessor.mean}, std={preprocessor.std}"
    if "max_dynamic_patch" in config:  # chat repos: their config says how images are tiled
        return colours, ""
    sizes = f"image_size={preprocessor.image_size}, max_tiles={preprocessor.max_tiles}"
    return f"{sizes}, {colours}", "max_tiles"
