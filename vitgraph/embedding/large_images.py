"""Warnings about images that make very many tokens: as a job is listed, and as it encodes them."""

from __future__ import annotations

import heapq
import io
import warnings
from collections.abc import Iterable, Iterator
from math import prod
from typing import IO

from PIL import Image

from encoders.contract import Limits
from encoders.inputs import learn_heif, read_item
from encoders.streams import EitherItemEncoder

from .sources.files import is_remote, open_regular
from .sources.reading import File, ImageReader

MOST_TOKENS = 16_384
"""The most tokens that an image makes without a warning."""
_HEADERS = 16
"""The number of files, those with the most bytes, whose headers are read as a job is listed."""


class LargestFiles:
    """Keeps the largest image files of a job while they are listed, to warn about large images."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, File]] = []

    def watch(self, files: Iterable[File]) -> Iterator[File]:
        """Yield every file, and keep the images with the most bytes."""
        for number, file in enumerate(files):
            if file.media == "image" and file.size > 0:
                heapq.heappush(self._heap, (file.size, -number, file))
                if len(self._heap) > _HEADERS:
                    heapq.heappop(self._heap)
            yield file

    def warn(self, reader: ImageReader, item_encoder: EitherItemEncoder, limits: Limits) -> bool:
        """Warn if the image of the most pixels makes too many tokens; return whether it does.

        The headers of the largest files are read, and only the image of the most pixels is decoded.

        Args:
            reader: reads the images.
            item_encoder: holds the encoder (``.encoder``), and counts the tokens of an image.
            limits: the keywords of ``preprocess`` that bound the size of an image.
        """
        areas = [(_area(file, reader), -number) for number, (*_, file) in enumerate(self._heap)]
        if not areas:
            return False
        _, number = max(areas)
        file = self._heap[-number][-1]
        try:
            images, videos = read_item(reader.item(file))
            inputs = item_encoder.preprocess(images, videos, limits)
        except Exception:  # noqa: BLE001  # as in `_area`; errors.csv names the image
            return False
        return warn_if_large(file.key, item_encoder.tokens(inputs))


def warn_if_large(key: str, tokens: int) -> bool:
    """Warn if the tokens of an image are more than :data:`MOST_TOKENS`; return whether they are."""
    if tokens > MOST_TOKENS:
        warnings.warn(
            f"{key}: makes {tokens:,} tokens, more than {MOST_TOKENS:,}, and the time of attention "
            "grows with their square: --max-pixels bounds the area of an image (docs/families.md "
            "says which families take it)",
            stacklevel=2,
        )
    return tokens > MOST_TOKENS


def _area(file: File, reader: ImageReader) -> int:
    """Return the number of pixels of an image by its header, 0 if it cannot be read."""
    try:
        if file.kind == "file" and not is_remote(file.path):
            with open_regular(file.path) as opened:
                return _area_in_header(opened)
        return _area_in_header(io.BytesIO(reader.read(file)))
    except Exception:  # noqa: BLE001  # drivers of remote stores raise errors of any class
        return 0


def _area_in_header(opened: IO[bytes]) -> int:
    learn_heif(opened)
    opened.seek(0)
    with warnings.catch_warnings():
        # PIL's warning does not name the file.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return prod(Image.open(opened).size)
