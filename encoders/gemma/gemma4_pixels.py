"""Preprocessing of images and frames for Gemma 4: resized to at most a number of tokens.

Source: ``Gemma4ImageProcessor``, ``Gemma4VideoProcessor`` and ``default_sample_indices_fn`` of
transformers 5.23.0, without their padding.

Deliberate difference: frames are sampled only on request (``fps=``, ``num_frames=``), and the
``num_frames`` of a repo's files is not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..data import Grid, Limits
from ..inputs.intake import ImagesLike, VideosLike
from ..inputs.patches import PatchPreprocessor
from ..inputs.pixel_rules import PixelRules
from ..inputs.processor_files import (
    HALF,
    ProcessorFiles,
    Section,
    check_rescale,
    image_section,
    read_mean_std,
    require_supported,
    video_section,
)

SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""The largest numbers of tokens per image or frame with which the model was trained."""


@dataclass(frozen=True)
class SoftTokenPreprocessor(PatchPreprocessor):
    """Resizes an image to about the area of a number of tokens; small images are enlarged.

    Each frame of a video is treated as an image. The axes of a flattened patch, which is a row of
    ``pixel_values``, are row, column, channel.
    """

    pool: int = 3
    """The number of patches on a side of the square that becomes one token."""

    refusals = dict.fromkeys(
        ("min_pixels", "max_pixels", "max_tiles"),
        "Gemma 4 resizes every image to max_soft_tokens, one of "
        f"{', '.join(map(str, SOFT_TOKENS))}; pass that instead",
    )

    @classmethod
    def gemma4(cls, patch_size: int, pool: int) -> SoftTokenPreprocessor:
        """Return a preprocessor with Gemma 4's defaults: 280 tokens per image, 70 per frame.

        A patch has ``patch_size`` pixels on a side, and a token ``pool`` patches.
        """
        images, videos = (_rules(patch_size * pool, tokens) for tokens in (280, 70))
        return cls(patch_size, 1, 1, images, videos, channels_last=True, pool=pool)

    def _with_images(self, files: ProcessorFiles) -> SoftTokenPreprocessor:
        images = self._read_rules(image_section(files), self.images, normalizes=False)
        return replace(self, images=images)

    def _with_videos(self, files: ProcessorFiles) -> SoftTokenPreprocessor:
        videos = self._read_rules(video_section(files), self.videos, normalizes=True)
        return replace(self, videos=videos, video_error=None)

    def _read_rules(
        self, entry: tuple[str, Section] | None, rules: PixelRules, *, normalizes: bool
    ) -> PixelRules:
        """Return the rules that a section sets; ``normalizes`` is its class's ``do_normalize``."""
        if entry is None:
            return rules
        label, section = entry
        sizes = {"patch_size": self.patch_size, "pooling_kernel_size": self.pool}
        require_supported(label, section, {"do_normalize": section.get("do_normalize"), **sizes})
        check_rescale(label, section)
        plain = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        normalizes = bool(section.get("do_normalize", normalizes))
        if normalizes and read_mean_std(label, section, *plain) != plain:
            raise ValueError(
                f"{label}: image_mean and image_std are not implemented: the tower takes pixels "
                "from 0 to 1, mean 0 and std 1"
            )
        tokens = section.get("max_soft_tokens")
        return rules if tokens is None else _rules(self._side, _checked(tokens, f"{label}: "))

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return the defaults without processor files, and the keyword that changes one of them."""
        tokens = (rules.max_pixels // self._side**2 for rules in (self.images, self.videos))
        return "max_soft_tokens={} for images, {} for frames".format(*tokens), "max_soft_tokens"

    @property
    def _side(self) -> int:
        """The side of the square that becomes one token, in pixels."""
        return self.patch_size * self.pool

    def _read(
        self, images: ImagesLike, videos: VideosLike, limits: Limits
    ) -> list[tuple[list[Tensor], PixelRules, Grid]]:
        if limits.max_soft_tokens is None:
            return super()._read(images, videos, limits)
        rules = self._image_rules(limits)
        limited = replace(self, images=rules, videos=rules)
        return limited._read(images, videos, limits._replace(max_soft_tokens=None))

    def _image_rules(self, limits: Limits) -> PixelRules:
        if limits.max_soft_tokens is None:
            return super()._image_rules(limits)
        return _rules(self._side, _checked(limits.max_soft_tokens))

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = frames[0].shape[1:]
        h, w = soft_token_size(height, width, self._side, rules.max_pixels // self._side**2)
        return len(frames), h * self.pool, w * self.pool


def soft_token_size(height: int, width: int, side: int, tokens: int) -> tuple[int, int]:
    """Return the rows and columns of tokens that an image is resized to.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        side: pixels on a side of one token.
        tokens: most tokens.

    Returns:
        The rows and columns of at most ``tokens`` tokens, about in the shape of the image. A side
        that would have no token has one; the other side then has as many as the aspect ratio of
        the image rounded down, at most ``tokens``.
    """
    scale = math.sqrt(tokens * side**2 / (height * width))
    rows, columns = math.floor(scale * height / side), math.floor(scale * width / side)
    if not rows:
        return 1, min(width // height, tokens)
    if not columns:
        return min(height // width, tokens), 1
    return rows, columns


def _rules(side: int, tokens: int) -> PixelRules:
    return PixelRules(1, tokens * side**2, HALF, HALF, sampling="uniform")


def _checked(tokens: object, label: str = "") -> int:
    if tokens not in SOFT_TOKENS or not isinstance(tokens, int):
        allowed = ", ".join(map(str, SOFT_TOKENS))
        raise ValueError(f"{label}max_soft_tokens={tokens!r}: must be one of {allowed}")
    return tokens
