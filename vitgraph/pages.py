"""HTML pages of one file, which load no other file and contact no host.

Texts are escaped. Pictures are JPEGs, embedded as data: URIs. The Content-Security-Policy of a page
allows these pictures and, by their hashes, the page's own style and script; nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import io
from html import escape
from pathlib import Path

from PIL import Image
from torch import Tensor

from encoders.inputs import to_rgb
from weights.files import write_atomic

from .devices import enough_disk
from .terminal import printable

JPEG = "data:image/jpeg;base64,"
"""The beginning of the URI of every picture in a page."""


def write_html(path: Path, kind: str, title: str, body: str, style: str, script: str = "") -> None:
    """Write an HTML page; the file is written completely or not at all.

    Args:
        path: the file to write or to replace.
        kind: the command that writes such pages, "search" or "maps", for :func:`check_page`.
        title: title of the page, a plain text.
        body: the HTML of the body, whose texts are escaped.
        style: CSS of the page.
        script: JavaScript of the page, without ``</script``; "" for none.

    Raises:
        OSError: the file cannot be written, or the disk is full.
    """
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(style)}"
    )
    if script:
        policy += f"; script-src {_hash(script)}"
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
{_mark(kind)}
<title>{escaped(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
{f"<script>{script}</script>" if script else ""}</body>
</html>
"""
    with enough_disk(path):
        write_atomic(path, page.encode())


def check_page(page: Path, kind: str) -> None:
    """Check that an HTML page can be written, and replaces only an earlier one.

    Args:
        page: the file to write, the value of ``--html``.
        kind: the command that will write the page.

    Raises:
        ValueError: a name that is not of HTML, no such folder, or a file of something else.
    """
    if page.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--html {page}: the page is HTML; let its name end in .html")
    if page.is_dir() or not page.parent.is_dir():
        raise ValueError(f"--html {page}: must be a file in a folder that exists")
    if page.exists() and page.stat().st_size:
        with page.open("rb") as file:
            if _mark(kind).encode() not in file.read(2048):
                raise ValueError(
                    f"--html {page}: exists and is not a {kind} page; give another name"
                )


def jpeg_uri(content: bytes | Tensor, longest: int) -> str:
    """Return an image as the data: URI of a JPEG.

    Args:
        content: the bytes of an image file, or pixels uint8 [3, H, W].
        longest: the most pixels along the longer side of the JPEG.
    """
    picture = Image.fromarray(to_rgb(content).permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((longest, longest))
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=80)
    return JPEG + base64.b64encode(jpeg.getvalue()).decode()


def escaped(text: str) -> str:
    """Escape a text for use in HTML; control characters become visible escape sequences."""
    return escape(printable(text))


def _mark(kind: str) -> str:
    return f'<meta name="generator" content="vitgraph {kind}">'


def _hash(content: str) -> str:
    """Return the hash of a style or script as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
