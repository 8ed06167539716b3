"""Preprocessing of images and clips for MoonViT: shrunk to a limit, padded to whole tokens.

Source: ``Kimi_K25ImageProcessor`` and ``Kimi_K25VideoProcessor`` of transformers 5.23.0, and
``KimiVLImageProcessor`` of moonshotai/Kimi-VL-A3B-Instruct with ``pad_input`` and
``kimi_k3_vision_processing.py`` of moonshotai/Kimi-K3, which resize by Pillow.

Deliberate differences:

- The frames of a clip are one item; the tower divides it into segments of four frames.
- An image with a side over the limit is shrunk for Kimi-VL, too; its own processor raises an error.
- Transparent images of Kimi-K3 are laid over white before they are resized, as in the other
  families; its processor lays them over white and grey squares afterwards
  (``transparent_bg_config`` of its file, which is not read).
- Kimi-K3 takes clips, as its tower and the limit in its file allow; its processor has images only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..data import Grid
from ..inputs.patches import PatchPreprocessor
from ..inputs.pixel_rules import PixelRules, check_sizes
from ..inputs.processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    ProcessorFiles,
    Section,
    image_section,
    read_mean_std,
    read_positive,
    require_supported,
    video_section,
)
from ..inputs.resizing import ResizePlan
from ..inputs.sizes import MOST_PIXELS

_IMAGE, _FRAME = 16384, 4096
"""The largest numbers of patches of an image and of a frame of a clip."""
_LIMITS = ("in_patch_limit", "max_patches", "in_token_limit")
"""The keys under which processor files have the largest number of patches of an image: in files of
Moonshot, of transformers and of Kimi-VL."""


@dataclass(frozen=True)
class NavitPreprocessor(PatchPreprocessor):
    """Shrinks an image to limits on its patches, and pads it at the right and below with black.

    A row of ``pixel_values`` is one flattened patch with the axes channel, row, column; patches lie
    row by row.
    """

    token_size: int = 2
    """Side of a token in patches."""
    segment_frames: int = 1
    """Frames that become one set of tokens; 1 for a tower that takes only images."""
    side_limit: int = 512
    """The largest number of patches along one side of an image."""

    refusals = {
        **PatchPreprocessor.refusals,
        "min_pixels": "this family never enlarges an image; leave it out",
    }

    @classmethod
    def kimi(
        cls, patch_size: int, token_size: int, segment_frames: int, *, third: bool = False
    ) -> NavitPreprocessor:
        """Return a preprocessor with the published rules of a Kimi model.

        Args:
            patch_size: side of a patch in pixels.
            token_size: side of a token in patches.
            segment_frames: frames that become one set of tokens; 1 stands for Kimi-VL, which takes
                only images, more for Kimi-K2.5.
            third: whether the model is Kimi-K3, whose limits are four times as large.
        """
        area, images_alone = patch_size**2 * (4 if third else 1), segment_frames == 1
        images = PixelRules(1, (_FRAME if images_alone else _IMAGE) * area, HALF, HALF)
        videos = PixelRules(1, _FRAME * area, HALF, HALF, sampling="uniform")
        return cls(
            *(patch_size, 1, 1, images, videos),
            resample="pillow_bicubic" if images_alone or third else "bicubic",
            images_alone=images_alone,
            token_size=token_size,
            segment_frames=segment_frames,
        )

    def _with_images(self, files: ProcessorFiles) -> NavitPreprocessor:
        rules, side = self._rules(image_section(files), self.images, ())
        return replace(self, images=rules, side_limit=side)

    def _with_videos(self, files: ProcessorFiles) -> NavitPreprocessor:
        if self.images_alone:
            return self
        entry, limit_name = video_section(files), "in_patch_limit_each_frame"
        rules, side = self._rules(entry, self.videos, (limit_name,))
        if side != self.side_limit:
            raise ValueError(f"a side has {self.side_limit} patches in images and {side} in videos")
        return replace(self, videos=rules)

    def _rules(
        self, entry: tuple[str, Section] | None, defaults: PixelRules, names: tuple[str, ...]
    ) -> tuple[PixelRules, int]:
        """Return the rules and the largest number of patches along a side that a section sets."""
        if entry is None:
            return defaults, self.side_limit
        label, section = entry
        if isinstance(nested := section.get("media_proc_cfg"), Mapping):
            label, section = f"{label}: media_proc_cfg", nested
        flat = "in_token_limit" in section or "pad_input" in section
        must_be = {"fixed_output_tokens": None, "in_patch_limit_video": None}
        require_supported(label, section, must_be)
        if flat and section.get("pad_input") is not True:
            raise ValueError(f"{label}: pad_input must be true: cropping is not implemented")
        check_sizes(label, section, self._sizes)
        area = self.patch_size**2
        name = next((n for n in (*names, *_LIMITS) if section.get(n) is not None), _LIMITS[1])
        max_patches = read_positive(
            label, name, section.get(name), defaults.max_pixels // area, MOST_PIXELS // area
        )
        mean, std = read_mean_std(
            label, section, *((CLIP_MEAN, CLIP_STD) if flat else (HALF, HALF))
        )
        rules = replace(defaults, max_pixels=max_patches * area, mean=mean, std=std)
        return rules, self._side(label, section)

    @property
    def _sizes(self) -> dict[str, int]:
        return {
            "patch_size": self.patch_size,
            "merge_size": self.token_size,
            "merge_kernel_size": self.token_size,
            "temporal_patch_size": self.segment_frames,
            "temporal_merge_kernel_size": self.segment_frames,
        }

    def _side(self, label: str, section: Section) -> int:
        """Return the largest number of patches along a side that a section allows.

        ``label`` names the section in errors. A section without the value gives ``side_limit``.
        """
        size = section.get("size")
        side = section.get("patch_limit_on_one_side")
        if side is None and size is not None:
            sides = size if isinstance(size, Mapping) else {}
            side = sides.get("max_height")
            if side is None or sides.get("max_width") != side:
                raise ValueError(
                    f"{label}: size={size!r} must have max_height and max_width, one number"
                )
        return read_positive(label, "patches of a side", side, self.side_limit, 1 << 14)

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = frames[0].shape[1:]
        new_height, new_width = self._content(height, width, rules)
        rows, columns = (
            -(-side // (self.patch_size * self.token_size)) * self.token_size
            for side in (new_height, new_width)
        )
        return len(frames), rows, columns

    def _plan(self, frame: Tensor, rules: PixelRules, grid: Grid, count: int) -> ResizePlan:
        """Return how a frame is shrunk and laid on the upper left corner of a black canvas."""
        height, width = frame.shape[1:]
        canvas = grid[1] * self.patch_size, grid[2] * self.patch_size
        return ResizePlan(*self._content(height, width, rules), self.resample, canvas=canvas)

    def _content(self, height: int, width: int, rules: PixelRules) -> tuple[int, int]:
        """Return height and width in pixels that an image is shrunk to before it is padded."""
        max_patches = rules.max_pixels // self.patch_size**2
        return shrunk_size(height, width, self.patch_size, max_patches, self.side_limit)


def shrunk_size(
    height: int, width: int, patch: int, max_patches: int, side: int
) -> tuple[int, int]:
    """Return the size to which an image is shrunk so that it has about ``max_patches`` at most.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        patch: side of a patch in pixels.
        max_patches: largest number of patches of the image. Its patches are counted rounded down,
            so padding may add a few.
        side: largest number of patches along a side.

    Returns:
        Height and width, at least one pixel each; those of the image if it is small enough.
    """
    patches = max(1.0, height // patch) * max(1.0, width // patch)
    scale = min(1.0, math.sqrt(max_patches / patches), side * patch / height, side * patch / width)
    new_height, new_width = (
        min(max(1, int(length * scale)), side * patch) for length in (height, width)
    )
    return new_height, new_width
