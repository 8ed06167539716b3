"""Preprocessing of pages for Granite for Docling: square tiles, then the whole page.

Source: ``GraniteDoclingImageProcessor`` of transformers 5.23.0, without its padding of samples.

Shapes: s side of a tile in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from einops import rearrange
from torch import Tensor

from ..inputs.processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    PerChannel,
    Section,
    check_side,
    read_mean_std,
    read_positive,
    require_supported,
)
from ..inputs.resizing import resize
from ..inputs.sizes import MOST_TILES, best_tiling, check_area
from ..inputs.views import OnePathViews, Views

MOST_PER_SIDE = 16
"""The most tiles down or across a page, for which the tokenizer has markers."""


@dataclass(frozen=True)
class PagePreprocessor(OnePathViews):
    """Resizes a page to the grid of tiles nearest its shape, and cuts it into tiles."""

    mean: PerChannel = CLIP_MEAN
    std: PerChannel = CLIP_STD
    image_size: int = 512
    min_tiles: int = 1
    max_tiles: int = 32
    """The largest number of tiles, the whole page not counted; 1 leaves pages whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_tiles <= self.max_tiles <= MOST_TILES:
            raise ValueError(
                f"min_tiles={self.min_tiles}, max_tiles={self.max_tiles}: must be from 1 to "
                f"{MOST_TILES}, and min_tiles at most max_tiles"
            )
        check_area(self.max_tiles, self.image_size)

    @property
    def sizing(self) -> tuple[str, ...]:
        """Return the keyword of ``preprocess`` that bounds the number of tiles."""
        return ("max_tiles",)

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the tiles of a page row by row, then the whole page if there are several.

        ``max_tiles`` bounds the number of tiles; None takes ``self.max_tiles``.
        """
        size, side = self.image_size, self.sides["image"]
        most = self.max_tiles if max_tiles is None else max_tiles
        columns = rows = 1
        if most > 1:
            columns, rows = best_tiling(
                image.shape[2], image.shape[1], self.min_tiles, most, size, MOST_PER_SIDE
            )
            check_area(columns * rows, size)
        canvas = resize(image, rows * size, columns * size, self.resample)
        views = list(rearrange(canvas, "c (r h) (q w) -> (r q) c h w", h=size, w=size))
        if len(views) > 1:
            views.append(resize(image, size, size, self.resample))
        cut = [view[:, :side, :side] for view in views]
        return Views({"image": cut}, (columns, rows, len(views) > 1))

    def with_section(self, label: str, section: Section) -> PagePreprocessor:
        """Return a copy with the values that a processor file sets: mean, std and tiles.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or tiles of another size than the tower's.
        """
        # More tiles for pages of some shapes are off in the class.
        require_supported(label, section, {"dense_max_patches": 0})
        check_side(label, section, self.image_size, 512)
        mean, std = read_mean_std(label, section, CLIP_MEAN, CLIP_STD)
        least, most = (
            read_positive(label, name, section.get(name), usual, MOST_TILES)
            for name, usual in (("min_patches", 1), ("max_patches", 32))
        )
        tiled = bool(section.get("crop_to_patches", True)) and most > 1
        least, most = (least, most) if tiled else (1, 1)
        return replace(self, mean=mean, std=std, min_tiles=least, max_tiles=most)

    def say_defaults(self, config: object) -> tuple[str, str]:
        """Return the defaults without processor files, and the keyword that changes one of them."""
        return f"max_tiles={self.max_tiles}, mean={self.mean}, std={self.std}", "max_tiles"
