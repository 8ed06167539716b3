"""Preprocessing of images for DeepSeek-OCR and OCR-2: a view of the whole image, and tiles.

Source: ``DeepseekOCRProcessor`` of deepseek-ai/DeepSeek-OCR at commit e4ac34e, and
``DeepseekOcr2ImageProcessor`` of transformers 5.24.0.

Shapes: s side of a view in pixels.

Deliberate differences:

- Images are resized by torch's uint8 kernel as in the other families; the source uses PIL, which
  differs by at most one level at most scales.
- An image is cut into at most six tiles, as in DeepSeek-OCR's processor for vLLM. The code beside
  the weights on the Hub cuts it into up to nine; ``max_tiles=9`` does that here.
- Where an odd number of pixels is left beside an image, DeepSeek's code and this one round half of
  it to the even number, transformers rounds it down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from einops import rearrange
from torch import Tensor

from ..inputs.images import pad_to_canvas, resize
from ..inputs.processor_files import Section, read_positive, require_supported
from ..inputs.sizes import MOST_TILES, best_tiling, check_area
from ..inputs.views import ViewPreprocessor, Views


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
            whole_view = pad_to_canvas(image, base, base, self.mean)
        else:
            whole_view = resize(image, base, base)
        tile_limit = self.max_tiles if max_tiles is None else max_tiles
        if not self.tiled or max(image.shape[1:]) <= side or tile_limit < 2:
            return Views({"image": [whole_view]})
        columns, rows = best_tiling(image.shape[2], image.shape[1], 2, tile_limit, side)
        check_area(columns * rows, side)
        canvas = resize(image, rows * side, columns * side)
        tiles = list(rearrange(canvas, "c (r h) (q w) -> (r q) c h w", h=side, w=side))
        return Views({"image": [whole_view], "tiles": tiles}, (columns, rows, True))

    def with_section(self, label: str, section: Section) -> OcrPreprocessor:
        """Return a copy with the mean, the std and the most tiles that a processor file sets.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or tiles of another size.
        """
        fixed = {"tile_size": self.tile_size, "min_patches": 2, "crop_to_patches": True}
        require_supported(label, section, {**fixed, "background_color": [127, 127, 127]})
        most = section.get("max_patches")
        tiles = read_positive(label, "max_patches", most, self.max_tiles, MOST_TILES)
        return replace(super().with_section(label, section), max_tiles=tiles)
