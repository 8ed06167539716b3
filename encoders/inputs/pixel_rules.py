"""How Qwen repos resize, sample and normalise images and videos, and where their files say it.

The class defaults are those of transformers 5.23.0. A repo's processor files replace them; a value
that a file leaves out comes from the class that the file names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    ProcessorFiles,
    Section,
    Stats,
    image_section,
    read_positive,
    read_stats,
    require_supported,
    video_section,
)
from .sizes import MOST_PIXELS


@dataclass(frozen=True)
class PixelRules:
    """The values by which a Qwen repo resizes, samples and normalises its images, or its videos."""

    min_pixels: int
    max_pixels: int
    mean: Stats = CLIP_MEAN
    std: Stats = CLIP_STD
    whole_clip: bool = False
    """The bounds on the area hold for all frames of a video together (Qwen3-VL), not per frame."""
    min_frames: int = 4
    max_frames: int = 768

    def bounded(self, min_pixels: int | None, max_pixels: int | None) -> PixelRules:
        """Return a copy with these bounds on the area in place of its own.

        Args:
            min_pixels: smallest area in pixels; None keeps the copy's own.
            max_pixels: largest area in pixels; None keeps the copy's own.

        Raises:
            ValueError: the smallest area is larger than the largest.
        """
        lowest = self.min_pixels if min_pixels is None else min_pixels
        highest = self.max_pixels if max_pixels is None else max_pixels
        if lowest > highest:
            raise ValueError(
                f"min_pixels={lowest} is over max_pixels={highest}: pass both (this checkpoint's "
                f"own are {self.min_pixels} and {self.max_pixels})"
            )
        return replace(self, min_pixels=lowest, max_pixels=highest)


# Class defaults of transformers 5.23.0: Qwen2VLImageProcessor, Qwen2VLVideoProcessor,
# Qwen3VLVideoProcessor; and the values published with Qwen3-VL, which differ from its class's.
QWEN2_IMAGES = PixelRules(56 * 56, 1280 * 28**2)
QWEN2_VIDEOS = PixelRules(128 * 28**2, 768 * 28**2)
QWEN3_VIDEOS = PixelRules(128 * 32**2, 768 * 32**2, HALF, HALF, whole_clip=True)
QWEN3_PUBLISHED_IMAGES = PixelRules(256**2, 4096**2, HALF, HALF)
QWEN3_PUBLISHED_VIDEOS = PixelRules(4096, 25_165_824, HALF, HALF, whole_clip=True)


def patch_image_rules(
    files: ProcessorFiles, family: PixelRules, sizes: Mapping[str, int]
) -> PixelRules:
    """Read how a Qwen repo prepares images.

    Args:
        files: parsed JSON per file name without ``.json``.
        family: the rules to return where no file describes images.
        sizes: ``patch_size`` and the other sizes of the tower, which the files may not contradict.

    Raises:
        ValueError: a value that is not implemented, contradicts another value, or disagrees with
            the tower.
    """
    found = image_section(files)
    if found is None:
        return family
    rules = _read_pixel_rules(*found, QWEN2_IMAGES, sizes)
    try:
        return rules.bounded(None, None)
    except ValueError as error:
        raise ValueError(f"{found[0]}: {error}") from error


def patch_video_rules(
    files: ProcessorFiles, family: PixelRules, sizes: Mapping[str, int]
) -> PixelRules:
    """Read how a Qwen repo prepares videos.

    A smallest area above the largest one is not refused: a file for images that sets
    ``max_pixels`` alone may lie below the video class's default of ``min_pixels``. The
    preprocessor compares the two when a video is passed.

    Args:
        files: parsed JSON per file name without ``.json``.
        family: the rules to return where no file describes videos.
        sizes: ``patch_size`` and the other sizes of the tower, which the files may not contradict.

    Raises:
        ValueError: a value that is not implemented, or that disagrees with the tower.
    """
    found = video_section(files)
    if found is None:
        return family
    return _read_pixel_rules(*found, _qwen_video_defaults(found[1], family), sizes)


def _qwen_video_defaults(section: Section, family: PixelRules) -> PixelRules:
    """Return the class defaults of the video processor that transformers picks for ``section``.

    The class is ``video_processor_type``, else ``image_processor_type`` with "Video" for "Image"
    where such a class exists, else the class of the model. Hence the file of Qwen3-Omni bounds the
    area per frame, although its tower is Qwen3's, and a name that ends in "Fast" has no effect.
    """
    image_class = str(section.get("image_processor_type") or "")
    name = str(section.get("video_processor_type") or image_class.replace("Image", "Video"))
    named = {"Qwen2VLVideoProcessor": QWEN2_VIDEOS, "Qwen3VLVideoProcessor": QWEN3_VIDEOS}
    return named.get(name, QWEN3_VIDEOS if family.whole_clip else QWEN2_VIDEOS)


def _read_pixel_rules(
    where: str, section: Section, defaults: PixelRules, sizes: Mapping[str, int]
) -> PixelRules:
    require_supported(where, section, {"cap_pixels_per_frame": False})
    for key, tower in sizes.items():
        if section.get(key) not in (None, tower):
            raise ValueError(
                f"{where}: {key}={section[key]!r} but the tower has {tower}: use the processor "
                "files of the checkpoint's own repo"
            )
    lowest, highest = _pixel_bounds(where, section, defaults)
    mean, std = read_stats(where, section, defaults.mean, defaults.std)
    return replace(
        defaults,
        min_pixels=lowest,
        max_pixels=highest,
        mean=mean,
        std=std,
        min_frames=read_positive(
            where, "min_frames", section.get("min_frames"), defaults.min_frames
        ),
        max_frames=read_positive(
            where, "max_frames", section.get("max_frames"), defaults.max_frames
        ),
    )


def _pixel_bounds(where: str, section: Section, defaults: PixelRules) -> tuple[int, int]:
    size = section.get("size")
    if size is not None and not isinstance(size, Mapping):
        raise ValueError(f"{where}: size={size!r} must have shortest_edge and longest_edge")
    bounds = []
    for old, new, default in (
        ("min_pixels", "shortest_edge", defaults.min_pixels),
        ("max_pixels", "longest_edge", defaults.max_pixels),
    ):
        # Qwen3VLVideoProcessor reads only the spelling inside of ``size``.
        value = None if defaults.whole_clip else section.get(old)
        if value is None and size is not None:
            value = size.get(new, size.get(old))
            if value is None:
                raise ValueError(f"{where}: size={dict(size)} lacks {new}, an area in pixels")
        bounds.append(read_positive(where, old, value, default, MOST_PIXELS))
    return bounds[0], bounds[1]
