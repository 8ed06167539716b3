"""What the processor files of an InternVL repo set, for images and for videos.

Source: ``GotOcr2ImageProcessor``, ``InternVLVideoProcessor`` and ``InternVLProcessor`` of
transformers 5.23.0.
"""

from __future__ import annotations

from typing import TypedDict

from ..inputs.processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    PerChannel,
    ProcessorFiles,
    Section,
    image_section,
    read_mean_std,
    read_positive,
    require_supported,
    video_section,
)
from ..inputs.sizes import MOST_TILES


class TileImageRules(TypedDict, total=False):
    """The fields of ``TilePreprocessor`` (InternVL) that processor files set for images."""

    mean: PerChannel
    std: PerChannel
    dynamic: bool
    min_tiles: int
    max_tiles: int
    use_thumbnail: bool


class TileVideoRules(TypedDict, total=False):
    """The fields of ``TilePreprocessor`` (InternVL) that processor files set for videos."""

    video_mean: PerChannel
    video_std: PerChannel
    initial_shift: bool | float


def tile_image_rules(
    files: ProcessorFiles, image_size: int, mean: PerChannel, std: PerChannel
) -> TileImageRules:
    """Return the fields of ``TilePreprocessor`` that the files of an InternVL repo set for images.

    Args:
        files: parsed JSON per file name without ``.json``.
        image_size: side of the tower's tiles in pixels, which the files may not contradict.
        mean: mean of each channel if the files have none.
        std: standard deviation of each channel if the files have none.

    Raises:
        ValueError: a value that is not implemented, or that disagrees with the tower.
    """
    entry = image_section(files)
    if entry is None:
        return {}
    label, section = entry
    # A repo with code of its own describes tiling in its config.json.
    if not _describes_tiles(section):
        mean, std = read_mean_std(label, section, mean, std)
        return {"mean": mean, "std": std}
    _check_converted(label, section, image_size)
    mean, std = read_mean_std(label, section, CLIP_MEAN, CLIP_STD)
    outer = files.get("processor_config", {}).get("processor_class")
    # InternVLProcessor cuts images into tiles even if the section of its image processor says
    # crop_to_patches=false, as published -hf repos do.
    tiled = "InternVLProcessor" in (section.get("processor_class"), outer)
    return {
        "mean": mean,
        "std": std,
        "dynamic": tiled or bool(section.get("crop_to_patches")),
        "min_tiles": read_positive(label, "min_patches", section.get("min_patches"), 1, MOST_TILES),
        "max_tiles": read_positive(
            label, "max_patches", section.get("max_patches"), 12, MOST_TILES
        ),
        "use_thumbnail": True,
    }


def tile_video_rules(
    files: ProcessorFiles, image_size: int, mean: PerChannel, std: PerChannel
) -> TileVideoRules:
    """Return the fields of ``TilePreprocessor`` that the files of an InternVL repo set for videos.

    Args:
        files: parsed JSON per file name without ``.json``.
        image_size: side of the tower's tiles in pixels, which the files may not contradict.
        mean: mean of each channel if the files have none.
        std: standard deviation of each channel if the files have none.

    Raises:
        ValueError: a value that is not implemented, or that disagrees with the tower.
    """
    entry = video_section(files)
    if entry is None:
        return {}
    label, section = entry
    if section.get("video_processor_type") or _describes_tiles(section):
        mean, std = CLIP_MEAN, CLIP_STD  # the defaults of the class that the section names
        _check_converted(label, section, image_size)
        require_supported(label, section, {"do_center_crop": False})
    mean, std = read_mean_std(label, section, mean, std)
    shift = True if section.get("initial_shift") is None else section["initial_shift"]
    if not isinstance(shift, int | float) or not 0 <= shift < 1e9:
        raise ValueError(
            f"{label}: initial_shift={shift!r} must be true, false or the number of a frame"
        )
    return {"video_mean": mean, "video_std": std, "initial_shift": shift}


def _describes_tiles(section: Section) -> bool:
    class_name = str(section.get("image_processor_type") or "")
    return class_name.startswith("GotOcr2ImageProcessor") or "crop_to_patches" in section


def _check_converted(label: str, section: Section, image_size: int) -> None:
    require_supported(label, section)
    # 384x384 is the default of GotOcr2ImageProcessor in transformers.
    size = section.get("size") or {"height": 384, "width": 384}
    if size != {"height": image_size, "width": image_size}:
        raise ValueError(
            f"{label}: size={size} but the tower takes tiles of {image_size}x{image_size}: use the "
            "processor files of the checkpoint's own repo"
        )
