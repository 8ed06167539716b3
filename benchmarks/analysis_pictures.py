"""Draws the pictures of docs/analysis.md and docs/embedding.md: attention, CKA, a search page.

``python -m benchmarks.analysis_pictures docs`` writes ``attention.png`` and ``similarity.png`` into
the folder. With ``--page``, it also embeds crops of two photographs, runs ``vitgraph search`` on
them, and takes a screenshot of the HTML page with Chromium, which must be installed. The vision
towers are small and have seeded random weights.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

import vitgraph
from encoders import Encoder
from vitgraph.cli import main as vitgraph_command
from vitgraph.commands.demo_pictures import sample_photographs
from vitgraph.seeded import write_seeded_checkpoint

BLOCKS = (0, 2, 3, 5)


def windows(photograph: Image.Image, across: int, down: int) -> list[Image.Image]:
    """Cut a photograph into ``across`` x ``down`` equal crops, listed row by row."""
    wide, high = photograph.width // across, photograph.height // down
    return [
        photograph.crop((x * wide, y * high, (x + 1) * wide, (y + 1) * high))
        for y in range(down)
        for x in range(across)
    ]


def draw_attention(encoder: Encoder, photograph: Image.Image, path: Path) -> None:
    """Draw where the middle patch of a photograph attends, in four of the encoder's blocks."""
    (whole,) = vitgraph.attention_maps(encoder, [photograph])[0]
    middle = (0, whole.shape[1] // 2, whole.shape[2] // 2)
    (maps,) = vitgraph.attention_maps(encoder, [photograph], blocks=BLOCKS, queries=[middle])
    titles = [f"block {number}" for number in BLOCKS]
    figure = vitgraph.plot_attention(
        photograph,
        maps,
        queries=[middle],
        titles=titles,
        title="Attention from one patch (marked)",
    )
    figure.savefig(path, dpi=80)


def draw_similarity(encoder: Encoder, images: list[Image.Image], path: Path) -> None:
    """Draw the similarity (CKA) of the features of every pair of blocks of one encoder."""
    found = vitgraph.similarity_of_blocks(encoder, encoder, images)
    title = f"Blocks of one tower, {len(images)} images"
    vitgraph.plot_similarity(found, low=None, title=title).savefig(path, dpi=80)


def draw_page(checkpoint: Path, images: list[Image.Image], path: Path) -> None:
    """Write the HTML page of a search among crops of photographs, and a screenshot of it."""
    with TemporaryDirectory() as name:
        place = Path(name)
        (place / "photos").mkdir()
        for number, image in enumerate(images):
            image.save(place / "photos" / f"part {number:02d}.png")
        images[0].crop((8, 8, images[0].width - 8, images[0].height - 8)).save(place / "query.png")
        vectors, page = str(place / "vectors"), place / "page.html"
        job = ["embed", str(checkpoint), str(place / "photos"), "--out", vectors]
        vitgraph_command([*job, "--no-progress"])
        asked = ["search", vectors, str(place / "query.png"), "--top", "10", "--html", str(page)]
        vitgraph_command([*asked, "--no-progress"])
        page.write_text(page.read_text().replace(f"{checkpoint.parent}/", "").replace(name, "."))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        picture = [f"--screenshot={path}", "--window-size=900,640", page.as_uri()]
        subprocess.run(["chromium", *options, *picture], check=True)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def main() -> None:
    """Write the pictures into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", action="store_true", help="also the page of a search")
    options = parser.parse_args()
    photographs = [Image.open(path).convert("RGB") for path in sample_photographs().values()]
    images = [part for one in photographs[:2] for part in windows(one, 4, 3)]
    with TemporaryDirectory() as name:
        checkpoint = write_seeded_checkpoint(Path(name) / "tower", "qwen3_vl", depth=6, width=96)
        encoder = vitgraph.load_encoder(checkpoint, dtype=torch.float32, progress=False)
        draw_attention(encoder, photographs[1], options.folder / "attention.png")
        draw_similarity(encoder, images, options.folder / "similarity.png")
        if options.page:
            draw_page(checkpoint, images, options.folder.resolve() / "search.png")


if __name__ == "__main__":
    main()
