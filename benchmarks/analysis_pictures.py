"""Draws the pictures of docs/analysis.md and docs/embedding.md: attention, CKA, HTML pages.

``python -m benchmarks.analysis_pictures docs`` writes ``attention.png`` and ``similarity.png`` into
the folder. With ``--page``, it also takes screenshots of HTML pages with Chromium, which must be
installed: of ``vitgraph search`` on crops of two photographs, and of ``write_explorer``. The vision
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
        take_screenshot(page, path, "900,640")


def draw_maps(encoder: Encoder, photographs: list[Path], path: Path) -> None:
    """Write the page of attention and nearest patches of photographs, and a screenshot of it."""
    with TemporaryDirectory() as name:
        page = Path(name) / "maps.html"
        vitgraph.write_explorer(page, encoder, photographs, progress=False)
        take_screenshot(page, path, "1160,820")


def take_screenshot(page: Path, path: Path, size: str) -> None:
    """Take a screenshot of an HTML page with Chromium, in a window of "width,height" pixels."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    shot = page.with_suffix(".png")
    picture = [f"--screenshot={shot}", f"--window-size={size}", "--virtual-time-budget=5000"]
    subprocess.run(["chromium", *options, *picture, page.as_uri()], check=True)
    taken = Image.open(shot).convert("RGB")
    (taken.quantize(128) if path.suffix == ".png" else taken).save(path, optimize=True, quality=85)


def main() -> None:
    """Write the pictures into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", action="store_true", help="also the HTML pages")
    options = parser.parse_args()
    photographs = [Image.open(path).convert("RGB") for path in sample_photographs().values()]
    images = [part for one in photographs[:2] for part in windows(one, 4, 3)]
    with TemporaryDirectory() as name:
        checkpoint = write_seeded_checkpoint(Path(name) / "tower", "qwen3_vl", depth=6, width=96)
        encoder = vitgraph.load_encoder(checkpoint, dtype=torch.float32, progress=False)
        draw_attention(encoder, photographs[1], options.folder / "attention.png")
        draw_similarity(encoder, images, options.folder / "similarity.png")
        if options.page:
            paths = list(sample_photographs().values())[:2]
            draw_maps(encoder, paths, options.folder.resolve() / "maps.jpg")
            draw_page(checkpoint, images, options.folder.resolve() / "search.png")


if __name__ == "__main__":
    main()
