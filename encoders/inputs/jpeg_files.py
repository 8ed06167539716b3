"""JPEG files decoded by simplejpeg where it is installed, to the pixels that PIL gives.

PIL copies every decoded image while it holds Python's global lock, so that 16 threads of it decode
no faster than about five; simplejpeg decodes without the lock (``docs/embedding.md`` has figures).
Both use libjpeg-turbo. PIL reads the header, so its limits and its errors for a header stay, and it
decodes CMYK and whatever simplejpeg rejects: its pixels or its error are then the result.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from PIL import Image, features
from PIL.JpegImagePlugin import JpegImageFile

if TYPE_CHECKING:
    Pixels: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
else:
    Pixels = np.ndarray


def decode_jpeg(image: Image.Image) -> Pixels | None:
    """Decode a JPEG file that PIL has opened, without holding Python's global lock.

    Args:
        image: what ``Image.open`` returned, before its pixels are loaded.

    Returns:
        uint8 [H, W, 3], not turned upright; None if PIL is to decode the file.
    """
    if not isinstance(image, JpegImageFile) or image.mode not in ("RGB", "L") or not _is_fast():
        return None
    import simplejpeg

    assert image.fp is not None  # it is open until PIL has loaded the pixels
    image.fp.seek(0)
    # The buffer has the size that PIL has checked, so a second header cannot claim a larger one.
    pixels = np.empty((image.height, image.width, 3), dtype=np.uint8)
    try:
        decoded = simplejpeg.decode_jpeg(image.fp.read(), "RGB", buffer=pixels)
    except (
        ValueError
    ):  # by default for what libjpeg only warns of, too: PIL knows what is tolerable
        return None
    return pixels if decoded.shape == pixels.shape else None


@cache
def _is_fast() -> bool:
    """Return whether simplejpeg is installed, and PIL's decoder is that of libjpeg-turbo as well.

    Another libjpeg rounds in other ways, and the pixels are to be those of PIL.
    """
    try:
        import simplejpeg  # noqa: F401
    except ImportError:
        return False
    return features.check_feature("libjpeg_turbo") is True
