"""The result of a search as one HTML file, which loads no other file and contacts no host.

A click on a picture opens the file of the job from which it was made, if that is on this machine.

The page has no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from encoders.inputs import VideoFrames

from ..embedding.sources.reading import File, ImageReader, Readable
from ..embedding.sources.suffixes import is_clip
from ..pages import JPEG, escaped, jpeg_uri, write_html
from .vectors import Hit

THUMBNAIL = 320
"""The most pixels along the longer side of a picture in the page."""
KIND = "search"
"""The kind of these pages; a file of anything else is not overwritten."""

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
        f"<dt>{escaped(label)}</dt><dd>{escaped(value)}</dd>" for label, value in facts.items()
    )
    list_items = "\n".join(items)
    body = f"""<h1>{escaped(title)} <bdi>{escaped(name)}</bdi></h1>
<header>
{figure}
<dl>
{lines}
</dl>
</header>
<ol>
{list_items}
</ol>
"""
    write_html(path, KIND, f"{title} {name}".strip(), body, _STYLE)


def _figure(picture: str, key: str, note: str, link: str = "") -> str:
    """Return the HTML of a picture with a caption."""
    body = (
        f'<img src="{picture}" alt="{escaped(key)}">'
        if picture.startswith(JPEG)
        else f'<div class="none">no picture: {escaped(picture)}</div>'
    )
    if link:
        body = f'<a href="{escaped(link)}" target="_blank" rel="noopener noreferrer">{body}</a>'
    return (
        f"<figure>{body}<figcaption><b>{escaped(note)}</b><br><bdi>{escaped(key)}</bdi></figcaption>"
        "</figure>"
    )


def _query_figure(query: Path) -> str:
    picture = _middle_frame(query) if is_clip(query.name) else query.read_bytes()
    return _figure(jpeg_uri(picture, THUMBNAIL), query.name, "the query")


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
            return jpeg_uri(_middle_frame(reader.clip(file)), THUMBNAIL)
        return jpeg_uri(reader.read(file), THUMBNAIL)
    except (OSError, ValueError) as error:
        return str(error)


def _middle_frame(clip: Path | str | Readable) -> Tensor:
    """Return the frame in the middle of a clip, uint8 [3, H, W]."""
    frames = VideoFrames(clip)
    return frames[len(frames) // 2]
