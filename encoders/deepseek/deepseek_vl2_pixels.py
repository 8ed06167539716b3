"""Preprocessing of images for DeepSeek-VL2: a padded view of the whole image, and tiles.

Source: ``DeepseekVLV2Processor`` of deepseek-ai/DeepSeek-VL2 at commit ef9f91e, which resizes by
Pillow.

Shapes: s side of a view in pixels.

Deliberate difference: the source makes no tiles if a prompt has more than two images. Here every
image is cut into tiles as if it were alone; ``max_tiles=1`` leaves images whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from einops import rearrange
from torch import Tensor

from ..inputs.processor_files import (
    Section,
    require_supported,
)
from ..inputs.resizing import pad_to_canvas
from ..inputs.sizes import best_candidate, read_candidates
from ..inputs.views import ViewPreprocessor, Views


@dataclass(frozen=True)
class CandidatePreprocessor(ViewPreprocessor):
    """Makes a view of the whole image, then tiles of the best candidate size, for DeepSeek-VL2.

    A view has 384x384 pixels, and 384 is no multiple of a patch's 14. The last 6 rows and columns
    of pixels, which the convolution in DeepSeek's tower leaves out, are cut off here.
    """

    image_size: int = 384
    candidates: tuple[tuple[int, int], ...] = ((384, 384),)
    """The (width, height) in pixels that an image may be resized to, multiples of ``image_size``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        read_candidates(type(self).__name__, self.candidates, self.image_size)

    @property
    def sides(self) -> dict[str, int]:
        """Return the side in pixels of each kind of view by name, rounded down to whole patches."""
        return {"image": self.image_size // self.patch_size * self.patch_size}

    def views(self, image: Tensor, max_tiles: int | None) -> Views:
        """Return the view of the whole image, then its tiles row by row.

        Candidate sizes of more than ``max_tiles`` tiles are left out; None leaves out none.
        """
        side = self.image_size
        allowed = [
            size
            for size in self.candidates
            if max_tiles is None or size[0] * size[1] <= max_tiles * side * side
        ]
        width, height = best_candidate(image.shape[2], image.shape[1], allowed)
        canvas = pad_to_canvas(image, height, width, self.mean, "pillow_bicubic")
        tiles = rearrange(canvas, "c (r h) (q w) -> (r q) c h w", h=side, w=side)
        whole_view = pad_to_canvas(image, side, side, self.mean, "pillow_bicubic")
        patches = self.sides["image"]
        views = [view[:, :patches, :patches] for view in (whole_view, *tiles)]
        return Views({"image": views}, (width // side, height // side, True))

    def with_section(self, label: str, section: Section) -> CandidatePreprocessor:
        """Return a copy with the mean, the std and the candidate sizes that a processor file sets.

        ``label`` names the section of the file in errors.
        """
        require_supported(label, section, {"patch_size": self.patch_size, "downsample_ratio": 2})
        sizes = section.get("candidate_resolutions")
        candidates = (
            self.candidates if sizes is None else read_candidates(label, sizes, self.image_size)
        )
        return replace(super().with_section(label, section), candidates=candidates)
