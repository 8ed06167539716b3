"""A page on which one clicks a patch of a picture, and sees its attention and its nearest patches.

The page is one HTML file. ``explorer.css`` and ``explorer.js`` beside this module go into it, with
the numbers of all patches: attention weights in 64 steps, and the nearest patches with cosines.

Shapes: n cells of one image; a cell is one patch, or a square of patches of a large image.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import normalize

from encoders import Encoder, PathsEncoder
from encoders.contract import Limits
from encoders.inputs import StagedItem, prefix_errors, read_images
from encoders.streams import ImagesLike, Progress

from ..analysis.attention import require_plain, spread_blocks
from ..analysis.cells import CellStates, states_of_cells
from ..pages import escaped, jpeg_uri, write_html
from ..terminal import counted, printable

KIND = "maps"
"""The kind of these pages; the command does not overwrite a file of anything else."""
MOST_CELLS = 1024
"""The most cells of an image: an image of more patches has cells of 2x2, 3x3, ... patches."""
MATCHES = 8
"""The number of nearest cells that the page shows for each cell."""
STEPS = 64
"""The steps of attention weights in the page; few, because they are most of its bytes."""
PICTURE = 896
"""The most pixels along the longer side of a picture in the page."""
DEFAULT_BLOCKS = 4
"""The number of blocks in the page by default."""


def write_explorer(
    file: str | PathLike[str],
    encoder: Encoder,
    images: ImagesLike,
    *,
    blocks: Sequence[int] | None = None,
    path: str = "image",
    title: str | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_tiles: int | None = None,
    max_soft_tokens: int | None = None,
    progress: bool = True,
) -> None:
    """Write an HTML page that shows attention and nearest patches of the patch that one clicks.

    The page is one file that needs no server and no network. Its pictures are what the encoder
    reads: resized, and cropped or padded as for this family. Most of its bytes are the attention of
    all pairs of patches: at most about 1 MB per image and block.

    Args:
        file: the file to write or to replace.
        encoder: an encoder that is neither accelerated nor wrapped in CUDA graphs.
        images: as ``preprocess`` takes them. Nearest patches are found among all of them.
        blocks: block numbers (negative ones from the end); None for four of them, evenly spread.
        path: "image", or another key of ``paths`` or ``feature_maps``, such as "tiles".
        title: title of the page; None for a general one.
        min_pixels, ..., max_soft_tokens: as ``preprocess`` takes them.
        progress: whether a progress bar shows how many images are done.

    Raises:
        ValueError: no image, an accelerated or wrapped encoder, what ``preprocess`` rejects, or a
            block or path that does not exist.
        OSError: the file cannot be written, or the disk is full.
    """
    require_plain(encoder)
    pixels = read_images(images)
    if not pixels:
        raise ValueError("there is no image: pass at least one")
    numbers = spread_blocks(encoder, path, DEFAULT_BLOCKS) if blocks is None else list(blocks)
    limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens)
    names = _names(images, len(pixels))
    explored = []
    with Progress(len(pixels), progress) as bar:
        for name, image in zip(names, pixels, strict=True):
            explored.append(_explore(encoder, image, name, numbers, path, limits))
            bar.update()
    heading = title or "Attention and nearest patches"
    resources = files(__package__)
    write_html(
        Path(file),
        KIND,
        heading,
        _body(heading, _data(explored), _facts(encoder, explored)),
        (resources / "explorer.css").read_text("utf-8"),
        (resources / "explorer.js").read_text("utf-8"),
    )


class _Explored(NamedTuple):
    """One image, as the encoder reads it, with what its blocks know of its cells."""

    name: str
    picture: Tensor
    """uint8 [3, H, W]."""
    side: int
    """The side of a cell in patches."""
    patches: tuple[int, int]
    """The height and the width in patches."""
    states: list[CellStates]


def _explore(
    encoder: Encoder,
    image: Tensor,
    name: str,
    blocks: Sequence[int],
    path: str,
    limits: Limits,
) -> _Explored:
    """Run the blocks on one image, uint8 [3, H, W]."""
    stager = encoder.item_encoder().stager
    if stager is None:
        inputs = encoder.preprocess([image])
        raise AssertionError(f"{type(inputs).__name__} of an encoder without preprocessing")
    with prefix_errors(name):
        (staged,) = stager.stage([image], (), limits, encoder.device)
    states = states_of_cells(
        encoder, stager.finish([staged]), blocks=blocks, path=path, most_cells=MOST_CELLS
    )
    return _Explored(name, _picture(encoder, staged, path.partition(".")[0]), *states)


def _picture(encoder: Encoder, staged: StagedItem, path: str) -> Tensor:
    """Return what the encoder reads of an image on an input path, its tiles joined, [3, H, W]."""
    views = staged.paths[path if path in staged.paths else "image"].pixels
    if isinstance(encoder, PathsEncoder) and len(encoder.paths) == 1:  # whole image, then tiles
        side = encoder.paths["image"].config.patch_size
        patches = rearrange(views, "n (h p) (w q) c -> n (h w) (p q c)", p=side, q=side)
        (maps,) = encoder.feature_maps(patches, staged.layout(encoder.paths))
        picture = rearrange(maps[path], "1 h w (p q c) -> c (h p) (w q)", p=side, q=side)
    else:
        columns, rows = (1, 1) if staged.tiles is None else staged.tiles[:2]
        if len(encoder.paths) > 1 and path != "tiles":  # tiles are views of the path "tiles"
            columns, rows = 1, 1
        tiles = views[: rows * columns]
        picture = rearrange(tiles, "(r q) h w c -> c (r h) (q w)", r=rows, q=columns)
    return picture.clamp(0, 255).round().to(torch.uint8).cpu()


def _data(explored: Sequence[_Explored]) -> dict[str, object]:
    """Return the numbers of the page, as ``explorer.js`` reads them."""
    counts = [len(one.states[0].attention) for one in explored]
    matches = min(MATCHES, sum(counts) - 1)
    packed: list[list[str]] = [[] for _ in explored]
    for states in zip(*(one.states for one in explored), strict=True):
        features = torch.cat([state.features.flatten(0, 1) for state in states])
        features = normalize(features - features.mean(0))
        start = 0
        for texts, state, count in zip(packed, states, counts, strict=True):
            cosines = features[start : start + count] @ features.T
            cosines[torch.arange(count), start + torch.arange(count)] = -2  # not itself
            best = cosines.topk(matches)
            texts.append(_pack(state.attention.flatten(1), best.indices, best.values))
            start += count
    return {
        "blocks": [state.block for state in explored[0].states],
        "matches": matches,
        "images": [
            {
                "name": printable(one.name),
                "picture": jpeg_uri(one.picture, PICTURE),
                "rows": one.states[0].features.shape[0],
                "columns": one.states[0].features.shape[1],
                "side": one.side,
                "height": one.patches[0] / one.side,  # in cells, of which the last may be cut
                "width": one.patches[1] / one.side,
                "states": texts,
            }
            for one, texts in zip(explored, packed, strict=True)
        ],
    }


def _pack(weights: Tensor, cells: Tensor, cosines: Tensor) -> str:
    """Return the numbers of one image in one block as text: base64 of deflated bytes.

    They are, little-endian and one after another: float32 [n], the largest weight of each asking
    cell; uint16 [n, matches], numbers of the nearest cells, counted over all images; int8 [n,
    matches], their cosines in hundredths; uint8 [n, n], the square root of each weight, 63 at the
    largest of its row.
    """
    largest = weights.amax(1, keepdim=True)
    levels = (weights / largest.clamp(min=1e-30)).sqrt().mul(STEPS - 1).round()
    parts = [
        largest.numpy().astype("<f4"),
        cells.numpy().astype("<u2"),
        cosines.mul(100).round().numpy().astype("i1"),
        levels.numpy().astype("u1"),
    ]
    joined = b"".join(part.tobytes() for part in parts)
    return base64.b64encode(zlib.compress(joined, 9)).decode()


def _names(images: ImagesLike, count: int) -> list[str]:
    """Return a name for each image: of its file, or a number."""
    several = images if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    return [
        Path(image).name if isinstance(image, str | PathLike) else f"image {number}"
        for number, image in zip(range(count), several, strict=False)
    ]


def _facts(encoder: Encoder, explored: Sequence[_Explored]) -> dict[str, str]:
    """Return facts about the page by their labels."""
    sides = sorted({one.side for one in explored})
    cells = "; ".join(
        f"{one.name}: {one.patches[1]}x{one.patches[0]} patches"
        + f", in cells of {one.side}x{one.side}" * (one.side > 1)
        for one in explored
    )
    means = " A cell shows the mean over its patches." if sides[-1] > 1 else ""
    return {
        "encoder": f"{type(encoder).__name__}, {counted(len(explored[0].states), 'block')} shown",
        "pictures": f"what the encoder reads; {cells}.{means}",
        "attention": "softmax weights, the mean over the heads; colours follow their square root",
        "nearest": f"the {MATCHES} patches of all pictures with the largest cosine of features, "
        "after the mean of all patches is subtracted",
        "stored": f"weights in {STEPS} steps of the square root, up to the largest of each patch; "
        "cosines in hundredths",
    }


def _body(title: str, data: Mapping[str, object], facts: Mapping[str, str]) -> str:
    """Return the body of the page."""
    numbers = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    lines = "\n".join(
        f"<dt>{escaped(label)}</dt><dd>{escaped(text)}</dd>" for label, text in facts.items()
    )
    panel = '<div class="picture" id="{}" tabindex="0" role="group" aria-label="{}">'
    picture = '<img alt="" draggable="false"><canvas class="heat"></canvas><svg></svg></div>'
    return f"""<header>
<h1>{escaped(title)}</h1>
<p>Click a patch of either picture, or move with the arrow keys.</p>
<div class="choices"><div id="images" role="group" aria-label="Picture"></div>
<div id="blocks" role="group" aria-label="Block">Block</div></div>
</header>
<main>
<figure><figcaption><h2>Attention</h2><p id="asked" aria-live="polite"></p></figcaption>
{panel.format("attention", "Attention from the marked patch")}{picture}
<div class="below"><div class="bar"></div>
<div class="ticks"><span>weight 0</span><span id="quarter"></span><span id="largest"></span></div>
</div></figure>
<figure><figcaption><h2>Nearest patches</h2><p>Numbered from the most similar.</p></figcaption>
{panel.format("nearest", "Patches nearest to the marked one")}{picture}
<div class="below"><ol id="matches"></ol></div></figure>
</main>
<dl>
{lines}
</dl>
<noscript><p>This page needs JavaScript, which it contains; it loads nothing.</p></noscript>
<script type="application/json" id="data">{numbers}</script>
"""
