"""Tells images from other files by their suffixes, and counts the other files."""

from __future__ import annotations

import posixpath
from collections import Counter
from importlib.util import find_spec

_SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("apng", "avif", "avifs", "blp", "bmp", "bw", "dds", "dib", "gif", "icb", "icns", "ico"),
        *("j2c", "j2k", "jfif", "jp2", "jpc", "jpe", "jpeg", "jpf", "jpg", "jpx", "mpo"),
        *("msp", "pbm", "pcx", "pgm", "png", "pnm", "ppm", "psd", "qoi", "ras", "rgb", "rgba"),
        *("sgi", "tga", "tif", "tiff", "vda", "vst", "webp", "xbm", "xpm"),
    )
)
"""The suffixes of the formats that PIL decodes to pixels without another program."""
_HEIF = frozenset((".heic", ".heif", ".hif"))
"""The suffixes of HEIF photographs, which PIL reads only if pillow-heif is installed."""
_MOST_SUFFIXES = 8
"""The most suffixes that a message about files without an image's suffix lists."""


def suffixes() -> frozenset[str]:
    """Return the suffixes of image files in folders and tar files; files in a list may have any."""
    return _SUFFIXES | _HEIF if find_spec("pillow_heif") else _SUFFIXES


class LeftOut:
    """Counts the files of a source that are left out because they are not images, by suffix."""

    def __init__(self) -> None:
        self.suffixes, self.counts = suffixes(), Counter[str]()

    def takes(self, name: str) -> bool:
        """Return whether a file name has the suffix of an image; count the file if it has not."""
        suffix = posixpath.splitext(name)[1].lower()
        taken = suffix in self.suffixes
        if not taken:
            self.counts[suffix or "without a suffix"] += 1
        return taken

    def describe(self) -> list[str]:
        """Return a list of one line about the most common suffixes; [] if no file was counted."""
        if not self.counts:
            return []
        common = self.counts.most_common(_MOST_SUFFIXES)
        parts = [f"{count:,} {suffix}" for suffix, count in common]
        if other_count := self.counts.total() - sum(count for _, count in common):
            parts.append(f"{other_count:,} others")
        if _HEIF & self.counts.keys():
            parts[-1] += "; .heic needs pillow-heif: pip install 'pillow-heif>=1.0'"
        return [f"left out, because they are no images by their names: {', '.join(parts)}"]
