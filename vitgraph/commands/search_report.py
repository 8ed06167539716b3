"""What ``vitgraph search`` says about a search, printed and on its HTML page."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..embedding.sources.reading import ImageReader, SourceOptions
from ..terminal import counted, printable

if TYPE_CHECKING:
    import torch

    from ..embedding.records import JobSettings
    from ..search.vectors import Vectors


def print_facts(
    options: argparse.Namespace, vectors: Vectors, about: str, score: str, device: torch.device
) -> dict[str, str]:
    """Print facts about the search, and return them by their labels, to write into the HTML page.

    Args:
        options: the parsed options.
        vectors: the vectors that were searched.
        about: how the query was encoded.
        score: which cosine the result shows, and over how many vectors.
        device: the device that computed.
    """
    from ..devices import device_text

    settings = vectors.settings
    encoder = f"{settings['dtype']}, pool {settings['pool']}"
    if settings["normalize"]:
        encoder += ", length 1"
    if about:
        encoder += f", {about}"
    if settings.get("precision") == "fp8" and options.pairs is None:
        encoder += "; the job ran products in fp8, the query none"
    if vectors.left_out:
        skipped = counted(vectors.left_out, "vector")
        score += f"; skipped {skipped} with values that are not finite"
    facts = {
        "folder": options.vectors,
        "score": score,
        "checkpoint": settings["checkpoint"],
        "commit": settings["commit"],
        "encoder": encoder,
        "device": device_text(device),
    }
    print()
    for name, value in facts.items():
        print(printable(f"{name:12}{value}"))
    return facts


def reader_of(settings: JobSettings) -> ImageReader:
    """Return a reader of the images of a job, which fetches nothing from the web."""
    default = SourceOptions()
    source = SourceOptions(
        settings.get("column", default.column),
        settings.get("subset", default.subset),
        settings.get("split", default.split),
        settings.get("any_path", default.any_path),
        fetch_urls=False,
    )
    return ImageReader(source)
