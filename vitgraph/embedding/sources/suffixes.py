"""Tells images, clips and other files apart by their suffixes, and counts the other files."""

from __future__ import annotations

import posixpath
from collections import Counter
from importlib.util import find_spec

from ...terminal import counted

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
CLIP_SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("3gp", "avi", "flv", "m2ts", "m4v", "mkv", "mov", "mp4", "mpeg", "mpg", "mts", "ogv"),
        *("webm", "wmv"),
    )
)
"""The file suffixes that mark clips (videos); PIL reads none of these formats as an image."""
_CLIP_ENDINGS = tuple(CLIP_SUFFIXES)
_CLIP_HEADS = (
    (0, b"\x1aE\xdf\xa3"),  # Matroska and WebM
    (8, b"AVI "),
    (0, b"FLV"),
    (0, b"OggS"),
    (0, b"\x00\x00\x01\xba"),  # MPEG
    (0, b"0&\xb2u\x8ef\xcf\x11"),  # ASF: WMV
)
"""The offsets and the first bytes by which a clip without a name is recognised."""
_STILL_BRANDS = (b"hei", b"hev", b"mif", b"msf", b"avi")
"""The beginnings of the brands of HEIF and AVIF, which share their container with MP4."""
_MOST_SUFFIXES = 8
"""The most suffixes that a message about files without an image's suffix lists."""


def suffixes() -> frozenset[str]:
    """Return the suffixes of image files in folders and tar files; files in a list may have any."""
    return _SUFFIXES | _HEIF if find_spec("pillow_heif") else _SUFFIXES


def _suffix(name: str) -> str:
    return posixpath.splitext(name)[1].lower()


def is_clip(name: str) -> bool:
    """Return whether a file name has the suffix of a clip, such as ``.mp4``."""
    # Most names are those of images, and `splitext` takes twice as long as `endswith`.
    return name.lower().endswith(_CLIP_ENDINGS) and _suffix(name) in CLIP_SUFFIXES


def is_media(name: str) -> bool:
    """Return whether a file name has the suffix of an image or a clip."""
    return is_clip(name) or _suffix(name) in _SUFFIXES | _HEIF


def holds_clip(cell: object) -> bool:
    """Return whether a table cell holds a clip: by the suffix of its path, else by its first bytes.

    Args:
        cell: bytes, a path, or a dict with "bytes" and "path".
    """
    if isinstance(cell, dict):
        path = cell.get("path")
        return is_clip(path) if isinstance(path, str) else holds_clip(cell.get("bytes"))
    if isinstance(cell, str):
        return is_clip(cell)
    if not isinstance(cell, bytes):
        return False
    if cell[4:8] == b"ftyp":
        return not cell[8:11].lower().startswith(_STILL_BRANDS)
    return any(cell[start:].startswith(head) for start, head in _CLIP_HEADS)


class LeftOut:
    """Counts the skipped files of a source by suffix: all but images and, if ``clips``, clips."""

    def __init__(self, clips: bool = False) -> None:
        self.clips = clips
        self.suffixes = suffixes() | CLIP_SUFFIXES if clips else suffixes()
        self.counts = Counter[str]()

    def takes(self, name: str) -> bool:
        """Return whether a file name has the suffix of an item; count the file if it has not."""
        suffix = _suffix(name)
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
            parts.append(counted(other_count, "other"))
        if _HEIF & self.counts.keys():
            parts[-1] += "; .heic needs pillow-heif: pip install 'pillow-heif>=1.0'"
        if CLIP_SUFFIXES & self.counts.keys():
            parts[-1] += "; for clips, say which frames to take with --fps or --num-frames"
        taken = "images or clips" if self.clips else "images"
        files = "file that is" if self.counts.total() == 1 else "files that are"
        return [f"skipped {self.counts.total():,} {files} not {taken}: {', '.join(parts)}"]
