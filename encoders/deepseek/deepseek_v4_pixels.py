"""Preprocessing of images for DeepSeek-V4 and V4.1: fitted to a canvas within a budget of tokens.

Source: ``load_image`` and ``safe_resize`` in ``mm_preprocess.py`` of vLLM 0.33.0, for V4 and V4.1,
which resize by Pillow.

Deliberate differences:

- Pixels are float32; the source rounds them to bfloat16.
- Only the config's ``min_pixels`` sets the least area of an image; no keyword changes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..data import Grid
from ..inputs.patches import PatchPreprocessor
from ..inputs.pixel_rules import PixelRules
from ..inputs.processor_files import HALF, ProcessorFiles, Resample
from ..inputs.resizing import ResizePlan, plan_on_canvas

_RESERVED = 3
"""Tokens that V4 keeps free of an image's budget, to align images in its prompts."""


@dataclass(frozen=True)
class FlashPreprocessor(PatchPreprocessor):
    """Fits an image into a grey canvas whose tokens are within a budget; small ones are enlarged.

    A row of ``pixel_values`` is one flattened patch with the axes channel, row, column; patches lie
    row by row.
    """

    resample: Resample = "pillow_bicubic"
    token_size: int = 3
    """Side of a token in patches."""
    max_tokens: int = 1024
    """The most tokens of an image, those of newlines, start and end among them."""
    max_aspect: float | None = None
    """The largest ratio of width to height; wider images are squeezed. None: there is none."""
    paired_rows: bool = False
    """Whether tokens come in pairs of rows, which need padding (V4)."""

    refusals = {
        **PatchPreprocessor.refusals,
        **dict.fromkeys(
            ("min_pixels", "max_pixels", "max_tiles", "max_soft_tokens"),
            "this family takes the sizes of images only from its config.json; leave it out",
        ),
    }

    @classmethod
    def within(
        cls,
        patch_size: int,
        token_size: int,
        *,
        min_pixels: int,
        max_tokens: int,
        max_aspect: float | None,
        paired_rows: bool,
    ) -> FlashPreprocessor:
        """Return a preprocessor with the bounds that a config states.

        Args:
            patch_size: side of a patch in pixels.
            token_size, max_tokens, max_aspect, paired_rows: the fields of the result.
            min_pixels: the area in pixels to which smaller images are enlarged.
        """
        most = max_tokens * (patch_size * token_size) ** 2
        images = PixelRules(min_pixels, max(most, min_pixels), HALF, HALF)
        return cls(
            *(patch_size, 1, 1, images, images),
            images_alone=True,
            token_size=token_size,
            max_tokens=max_tokens,
            max_aspect=max_aspect,
            paired_rows=paired_rows,
        )

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return the defaults, which config.json states, and "": no keyword changes them."""
        rules = f"max_tokens={self.max_tokens}, min_pixels={self.images.min_pixels}"
        return f"{rules}, mean={self.images.mean}, std={self.images.std}", ""

    def _with_images(self, files: ProcessorFiles) -> FlashPreprocessor:
        """Return the preprocessor itself: repos of this family have no processor files."""
        return self

    def _grid(self, frames: Sequence[Tensor], rules: PixelRules) -> Grid:
        height, width = self.canvas(*frames[0].shape[1:])
        return len(frames), height // self.patch_size, width // self.patch_size

    def _plan(self, frame: Tensor, rules: PixelRules, grid: Grid, count: int) -> ResizePlan:
        """Return how an image fits in the middle of a grey canvas, or is stretched if squeezed."""
        height, width = grid[1] * self.patch_size, grid[2] * self.patch_size
        if self.max_aspect is not None and frame.shape[2] >= self.max_aspect * frame.shape[1]:
            return ResizePlan(height, width, self.resample)
        return plan_on_canvas(frame, height, width, HALF)._replace(mode=self.resample)

    def canvas(self, height: int, width: float) -> tuple[int, int]:
        """Return height and width of the canvas for an image, in pixels, whole patches."""
        patch, budget = self.patch_size, self.max_tokens - _RESERVED * self.paired_rows
        if self.max_aspect is not None:
            width = min(width, height * self.max_aspect)
        if height * width < self.images.min_pixels:
            ratio = (self.images.min_pixels / (width * height)) ** 0.5
            height, width = int(height * ratio), int(width * ratio)
        size = math.ceil(height / patch) * patch, math.ceil(width / patch) * patch
        tried = budget
        while self.tokens(*size) > budget:
            size, tried = self._solve(height, width, tried), tried - 1
        return size

    def tokens(self, height: int, width: int) -> int:
        """Return how many tokens of a prompt a canvas takes, with newlines, start, end, padding."""
        cells = (-(-(side // self.patch_size) // self.token_size) for side in (height, width))
        rows, columns = cells
        if not self.paired_rows:
            return rows * (columns + 1) + 2
        pairs = (rows + 1) // 2 * (columns + 1)
        return 2 * pairs + 2 + pairs % 2 * 2

    def _solve(self, height: int, width: float, budget: int) -> tuple[int, int]:
        """Return the largest canvas of about an image's shape whose tokens are within a budget."""
        cell, ratio = self.patch_size * self.token_size, height / width
        columns = math.sqrt((budget - 2) / ratio + 0.25) - 0.5
        rows, step = columns * ratio, 2 if self.paired_rows else 1
        if columns < 1:
            return (budget - 2) // 2 // step * step * cell, cell
        if rows < step:
            return step * cell, ((budget - 2) // step - 1) * cell
        beta = min(
            math.floor(columns) * cell / width, math.floor(rows) // step * step * cell / height
        )
        patch = self.patch_size
        return (
            math.floor(height * beta / patch) * patch,
            math.floor(width * beta / patch) * patch,
        )
