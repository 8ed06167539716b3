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
    options: argparse.Namespace, vectors: Vectors, about: str, numbers: str, device: torch.device
) -> dict[str, str]:
    """Print facts about the search, and return them by their labels, to write into the HTML page.

    Args:
        options: the parsed options.
        vectors: the vectors that were searched.
        about: how the query was encoded.
        numbers: what the numbers of the result are.
        device: the device that computed.
    """
    from ..devices import device_text

    settings = vectors.settings
    pool = f"{settings['pool']}{', length 1' if settings['normalize'] else ''}"
    fp8 = "; the job ran products in fp8, the query none"
    facts = {
        "folder": options.vectors,
        "checkpoint": settings["checkpoint"],
        "commit": settings["commit"],
        "encoder": f"{settings['dtype']}, pool {pool}"
        + f", {about}" * bool(about)
        + fp8 * (settings.get("precision") == "fp8" and options.pairs is None),
        "numbers": numbers
        + f"; {counted(vectors.left_out, 'vector')} left out, with values that are not finite"
        * bool(vectors.left_out),
        "device": device_text(device),
    }
    summary = "; ".join(f"{name} {value}" for name, value in facts.items() if name != "folder")
    print(f"\n{printable(summary)}")
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
