"""Preprocessing for DeepSeek-VL and Janus: one padded square view, or two of different sizes.

Source: ``VLMImageProcessor`` and ``HybridVisionTower`` of deepseek-ai/DeepSeek-VL at commit
681bffb, which resize by Pillow, and ``DeepseekVLImageProcessor``,
``DeepseekVLHybridImageProcessor`` and ``JanusImageProcessor`` of transformers 5.23.0 for repos
whose processor file names one of them.

Shapes: s side of a view in pixels.

A ``background_color`` in a file is not read: as in the sources, the padding has the colour of the
mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..inputs.processor_files import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    PerChannel,
    Resample,
    Section,
    check_class,
    check_side,
    read_mean_std,
    read_positive,
    require_supported,
)
from ..inputs.resizing import lay_over, resize
from ..inputs.views import ViewPreprocessor, Views


@dataclass(frozen=True)
class SquarePreprocessor(ViewPreprocessor):
    """Resizes an image to a longer side of s pixels, and pads it to a square (DeepSeek-VL-1.3B)."""

    image_size: int = 384
    min_size: int = 14
    """The least number of pixels to which the shorter side of an image is resized."""
    as_transformers: bool = False
    """Whether images are resized as transformers' classes do, which take torch's filter and round
    the shorter side to the nearest pixel; otherwise as DeepSeek's code does, which takes Pillow's
    and rounds it down."""

    @property
    def resample(self) -> Resample:
        """The filter with which images are resized."""
        return "bicubic" if self.as_transformers else "pillow_bicubic"

    @property
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of the square that an image is padded to, under "image"."""
        return {"image": self.image_size}

    @property
    def sizing(self) -> tuple[str, ...]:
        """Return no keyword of ``preprocess``: every image becomes one view of a fixed size."""
        return ()

    @property
    def colour(self) -> PerChannel:
        """The red, green and blue of the padding around an image, from 0 to 1."""
        return self.mean

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the padded square of the image as the only view; ``max_tiles`` is not used."""
        return Views({"image": [self.square(image)]})

    def square(self, image: Tensor) -> Tensor:
        """Return the image resized and padded to a square of s x s pixels, uint8 [3, s, s]."""
        height, width = image.shape[1:]
        longer, side = max(height, width), self.image_size
        rows, columns = (
            round(length * (side / longer)) if self.as_transformers else int(length / longer * side)
            for length in (height, width)
        )
        size = max(rows, self.min_size), max(columns, self.min_size)
        small = resize(image, *size, self.resample)
        free_rows, free_columns = side - small.shape[1], side - small.shape[2]
        return lay_over(small, side, side, free_rows // 2, free_columns // 2, self.colour)

    def with_section(self, label: str, section: Section) -> SquarePreprocessor:
        """Return a copy with the mean, the std and the smallest side that a processor file sets.

        The class that the file names decides ``as_transformers``.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or views of another size than the tower's.
        """
        check_class(label, section, "DeepseekVL", "Janus")
        kind = str(section.get("image_processor_type") or section.get("processor_class"))
        of_transformers = kind.startswith(("Janus", "DeepseekVL"))
        # Sizes and colours are the defaults of DeepseekVLImageProcessor and JanusImageProcessor.
        check_side(label, section, self.image_size, 384 if of_transformers else None)
        require_supported(label, section, {"do_pad": True})
        mean, std = read_mean_std(label, section, CLIP_MEAN, CLIP_STD)
        return replace(
            self,
            mean=mean,
            std=std,
            min_size=self.smallest(label, section),
            as_transformers=of_transformers,
        )

    def smallest(self, label: str, section: Section) -> int:
        """Return the least side of an image in pixels, ``min_size`` of a processor file."""
        return read_positive(label, "min_size", section.get("min_size"), 14, self.image_size)


@dataclass(frozen=True)
class HybridPreprocessor(SquarePreprocessor):
    """Makes a view of 1024x1024 pixels and the same at 384x384, for DeepSeek-VL-7B's two towers.

    ``mean`` and ``std`` normalise the large view, for the input path "high"; ``low_mean`` and
    ``low_std`` the small view, for the path "image". All are from DeepSeek's code: its processor
    file has only the colour of the padding.
    """

    image_size: int = 1024
    mean: PerChannel = CLIP_MEAN
    std: PerChannel = CLIP_STD
    low_size: int = 384
    low_mean: PerChannel = HALF
    low_std: PerChannel = HALF
    background: PerChannel = CLIP_MEAN

    @property
    def colour(self) -> PerChannel:
        """The red, green and blue of the padding around an image, from 0 to 1."""
        return self.background

    @property
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of the small view ("image") and of the large one ("high")."""
        return {"image": self.low_size, "high": self.image_size}

    def mean_std(self, path: str) -> tuple[PerChannel, PerChannel]:
        """Return the mean and standard deviation of the pixels of a view, "image" or "high"."""
        return (self.low_mean, self.low_std) if path == "image" else (self.mean, self.std)

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the large view, and the small view, which is resized from it.

        DeepSeek's tower does that in float32, transformers' class in integers.
        """
        high = self.square(image)
        source = high if self.as_transformers else high.to(torch.float32)
        low = resize(source, self.low_size, self.low_size, "bilinear")
        return Views({"image": [low], "high": [high]})

    def with_section(self, label: str, section: Section) -> HybridPreprocessor:
        """Return a copy with the values that a processor file of DeepSeek or transformers sets.

        Args:
            label: name of the section in errors.
            section: the part of the file that describes images.

        Raises:
            ValueError: a value that is not implemented, or views of another size.
        """
        # DeepSeek's own file lacks the size and has do_normalize=false, because its towers
        # normalise the pixels themselves; transformers' processor normalises.
        kind = str(section.get("image_processor_type"))
        if "high_res_size" not in section and not kind.startswith("DeepseekVLHybrid"):
            check_side(label, section, self.image_size)
            require_supported(label, section, {"do_normalize": False})
            colour, _ = read_mean_std(label, section, CLIP_MEAN, CLIP_STD)
            smallest = self.smallest(label, section)
            return replace(self, background=colour, min_size=smallest, as_transformers=False)
        check_side(label, section, self.low_size)
        check_side(label, {"size": section.get("high_res_size", 1024)}, self.image_size)
        filters = {"resample": 2, "high_res_resample": 3}
        # The default of transformers' class is bicubic for both views.
        require_supported(label, {"resample": 3, **section}, {**filters, "do_pad": True})
        high = {f"image_{name}": section.get(f"high_res_image_{name}") for name in ("mean", "std")}
        mean, std = read_mean_std(label, high, CLIP_MEAN, CLIP_STD)
        low_mean, low_std = read_mean_std(label, section, CLIP_MEAN, CLIP_STD)
        return replace(
            self,
            mean=mean,
            std=std,
            low_mean=low_mean,
            low_std=low_std,
            background=mean,
            min_size=self.smallest(label, section),
            as_transformers=True,
        )
