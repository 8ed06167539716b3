"""Preprocessing of images for DeepSeek-OCR and OCR-2: a view of the whole image, and tiles.

Source: ``DeepseekOCRProcessor`` of deepseek-ai/DeepSeek-OCR at commit e4ac34e, which resizes by
Pillow, and ``DeepseekOcr2ImageProcessor`` and ``UnlimitedOcrImageProcessor`` of transformers 5.24.0
for repos whose processor file names one of them.

Shapes: s side of a view in pixels.

Deliberate difference: an image is cut into at most six tiles, as in DeepSeek-OCR's processor for
vLLM. The code beside the weights on the Hub cuts it into up to nine; ``max_tiles=9`` does that
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from einops import rearrange
from torch import Tensor

from ..inputs.processor_files import (
    HALF,
    Resample,
    Section,
    check_side,
    read_positive,
    require_supported,
)
from ..inputs.resizing import lay_over, plan_on_canvas, resize
from ..inputs.sizes import MOST_TILES, best_tiling, check_area
from ..inputs.views import ViewPreprocessor, Views

_CLASSES: Mapping[str, Section] = {
    "DeepseekOcr2": {"tile_size": 768, "max_patches": 6},
    "UnlimitedOcr": {"tile_size": 640, "max_patches": 32},
}
"""Defaults of transformers' classes, by the beginning of their names, where they differ."""


@dataclass(frozen=True)
class OcrPreprocessor(ViewPreprocessor):
    """DeepSeek-OCR: the whole image padded to a square and, if it is large, tiles of 640x640.

    An image with a side over ``tile_size`` pixels is resized to the grid of 2 to ``max_tiles``
    tiles whose shape is nearest its own; a smaller image has no tiles.
    """

    base_size: int = 1024
    tile_size: int = 640
    max_tiles: int = 6
    tiled: bool = True
    keep_shape: bool = True
    """Whether the whole image is padded to a square; otherwise it is stretched to one."""
    as_transformers: bool = False
    """Whether images are resized and centred as transformers' classes do, which take torch's
    filter, round the rows above an image down, and pad with grey; otherwise as DeepSeek's code
    does, which takes Pillow's, rounds halves of a row to the even number, and pads with the mean.
    """

    @property
    def resample(self) -> Resample:
        """The filter with which images are resized."""
        return "bicubic" if self.as_transformers else "pillow_bicubic"

    @property
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of the whole view ("image") and, if ``tiled``, of a tile."""
        return {"image": self.base_size} | ({"tiles": self.tile_size} if self.tiled else {})

    @property
    def sizing(self) -> tuple[str, ...]:
        """Return the keyword of ``preprocess`` that bounds tiles, or nothing if not ``tiled``."""
        return ("max_tiles",) if self.tiled else ()

    @property
    def pads(self) -> bool:
        """Whether the whole image is padded to a square; some modes stretch it instead."""
        return self.keep_shape

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the view of the whole image and its tiles row by row.

        ``max_tiles`` bounds the number of tiles; None takes ``self.max_tiles``.
        """
        base, side = self.base_size, self.tile_size
        if self.keep_shape:
            whole_view = self._padded(image)
        else:
            whole_view = resize(image, base, base, self.resample)
        tile_limit = self.max_tiles if max_tiles is None else max_tiles
        if not self.tiled or max(image.shape[1:]) <= side or tile_limit < 2:
            return Views({"image": [whole_view]})
        columns, rows = best_tiling(image.shape[2], image.shape[1], 2, tile_limit, side)
        check_area(columns * rows, side)
        canvas = resize(image, rows * side, columns * side, self.resample)
        tiles = list(rearrange(canvas, "c (r h) (q w) -> (r q) c h w", h=side, w=side))
        return Views({"image": [whole_view], "tiles": tiles}, (columns, rows, True))

    def _padded(self, image: Tensor) -> Tensor:
        """Return the whole image in the middle of a square of one colour."""
        base, colour = self.base_size, HALF if self.as_transformers else self.mean
        plan = plan_on_canvas(image, base, base, colour)
        small = resize(image, plan.height, plan.width, self.resample)
        corner = plan.corner
        if self.as_transformers:
            corner = (base - plan.height) // 2, (base - plan.width) // 2
        return lay_over(small, base, base, *corner, colour)

    def with_section(self, label: str, section: Section) -> OcrPreprocessor:
        """Return a copy with the mean, the std and the most tiles that a processor file sets.

        The class that the file names decides ``as_transformers``.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or tiles of another size.
        """
        kind, _, _ = str(section.get("image_processor_type")).partition("ImageProcessor")
        of_transformers = kind in _CLASSES
        section = {**_CLASSES.get(kind, {}), **section}
        fixed = {"tile_size": self.tile_size, "min_patches": 2, "crop_to_patches": True}
        require_supported(label, section, {**fixed, "background_color": [127, 127, 127]})
        most = section.get("max_patches")
        tiles = read_positive(label, "max_patches", most, self.max_tiles, MOST_TILES)
        if of_transformers:
            check_side(label, section, self.base_size, 1024)  # the default of both classes
        return replace(
            super().with_section(label, section),
            max_tiles=tiles,
            as_transformers=of_transformers,
        )
