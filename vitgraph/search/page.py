"""The result of a search as one HTML file, which loads no other file and contacts no host.

A click on a picture opens the file of the job from which it was made, if that is on this machine.

Names and texts are escaped. Pictures are JPEGs made here, embedded as data: URIs. The page's
Content-Security-Policy allows data: pictures and, by its hash, the page's style; nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from encoders.inputs import VideoFrames, to_rgb
from weights.files import write_atomic

from ..devices import enough_disk
from ..embedding.sources.reading import File, ImageReader, Readable
from ..embedding.sources.suffixes import is_clip
from ..terminal import printable
from .vectors import Hit

THUMBNAIL = 320
"""The most pixels along the longer side of a picture in the page."""
MARK = '<meta name="generator" content="vitgraph search">'
"""The HTML that marks a page of search results; a file without it is not overwritten."""

_STYLE = """
:root { color-scheme: light dark; --line: #d5d7dc; --soft: #5d6470; --card: #f5f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a3f48; --soft: #a2a9b5; --card: #1d2026; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .75rem; }
header { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; margin-bottom: 1.5rem; }
header figure { flex: 0 1 14rem; }
dl { flex: 1 1 16rem; display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem;
  margin: 0; align-content: start; font-size: .9rem; }
dt { color: var(--soft); }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
ol { list-style: none; margin: 0; padding: 0; display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(9.5rem, 45%), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  overflow: hidden; height: 100%; }
img, .none { display: block; width: 100%; aspect-ratio: 4 / 3; object-fit: contain; }
.none { padding: .75rem; color: var(--soft); font-size: .8rem; overflow: auto; }
figcaption { padding: .5rem .6rem; font-size: .85rem; overflow-wrap: anywhere; }
b { font-variant-numeric: tabular-nums; }
.set { grid-column: 1 / -1; display: flex; flex-wrap: wrap; gap: 1rem; }
.set figure { flex: 0 1 12rem; height: auto; }
""".strip()
_POLICY = (
    "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    + "'"
)


class Found(NamedTuple):
    """Images that a page shows together: their keys and files, and a note such as a cosine."""

    note: str
    images: Sequence[tuple[str, File | None]]


def write_page(
    path: Path,
    query: Path | str,
    hits: Sequence[Hit],
    facts: Mapping[str, str],
    reader: ImageReader,
) -> None:
    """Write the result of a search as an HTML page; the file is written completely or not at all.

    Args:
        path: the file to write or to replace.
        query: path of the image or clip to which similar items were searched, or a text. The
            picture of a clip is the frame in its middle.
        hits: the images that were found, the most similar first.
        facts: texts about the job and the search to show on the page, by their labels.
        reader: reads the images of the job. For an image that it cannot read, or that is a URL, the
            page shows the reason instead of a picture.

    Raises:
        OSError: the file cannot be written, or the disk is full.
    """
    name, figure = (query, "") if isinstance(query, str) else (query.name, _query_figure(query))
    items = (
        f"<li>{_image(hit.key, hit.file, f'#{number} · {hit.cosine:.3f}', reader)}</li>"
        for number, hit in enumerate(hits, 1)
    )
    _write(path, "Nearest to", name, figure, facts, items)


def write_sets_page(
    path: Path, title: str, sets: Sequence[Found], facts: Mapping[str, str], reader: ImageReader
) -> None:
    """Write sets of images, such as near-duplicates, as an HTML page: a row of it per set.

    Args:
        path: the file to write or to replace.
        title: what the sets are.
        sets: the images of each set.
        facts: texts about the job and the search to show on the page, by their labels.
        reader: reads the images of the job, as for :func:`write_page`.

    Raises:
        OSError: the file cannot be written, or the disk is full.
    """
    items = (
        '<li class="set">'
        + "".join(_image(key, file, found.note, reader) for key, file in found.images)
        + "</li>"
        for found in sets
    )
    _write(path, title, "", "", facts, items)


def _write(
    path: Path, title: str, name: str, figure: str, facts: Mapping[str, str], items: Iterable[str]
) -> None:
    """Write a page: a heading of ``title`` and ``name``, a figure, facts, and items of a list."""
    lines = "\n".join(
        f"<dt>{_text(label)}</dt><dd>{_text(value)}</dd>" for label, value in facts.items()
    )
    list_items = "\n".join(items)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
{MARK}
<title>{_text(f"{title} {name}".strip())}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{_text(title)} <bdi>{_text(name)}</bdi></h1>
<header>
{figure}
<dl>
{lines}
</dl>
</header>
<ol>
{list_items}
</ol>
</body>
</html>
"""
    with enough_disk(path):
        write_atomic(path, page.encode())


def is_page(path: Path) -> bool:
    """Return whether the first 2,048 bytes of a file mark it as a page of search results."""
    with path.open("rb") as file:
        return MARK.encode() in file.read(2048)


def _figure(picture: str, key: str, note: str, link: str = "") -> str:
    """Return the HTML of a picture with a caption."""
    body = (
        f'<img src="{picture}" alt="{_text(key)}">'
        if picture.startswith("data:image/jpeg;base64,")
        else f'<div class="none">no picture: {_text(picture)}</div>'
    )
    if link:
        body = f'<a href="{_text(link)}" target="_blank" rel="noopener noreferrer">{body}</a>'
    return (
        f"<figure>{body}<figcaption><b>{_text(note)}</b><br><bdi>{_text(key)}</bdi></figcaption>"
        "</figure>"
    )


def _query_figure(query: Path) -> str:
    picture = _middle_frame(query) if is_clip(query.name) else query.read_bytes()
    return _figure(_thumbnail(picture), query.name, "the query")


def _image(key: str, file: File | None, note: str, reader: ImageReader) -> str:
    """Return the HTML of an image of the job with a caption."""
    return _figure(_picture_of(file, reader), key, note, _link(file))


def _link(file: File | None) -> str:
    """Return the file: URL of an image of the job, or "" if it is no file of this machine.

    There is no link to the web, because a page may come from a table that somebody else wrote.
    """
    if file is None or file.kind != "file" or not Path(file.path).is_file():
        return ""
    return Path(file.path).absolute().as_uri()


def _picture_of(file: File | None, reader: ImageReader) -> str:
    if file is None:
        return "the job does not say where it was read"
    if file.kind == "url":
        return "it was read from the web, and nothing is fetched for a page"
    try:
        if file.media == "clip":
            if changed := reader.changed([file]):
                return changed[0]
            return _thumbnail(_middle_frame(reader.clip(file)))
        return _thumbnail(reader.read(file))
    except (OSError, ValueError) as error:
        return str(error)


def _middle_frame(clip: Path | str | Readable) -> Tensor:
    """Return the frame in the middle of a clip, uint8 [3, H, W]."""
    frames = VideoFrames(clip)
    return frames[len(frames) // 2]


def _thumbnail(content: bytes | Tensor) -> str:
    """Return a small JPEG of an image as a data: URI."""
    picture = Image.fromarray(to_rgb(content).permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg.getvalue()).decode()}"


def _text(text: str) -> str:
    """Escape a text for use in HTML; control characters become visible escape sequences."""
    return escape(printable(text))
