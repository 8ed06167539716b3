"""The images and videos that a command names.

Files are decoded when their turn comes, so that memory holds one item, or one batch with graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from encoders.inputs.intake import Video, to_rgb

from ..devices import enough_memory
from ..video import read_video


class Media(NamedTuple):
    """One decoded image or one open video."""

    name: str
    video: Video
    """The frames, uint8 [3, H, W] each, and their rate; an image is one frame without a rate."""
    kind: str
    """"image" or "video"."""

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        height, width = self.still.shape[1:]
        return width, height

    @property
    def still(self) -> Tensor:
        """The image, or the middle frame of the clip, for plots; uint8 [3, H, W]."""
        middle: Tensor = self.video.frames[len(self.video.frames) // 2]
        return middle


def image_medium(name: str, image: object) -> Media:
    """Decode an image, given in any form that ``encoder.encode`` takes."""
    return Media(name, Video(to_rgb(image)[None]), "image")


def open_media(images: Sequence[Path], videos: Sequence[Path]) -> Iterator[Media]:
    """Open the files one after another, images first, each when it is asked for.

    Raises:
        ValueError: a file that cannot be decoded or is not there.
    """
    for path in images:
        yield image_medium(str(path), path)
    for path in videos:
        yield Media(str(path), read_video(path), "video")


@contextmanager
def named(*media: Media) -> Iterator[None]:
    """Prefix errors raised in the block with the items' file names.

    Raises:
        ValueError: for a ValueError in the block, and if memory ran out.
    """
    names = ", ".join(medium.name for medium in media)
    fix = (
        "make the item smaller (--max-pixels, --max-tiles, --num-frames), the calls "
        "(--max-tokens-per-call) or the numbers (--dtype bfloat16)"
    )
    with enough_memory(names, fix):
        try:
            yield
        except ValueError as error:
            said = str(error).removeprefix("image 0: ").removeprefix("video 0: ")
            raise ValueError(f"{names}: {said}") from error
