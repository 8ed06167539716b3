"""The rules by which images and videos are resized, sampled and normalised for towers over patches.

Such towers are those of Qwen, GLM, ERNIE, MiniMax and Pixtral. Their defaults are those of the
processor classes of transformers 5.23.0. A repo's processor files replace them; a value that a file
leaves out comes from the class that the file names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from .processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    PerChannel,
    ProcessorFiles,
    Section,
    image_section,
    read_mean_std,
    read_positive,
    require_supported,
    video_section,
)
from .sampling import SamplingRule
from .sizes import MOST_PIXELS


@dataclass(frozen=True)
class PixelRules:
    """The values by which a checkpoint's images, or its videos, are resized and normalised."""

    min_pixels: int
    max_pixels: int
    mean: PerChannel = CLIP_MEAN
    std: PerChannel = CLIP_STD
    bounds_all_frames: bool = False
    """Whether ``min_pixels`` and ``max_pixels`` bound the area of all frames together (Qwen3-VL,
    GLM), not that of each frame; an image then counts as the frames of a patch, mostly two."""
    min_frames: int = 4
    max_frames: int = 768
    sampling: SamplingRule = "qwen2_vl"
    """The rule by which frames of a video are chosen if the user passes a number or rate."""
    max_duration: int = 0
    """A video of more seconds than this is sampled with fewer frames per second (GLM); 0 means that
    none is."""
    canvas: bool = False
    """Whether frames are laid on a black canvas (GLM-5) instead of stretched to its size."""
    joined_frames: int = 1
    """The number of frames that the tower merges into one (ERNIE-4.5-VL); the last frame of a clip
    is repeated to fill a multiple of it."""
    longest_edge: int | None = None
    """The most pixels of a side of an image before sides are rounded up to whole tokens (Pixtral);
    None for other families."""
    ignores_resample: bool = False
    """Whether images are resized bicubically whatever ``resample`` of a file says (HunyuanOCR)."""

    def bounded(self, min_pixels: int | None, max_pixels: int | None) -> PixelRules:
        """Return a copy of these rules with other bounds on the area of an image.

        Args:
            min_pixels: smallest area in pixels; None keeps the area of these rules.
            max_pixels: largest area in pixels; None keeps the area of these rules.

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
        if (lowest, highest) == (self.min_pixels, self.max_pixels):
            return self
        return replace(self, min_pixels=lowest, max_pixels=highest)


# Defaults of the processor classes of transformers 5.23.0; for ERNIE-4.5-VL, Baidu's are the same.
# GLM-5's class counts areas in tokens.
QWEN2_IMAGES = PixelRules(56 * 56, 1280 * 28**2)
QWEN2_VIDEOS = PixelRules(128 * 28**2, 768 * 28**2)
PADDLEOCR_IMAGES = PixelRules(384**2, 1536**2)
QWEN3_VIDEOS = PixelRules(
    128 * 32**2, 768 * 32**2, HALF, HALF, bounds_all_frames=True, sampling="qwen3_vl"
)
_TOKEN = 2 * 28**2
"""The pixels of one token in GLM's limits: two frames of 28x28."""
_GLM4V = PixelRules(112**2, 15_000 * 28**2, bounds_all_frames=True, sampling="glm4v")
_GLM46V = replace(_GLM4V, sampling="glm46v")
_GLM5 = PixelRules(
    16 * _TOKEN, 8_000 * _TOKEN, bounds_all_frames=True, sampling="glm5_next", canvas=True
)
_MINIMAX_M3 = PixelRules(4 * 28**2, 672**2, sampling="uniform")
_ERNIE = PixelRules(56 * 56, 6177 * 28**2, sampling="ernie")
_ERNIE_VIDEOS = PixelRules(
    299 * 28**2, 1196 * 28**2, min_frames=16, max_frames=180, sampling="ernie", joined_frames=2
)
_COSMOS3_EDGE = replace(QWEN3_VIDEOS, min_pixels=256**2, max_pixels=4096**2)
_HUNYUAN = PixelRules(512**2, 2048**2, ignores_resample=True)
PatchRule: TypeAlias = Literal[
    "qwen2_vl",
    "qwen3_vl",
    "glm4v",
    "glm46v",
    "glm5_next",
    "minimax_m3",
    "ernie",
    "cosmos3_edge",
    "hunyuan_vl",
]
PATCH_RULES: Mapping[PatchRule, tuple[PixelRules, PixelRules]] = {
    "qwen2_vl": (QWEN2_IMAGES, QWEN2_VIDEOS),
    "qwen3_vl": (  # in the files of Qwen3-VL, 3.5 and 3.6; the class has other defaults
        PixelRules(256**2, 4096**2, HALF, HALF),
        replace(QWEN3_VIDEOS, min_pixels=4096, max_pixels=25_165_824),
    ),
    "glm4v": (_GLM4V, replace(_GLM4V, max_pixels=30_000 * _TOKEN, max_duration=300)),
    "glm46v": (_GLM46V, replace(_GLM46V, max_pixels=30_000 * _TOKEN)),
    "glm5_next": (_GLM5, replace(_GLM5, max_pixels=240_000 * _TOKEN, max_frames=2048)),
    "minimax_m3": (_MINIMAX_M3, replace(_MINIMAX_M3, max_pixels=768 * 28**2)),
    "ernie": (_ERNIE, _ERNIE_VIDEOS),
    "cosmos3_edge": (_COSMOS3_EDGE, replace(_COSMOS3_EDGE, min_pixels=64**2, max_pixels=24 << 20)),
    "hunyuan_vl": (_HUNYUAN, _HUNYUAN),
}
"""The rules of images and the rules of videos by family, and for GLM by version."""
_IMAGE_CLASSES = {
    "MiniMaxM3VLImageProcessor": _MINIMAX_M3,
    "Qwen2VLImageProcessor": QWEN2_IMAGES,
    "PaddleOCRVLImageProcessor": PADDLEOCR_IMAGES,
    "Glm4vImageProcessor": _GLM4V,
    "Glm46VImageProcessor": _GLM46V,
    "Glm5NextImageProcessor": _GLM5,
    "Ernie4_5_VLMoeImageProcessor": _ERNIE,
    "Cosmos3EdgeImageProcessor": _COSMOS3_EDGE,
    "HunYuanVLImageProcessor": _HUNYUAN,
}
_VIDEO_CLASSES = {
    "MiniMaxM3VLVideoProcessor": PATCH_RULES["minimax_m3"][1],
    "Qwen2VLVideoProcessor": QWEN2_VIDEOS,
    "Qwen3VLVideoProcessor": QWEN3_VIDEOS,
    "Glm4vVideoProcessor": PATCH_RULES["glm4v"][1],
    "Glm46VVideoProcessor": PATCH_RULES["glm46v"][1],
    "Glm5NextVideoProcessor": PATCH_RULES["glm5_next"][1],
    "Ernie4_5_VLMoeVideoProcessor": _ERNIE_VIDEOS,
    "Cosmos3EdgeVideoProcessor": PATCH_RULES["cosmos3_edge"][1],
}


def patch_image_rules(
    files: ProcessorFiles, family: PixelRules, sizes: Mapping[str, int]
) -> PixelRules:
    """Return the rules by which a repo resizes and normalises images.

    Args:
        files: parsed JSON per file name without ``.json``.
        family: the rules to return where no file describes images.
        sizes: ``patch_size`` and the other sizes of the tower, which the files may not contradict.

    Raises:
        ValueError: a value that is not implemented, contradicts another value, or disagrees with
            the tower.
    """
    entry = image_section(files)
    if entry is None:
        return family
    name = str(entry[1].get("image_processor_type")).removesuffix("Fast").removesuffix("Pil")
    defaults = _named_or_own(_IMAGE_CLASSES, name, family)
    rules = _read_pixel_rules(*entry, defaults, sizes)
    try:
        return rules.bounded(None, None)
    except ValueError as error:
        raise ValueError(f"{entry[0]}: {error}") from error


def long_side_rules(
    files: ProcessorFiles, family: PixelRules, sizes: Mapping[str, int]
) -> PixelRules:
    """Return the rules by which a Pixtral or Mistral repo resizes and normalises images.

    The ``patch_size`` of the image processor's section is not read, because the processor around it
    sets ``patch_size`` and ``spatial_merge_size``, which may not contradict the tower.

    Args:
        files: parsed JSON per file name without ``.json``.
        family: the rules to return where no file describes images.
        sizes: ``patch_size`` and ``merge_size`` of the tower.

    Raises:
        ValueError: a value that is not implemented, or that disagrees with the tower.
    """
    outer = files.get("processor_config", {})
    names = {"patch_size": "patch_size", "spatial_merge_size": "merge_size"}
    check_sizes("processor_config.json", outer, {k: sizes[v] for k, v in names.items()})
    entry = image_section(files)
    if entry is None:
        return family
    label, section = entry
    require_supported(label, section, {"do_center_crop": False})
    size = section.get("size", {"longest_edge": 1024})  # PixtralImageProcessor's default
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    if longest is None:
        raise ValueError(f"{label}: size={size!r} must have longest_edge, a side in pixels")
    side = read_positive(label, "longest_edge", longest, 1024, math.isqrt(MOST_PIXELS))
    mean, std = read_mean_std(label, section, CLIP_MEAN, CLIP_STD)
    return long_side(side, mean, std)


def long_side(side: int, mean: PerChannel = CLIP_MEAN, std: PerChannel = CLIP_STD) -> PixelRules:
    """Return rules that shrink an image so that no side has more than ``side`` pixels.

    ``mean`` and ``std`` have a value per channel, of pixels from 0 to 1.
    """
    return PixelRules(1, MOST_PIXELS, mean, std, longest_edge=side)


def patch_video_rules(
    files: ProcessorFiles, family: PixelRules, sizes: Mapping[str, int]
) -> PixelRules:
    """Return the rules by which a repo samples, resizes and normalises videos.

    A smallest area above the largest one is not rejected: a file for images that sets only
    ``max_pixels`` may set it below the video class's default of ``min_pixels``. The
    preprocessor compares the two when a video is passed.

    Args:
        files: parsed JSON per file name without ``.json``.
        family: the rules to return where no file describes videos.
        sizes: ``patch_size`` and the other sizes of the tower, which the files may not contradict.

    Raises:
        ValueError: a value that is not implemented, or that disagrees with the tower.
    """
    entry = video_section(files)
    if entry is None:
        return family
    label, section = entry
    defaults = _video_defaults(section, family, sizes["temporal_patch_size"])
    if defaults.sampling == "uniform":  # MiniMaxM3VLVideoProcessor reads min_pixels and max_pixels
        section = {name: value for name, value in section.items() if name != "size"}
    return _read_pixel_rules(label, section, defaults, sizes)


def _video_defaults(section: Section, family: PixelRules, frames: int) -> PixelRules:
    """Return the class defaults of the video processor that transformers picks for ``section``.

    The class is ``video_processor_type``, else ``image_processor_type`` with "Video" for "Image"
    where such a class exists, else the class of the model. Hence the file of Qwen3-Omni bounds the
    area per frame, although its tower is Qwen3's, and a name that ends in "Fast" has no effect.
    The bounds of Qwen3-VL's files are those of Cosmos3-Edge's class, whose patches have one frame;
    ``frames`` is that of the tower.
    """
    if family == PATCH_RULES["qwen3_vl"][1] and frames > 1:
        family = QWEN3_VIDEOS
    image_class = str(section.get("image_processor_type") or "")
    name = str(section.get("video_processor_type") or image_class.replace("Image", "Video"))
    return _named_or_own(_VIDEO_CLASSES, name, family)


def _named_or_own(classes: Mapping[str, PixelRules], name: str, family: PixelRules) -> PixelRules:
    """Return the defaults of a processor class of transformers."""
    own_rules = (rules for rules in classes.values() if rules.sampling == family.sampling)
    return classes.get(name) or (family if family in classes.values() else next(own_rules))


def _read_pixel_rules(
    label: str, section: Section, defaults: PixelRules, sizes: Mapping[str, int]
) -> PixelRules:
    expected: Section = {
        "cap_pixels_per_frame": False,
        "patch_expand_factor": 1,
        "process_image_mode": "dynamic_res",
        "max_long_side_pixel": None,
    }
    if defaults.ignores_resample:
        section = {name: value for name, value in section.items() if name != "resample"}
    require_supported(label, section, expected)
    pair = sizes["temporal_patch_size"] * defaults.joined_frames
    check_sizes(label, section, {**sizes, "temporal_patch_size": pair})
    if defaults.canvas:
        lowest, highest = _token_bounds(label, section, defaults)
    else:
        lowest, highest = _pixel_bounds(label, section, defaults)
    mean, std = read_mean_std(label, section, defaults.mean, defaults.std)
    return replace(
        defaults,
        min_pixels=lowest,
        max_pixels=highest,
        mean=mean,
        std=std,
        min_frames=read_positive(
            label, "min_frames", section.get("min_frames"), defaults.min_frames
        ),
        max_frames=read_positive(
            label, "max_frames", section.get("max_frames"), defaults.max_frames
        ),
        max_duration=_read_duration(label, section, defaults),
    )


def check_sizes(label: str, section: Section, sizes: Mapping[str, int]) -> None:
    """Raise a ValueError if a section of a processor file has other sizes than the tower.

    Args:
        label: name of the section in errors.
        section: a section of a processor file.
        sizes: the size that the tower has for each key of the section, which may have it twice, as
            [14, 14].
    """
    for key, tower in sizes.items():
        if section.get(key) not in (None, tower, [tower, tower]):
            raise ValueError(
                f"{label}: {key}={section[key]!r} but the tower has {tower}: use the processor "
                "files of the checkpoint's own repo"
            )


def _read_duration(label: str, section: Section, defaults: PixelRules) -> int:
    value = section.get("max_duration")
    if value == 0:  # 0 means no bound
        return 0
    return read_positive(label, "max_duration", value, defaults.max_duration)


def _token_bounds(label: str, section: Section, defaults: PixelRules) -> tuple[int, int]:
    """Return the smallest and the largest area in pixels that a file of GLM-5 sets.

    The file gives them as numbers of tokens, each of 28x28 pixels in two frames. ``label`` names
    the section in errors; ``defaults`` has the areas that hold if the section has none.
    """
    lowest, highest = (
        read_positive(label, name, section.get(name), area // _TOKEN, MOST_PIXELS)
        for name, area in (
            ("min_image_tokens", defaults.min_pixels),
            ("max_image_tokens", defaults.max_pixels),
        )
    )
    return lowest * _TOKEN, highest * _TOKEN


def _pixel_bounds(label: str, section: Section, defaults: PixelRules) -> tuple[int, int]:
    size = section.get("size")
    if defaults.sampling == "uniform" and size in ([672, 672], {"height": 672, "width": 672}):
        size = None  # MiniMax-M3's files have this size, which none of its processors reads
    if size is not None and not isinstance(size, Mapping):
        raise ValueError(f"{label}: size={size!r} must have shortest_edge and longest_edge")
    bounds = []
    for old, new, default in (
        ("min_pixels", "shortest_edge", defaults.min_pixels),
        ("max_pixels", "longest_edge", defaults.max_pixels),
    ):
        # Qwen3VLVideoProcessor and ERNIE's processors read only the spelling inside of ``size``.
        in_size_alone = defaults.bounds_all_frames or defaults.sampling == "ernie"
        value = None if in_size_alone else section.get(old)
        if value is None and size is not None:
            value = size.get(new, size.get(old))
            if value is None:
                raise ValueError(f"{label}: size={dict(size)} lacks {new}, an area in pixels")
        bounds.append(read_positive(label, old, value, default, MOST_PIXELS))
    return bounds[0], bounds[1]
