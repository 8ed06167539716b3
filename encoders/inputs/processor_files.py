"""Reading a repo's processor files: which file is read, its values, and values that are refused.

As in transformers 5.23.0, all values for images come from one section, and all values for videos
from one section: the nested section of ``processor_config.json``, else (for videos)
``video_preprocessor_config.json``, else ``preprocessor_config.json``. A value that the section
leaves out comes from the class that it names, not from another file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .sizes import MOST_PIXELS, MOST_TILES

ProcessorFiles: TypeAlias = Mapping[str, Mapping[str, Any]]
Section: TypeAlias = Mapping[str, Any]
Stats: TypeAlias = tuple[float, float, float]

CLIP_MEAN: Stats = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Stats = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN: Stats = (0.485, 0.456, 0.406)
IMAGENET_STD: Stats = (0.229, 0.224, 0.225)
HALF: Stats = (0.5, 0.5, 0.5)

_FILES = ("processor_config", "preprocessor_config", "video_preprocessor_config")
_MEANS, _STDS = (-10.0, 10.0), (1e-3, 1e3)
"""Bounds on mean and std of pixels from 0 to 1; within them all pixels stay finite in float16."""
_MUST_BE: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
}


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
    found = _video_section(files)
    if found is None:
        return family
    return _read_pixel_rules(*found, _qwen_video_defaults(found[1], family), sizes)


def tile_image_rules(
    files: ProcessorFiles, image_size: int, mean: Stats, std: Stats
) -> dict[str, Any]:
    """Read the fields of ``TilePreprocessor`` that the files of an InternVL repo set for images.

    Args:
        files: parsed JSON per file name without ``.json``.
        image_size: side of the tower's tiles in pixels, which the files may not contradict.
        mean: per channel, where the files leave it out.
        std: per channel, where the files leave it out.

    Raises:
        ValueError: a value that is not implemented, or that disagrees with the tower.
    """
    found = image_section(files)
    if found is None:
        return {}
    where, section = found
    if not _describes_tiles(section):  # of a remote-code repo, whose tiling is in its config.json
        mean, std = read_stats(where, section, mean, std)
        return {"mean": mean, "std": std}
    _check_converted(where, section, image_size)
    mean, std = read_stats(where, section, CLIP_MEAN, CLIP_STD)
    outer = files.get("processor_config", {}).get("processor_class")
    # InternVLProcessor cuts images into tiles even if the section of its image processor says
    # crop_to_patches=false, as published -hf repos do.
    tiled = "InternVLProcessor" in (section.get("processor_class"), outer)
    return {
        "mean": mean,
        "std": std,
        "dynamic": tiled or bool(section.get("crop_to_patches")),
        "min_tiles": read_positive(where, "min_patches", section.get("min_patches"), 1, MOST_TILES),
        "max_tiles": read_positive(
            where, "max_patches", section.get("max_patches"), 12, MOST_TILES
        ),
        "use_thumbnail": True,
    }


def tile_video_rules(
    files: ProcessorFiles, image_size: int, mean: Stats, std: Stats
) -> dict[str, Any]:
    """Read the fields of ``TilePreprocessor`` that the files of an InternVL repo set for videos.

    Args:
        files: parsed JSON per file name without ``.json``.
        image_size: side of the tower's tiles in pixels, which the files may not contradict.
        mean: per channel, where the files leave it out.
        std: per channel, where the files leave it out.

    Raises:
        ValueError: a value that is not implemented, or that disagrees with the tower.
    """
    found = _video_section(files)
    if found is None:
        return {}
    where, section = found
    if section.get("video_processor_type") or _describes_tiles(section):
        mean, std = CLIP_MEAN, CLIP_STD  # the defaults of the class that the section names
        _check_converted(where, section, image_size)
        require_supported(where, section, {"do_center_crop": False})
    mean, std = read_stats(where, section, mean, std)
    shift = True if section.get("initial_shift") is None else section["initial_shift"]
    if not isinstance(shift, int | float) or not 0 <= shift < 1e9:
        raise ValueError(
            f"{where}: initial_shift={shift!r} must be true, false or the number of a frame"
        )
    return {"video_mean": mean, "video_std": std, "initial_shift": shift}


def window_image_rules(files: ProcessorFiles, image_size: int, tile_size: int) -> dict[str, Any]:
    """Read the fields of ``WindowPreprocessor`` that the files of a Step repo set.

    StepFun's own code reads no value from a file; the files that transformers saves with its class
    are read.

    Args:
        files: parsed JSON per file name without ``.json``.
        image_size: side of the view of the whole image in pixels.
        tile_size: side of a tile in pixels.

    Raises:
        ValueError: a value that is not implemented, or that disagrees with the tower.
    """
    found = image_section(files)
    named = "" if found is None else str(found[1].get("image_processor_type") or "")
    if found is None or not named.startswith("Step3p7ImageProcessor"):
        return {}
    where, section = found
    size = {"height": image_size, "width": image_size}
    expected = {"resample": 2, "size": size, "patch_size": tile_size, "max_image_size": 3024}
    require_supported(where, section, expected)
    mean, std = read_stats(where, section, CLIP_MEAN, CLIP_STD)
    return {"mean": mean, "std": std}


def image_section(files: ProcessorFiles) -> tuple[str, Section] | None:
    """Return the section that describes images, and its name for errors, or None.

    DeepSeek's processors describe images at the top level of ``processor_config.json``.
    """
    top = files.get("processor_config", {})
    unknown = set(files) - set(_FILES)
    if unknown:
        raise ValueError(f"processor files {sorted(unknown)}: must be among {', '.join(_FILES)}")
    return _first(
        ("processor_config.json: image_processor", _nested(files, "image_processor")),
        ("preprocessor_config.json", files.get("preprocessor_config")),
        (
            "processor_config.json",
            top if {"image_mean", "candidate_resolutions"} & set(top) else None,
        ),
    )


def _video_section(files: ProcessorFiles) -> tuple[str, Section] | None:
    return _first(
        ("processor_config.json: video_processor", _nested(files, "video_processor")),
        ("video_preprocessor_config.json", files.get("video_preprocessor_config")),
        ("preprocessor_config.json", files.get("preprocessor_config")),
    )


def _nested(files: ProcessorFiles, name: str) -> Any:
    return files.get("processor_config", {}).get(name)


def _first(*candidates: tuple[str, Any]) -> tuple[str, Section] | None:
    return next(((name, part) for name, part in candidates if isinstance(part, Mapping)), None)


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


def _describes_tiles(section: Section) -> bool:
    named = str(section.get("image_processor_type") or "")
    return named.startswith("GotOcr2ImageProcessor") or "crop_to_patches" in section


def _check_converted(where: str, section: Section, image_size: int) -> None:
    require_supported(where, section)
    size = section.get("size") or {"height": 384, "width": 384}  # the class default
    if size != {"height": image_size, "width": image_size}:
        raise ValueError(
            f"{where}: size={size} but the tower takes tiles of {image_size}x{image_size}: use the "
            "processor files of the checkpoint's own repo"
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


def require_supported(where: str, section: Section, more: Section | None = None) -> None:
    """Raise if the file turns a step off, or turns a step on that is not implemented.

    Args:
        where: name of the section in errors.
        section: of a processor file.
        more: the only values of further keys, and of keys whose usual value is another.
    """
    for key, only in {**_MUST_BE, **(more or {})}.items():
        value = section.get(key)
        if value is not None and value != only:
            raise ValueError(f"{where}: {key}={value!r} is not implemented: it must be {only!r}")


def read_stats(where: str, section: Section, mean: Stats, std: Stats) -> tuple[Stats, Stats]:
    """Return ``image_mean`` and ``image_std`` of a section, or the defaults."""
    rescale = section.get("rescale_factor")
    known = isinstance(rescale, int | float) and abs(rescale * 255 - 1) < 1e-6
    if rescale is not None and not known:
        raise ValueError(
            f"{where}: rescale_factor={rescale!r} is not implemented: it must be 1/255"
        )
    return (
        _triple(where, "image_mean", section.get("image_mean"), mean, _MEANS),
        _triple(where, "image_std", section.get("image_std"), std, _STDS),
    )


def _triple(where: str, key: str, value: Any, default: Stats, bounds: tuple[float, float]) -> Stats:
    if value is None:
        return default
    numbers = [value] * 3 if isinstance(value, int | float) else value
    if (
        not isinstance(numbers, list | tuple)
        or len(numbers) != 3
        or not all(isinstance(n, int | float) and bounds[0] <= n <= bounds[1] for n in numbers)
    ):
        rule = f"three numbers from {bounds[0]} to {bounds[1]}"
        raise ValueError(f"{where}: {key}={value!r} must be {rule}, one per channel")
    red, green, blue = (float(n) for n in numbers)
    return red, green, blue


def read_positive(where: str, key: str, value: Any, default: int, most: int | None = None) -> int:
    """Return a positive integer of a section, or the default for None."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {key}={value!r} must be a positive integer")
    if most is not None and value > most:
        raise ValueError(f"{where}: {key}={value!r} must be at most {most}")
    return value
