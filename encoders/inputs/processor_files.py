"""Reading a repo's processor files: which file is read, its values, and values that are rejected.

As in transformers 5.23.0, all values for images come from one section, and all values for videos
from one section: the nested section of ``processor_config.json``, else (for videos)
``video_preprocessor_config.json``, else ``preprocessor_config.json``. A value that the section
leaves out comes from the class that it names, not from another file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

ProcessorFiles: TypeAlias = Mapping[str, Mapping[str, object]]
Section: TypeAlias = Mapping[str, object]
Resample: TypeAlias = Literal["bicubic", "bilinear", "lanczos", "pillow_bicubic", "pillow_bilinear"]
"""The filter with which an image is resized, by torch or by Pillow."""
PerChannel: TypeAlias = tuple[float, float, float]
"""The means or the standard deviations of red, green and blue."""

# The values of ``transformers/utils/constants.py``, version 5.23.0, which processors default to.
CLIP_MEAN: PerChannel = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: PerChannel = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN: PerChannel = (0.485, 0.456, 0.406)
IMAGENET_STD: PerChannel = (0.229, 0.224, 0.225)
HALF: PerChannel = (0.5, 0.5, 0.5)

PIL_TRANSFORMS = "torchvision.transforms"
"""The ``image_processor_type`` of a section that stands for torchvision's transforms of PIL images,
which timm and open_clip take: they resize by Pillow, and round where a crop begins."""

_ONE_VIEW = frozenset(
    ("Bit", "CLIP", "DINOv3ViT", "DeepseekVL", "Gemma3", "Janus", "Sam3", "Siglip", "ViT")
)
"""Beginnings of the names of transformers' classes that make one view of an image, each by a rule
or with defaults of its own."""
_FILES = ("processor_config", "preprocessor_config", "video_preprocessor_config")
_MEANS, _STDS = (-10.0, 10.0), (1e-3, 1e3)
"""Bounds on mean and std of pixels from 0 to 1; within them, normalised pixels are finite in
float16."""
_MUST_BE: Section = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
}
_NULL: Section = {
    "do_convert_rgb": True,
    "resample": 2,
    "high_res_resample": 2,
    "small_image_upsize": "never",
}
"""What null stands for, where that is not "off": images are RGB here in any case, and transformers
resizes bilinearly."""


def image_section(files: ProcessorFiles) -> tuple[str, Section] | None:
    """Return the name, for errors, and the content of the section that describes images.

    DeepSeek's processors describe images at the top level of ``processor_config.json``.

    Returns:
        The name and the section, or None if no file describes images.

    Raises:
        ValueError: a key of ``files`` that is not the name of a processor file.
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


def video_section(files: ProcessorFiles) -> tuple[str, Section] | None:
    """Return the name, for errors, and the content of the section on videos; None without one."""
    return _first(
        ("processor_config.json: video_processor", _nested(files, "video_processor")),
        ("video_preprocessor_config.json", files.get("video_preprocessor_config")),
        ("preprocessor_config.json", files.get("preprocessor_config")),
    )


def _nested(files: ProcessorFiles, name: str) -> object:
    return files.get("processor_config", {}).get(name)


def _first(*candidates: tuple[str, object]) -> tuple[str, Section] | None:
    return next(((name, part) for name, part in candidates if isinstance(part, Mapping)), None)


def require_supported(label: str, section: Section, expected: Section | None = None) -> None:
    """Raise a ValueError if a section of a processor file has a value that is not implemented.

    A flag that is null is off, as in transformers, whose classes keep null in place of a default.

    Args:
        label: name of the section in errors.
        section: a section of a processor file.
        expected: the only value that is implemented for each further key; it takes precedence over
            the usual value of the key.
    """
    for key, only in {**_MUST_BE, **(expected or {})}.items():
        value = section.get(key)
        if key in section and value is None and only is not None:
            value = _NULL.get(key, False if only is True else None)
        if value is not None and value != only:
            given = "null" if section[key] is None else repr(value)
            raise ValueError(f"{label}: {key}={given} is not implemented: it must be {only!r}")


def check_class(label: str, section: Section, *own: str) -> None:
    """Raise a ValueError if a section names a class that makes the views of other families.

    A class that transformers does not have, as in a repo with code of its own, passes.

    Args:
        label: name of the section in errors.
        section: a section of a processor file.
        own: beginnings, before "ImageProcessor", of the names of the classes that are implemented.
    """
    name = str(section.get("image_processor_type"))
    kind, _, _ = name.partition("ImageProcessor")
    if kind in _ONE_VIEW.difference(own):
        raise ValueError(
            f"{label}: image_processor_type={name!r} is not implemented for this tower: it must be "
            f"{' or '.join(f'{kind}ImageProcessor' for kind in own)}"
        )


def check_side(label: str, section: Section, side: int, usual: int | None = None) -> None:
    """Raise a ValueError if a section of a processor file has views of another size than a tower.

    Args:
        label: name of the section in errors.
        section: a section of a processor file.
        side: side of the tower's views in pixels.
        usual: the side if the section has none; None lets such a section pass.
    """
    size = section.get("image_size", section.get("size", usual))
    if size not in (None, side, {"height": side, "width": side}):
        raise ValueError(
            f"{label}: size={size!r} but the tower takes views of {side}x{side}: use the processor "
            "files of the checkpoint's own repo"
        )


def read_resample(label: str, section: Section, usual: Resample) -> Resample:
    """Return the resampling filter of a section, such as "bicubic".

    Args:
        label: name of the section in errors.
        section: a section of a processor file; its ``resample`` is PIL's number of a filter, and
            null means bilinear, as in transformers. If it stands for ``PIL_TRANSFORMS``, the
            filter is Pillow's.
        usual: the filter if the section has no ``resample``.

    Raises:
        ValueError: neither Lanczos (1) nor bilinear (2) nor bicubic (3).
    """
    if "resample" not in section:
        return usual
    value = section["resample"]
    kinds: dict[object, Resample] = {None: "bilinear", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
    if isinstance(value, bool) or not isinstance(value, int | None) or value not in kinds:
        raise ValueError(f"{label}: resample={value!r} is not implemented: it must be 1, 2 or 3")
    kind = kinds[value]
    if section.get("image_processor_type") != PIL_TRANSFORMS or kind == "lanczos":
        return kind
    return "pillow_bicubic" if kind == "bicubic" else "pillow_bilinear"


def read_mean_std(
    label: str, section: Section, mean: PerChannel, std: PerChannel
) -> tuple[PerChannel, PerChannel]:
    """Return ``image_mean`` and ``image_std`` of a section of a processor file.

    Args:
        label: name of the section in errors.
        section: a section of a processor file.
        mean: mean of each channel if the section has none, of pixels from 0 to 1.
        std: standard deviation of each channel if the section has none.

    Raises:
        ValueError: values that are no three numbers within bounds, or pixels that are rescaled by
            another factor than 1/255.
    """
    check_rescale(label, section)
    return (
        _triple(label, "image_mean", section.get("image_mean"), mean, _MEANS),
        _triple(label, "image_std", section.get("image_std"), std, _STDS),
    )


def check_rescale(label: str, section: Section) -> None:
    """Raise a ValueError if a section rescales pixels by another factor than 1/255.

    Args:
        label: name of the section in errors.
        section: a section of a processor file; one without a factor passes.
    """
    rescale = section.get("rescale_factor")
    is_1_255 = isinstance(rescale, int | float) and abs(rescale * 255 - 1) < 1e-6
    if rescale is not None and not is_1_255:
        raise ValueError(
            f"{label}: rescale_factor={rescale!r} is not implemented: it must be 1/255"
        )


def _triple(
    label: str, key: str, value: object, default: PerChannel, bounds: tuple[float, float]
) -> PerChannel:
    if value is None:
        return default
    numbers = [value] * 3 if isinstance(value, int | float) else value
    if (
        not isinstance(numbers, list | tuple)
        or len(numbers) != 3
        or not all(isinstance(n, int | float) and bounds[0] <= n <= bounds[1] for n in numbers)
    ):
        rule = f"three numbers from {bounds[0]} to {bounds[1]}"
        raise ValueError(f"{label}: {key}={value!r} must be {rule}, one per channel")
    red, green, blue = (float(n) for n in numbers)
    return red, green, blue


def read_positive(
    label: str, key: str, value: object, default: int, maximum: int | None = None
) -> int:
    """Check a value of a processor file that must be a positive integer.

    Args:
        label: name of the section in errors.
        key: name of the value in errors.
        value: the value as parsed from JSON; None if the section has none.
        default: the result if ``value`` is None.
        maximum: the largest value that is allowed; None allows any.

    Raises:
        ValueError: no positive integer, or one over ``maximum``.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{label}: {key}={value!r} must be a positive integer")
    if maximum is not None and value > maximum:
        raise ValueError(f"{label}: {key}={value!r} must be at most {maximum}")
    return value
