"""Measurements for ``vitgraph embed --plan``: images per second of one core and of one GPU."""

from __future__ import annotations

import os
import statistics
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.encode_many import ours, rates
from benchmarks.traffic.photographs import cut_photographs, write_jpegs
from encoders import VisionEncoder
from encoders.contract import Limits
from weights import FAMILIES, load_encoder

SIZES = {
    "256x256": (256, 256),
    "448x448": (448, 448),
    "640x480": (640, 480),
    "1024x768": (1024, 768),
    "1920x1080": (1920, 1080),
}
"""The sizes (width, height) of the photographs, by name."""
TOWERS = {
    "Qwen3-VL-2B": "Qwen/Qwen3-VL-2B-Instruct",
    "Qwen3-VL-8B": "Qwen/Qwen3-VL-8B-Instruct",
    "Qwen2.5-VL-7B": "Qwen/Qwen2.5-VL-7B-Instruct",
    "InternViT-300M": "OpenGVLab/InternVL3-1B",
}
"""The Hugging Face repo of each tower, by its name in ``benchmarks/towers.py``."""
SMALL_SIZE = 640, 480
"""The size of the photographs for towers that make every image the same number of tokens."""
MOST_TOKENS = 1024
"""The tokens of an image of the largest of these towers."""


def measure_host(images: int, listed: int) -> dict[str, Any]:
    """Measure rates of one core, in images per second of CPU time.

    Args:
        images: number of JPEG files of each size.
        listed: number of files, and of members of a tar file, to list.
    """
    from benchmarks.measuring.machine import cpu_name

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            "cpu": cpu_name(),
            "torch": torch.__version__,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "images": images,
            "listed": listed,
            "decoding": {name: measure_decoding(size, images) for name, size in SIZES.items()},
            "per second": measure_lists(listed),
            "listed on": cpu_name(),
            "bytes per listed file": measure_bytes(min(listed, 20_000)),
        }
    finally:
        torch.set_num_threads(threads)


def measure_decoding(size: tuple[int, int], images: int) -> dict[str, float]:
    """Time the decoding and resizing of JPEG files, the work of the threads of ``encode_many``."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_jpegs(Path(folder), cut_photographs([size] * images))
        nbytes = sum(path.stat().st_size for path in paths) / images
        rates = {"kilobytes": round(nbytes / 1e3, 1)}
        for family, preprocessor in preprocessors().items():

            def decode(preprocessor: Any = preprocessor) -> None:
                for path in paths:
                    preprocessor.stage([path], [], Limits())

            rates[family] = round(images / cpu_seconds(decode), 1)
    return rates


def preprocessors() -> dict[str, Any]:
    """Return the preprocessors of a Qwen tower and of InternViT, with their repos' defaults."""
    named = {"Qwen": "Qwen3-VL-8B", "InternViT": "InternViT-300M"}
    return {name: without_weights(TOWERS[tower]).preprocessor for name, tower in named.items()}


def without_weights(repo_id: str) -> VisionEncoder:
    """Build the vision tower of a Hugging Face repo on the meta device, without weights."""
    for family in FAMILIES.values():
        for model in family.facts.published:
            if model.repo_id == repo_id:
                with torch.device("meta"):
                    encoder = family.encoder(family.config.from_hf(model.config))
                assert isinstance(encoder, VisionEncoder)
                return encoder
    raise ValueError(f"{repo_id}: is not a published repo that is known")


def cpu_seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Return the median CPU seconds of a function, which depend little on other processes."""
    call()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return statistics.median(times)


def measure_lists(count: int) -> dict[str, int]:
    """Return how many files of a folder and members of a tar file are listed per CPU second.

    ``count`` is the number of files, and of members, to list.
    """
    from tests.support.commands.embed_jobs import find_files

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number in range(count):
            if number % 1000 == 0:
                (root / "photos" / f"{number:07d}").mkdir(parents=True)
            (root / "photos" / f"{number // 1000 * 1000:07d}" / f"{number:07d}.jpg").touch()
        with tarfile.open(root / "x.tar", "w") as file:
            for number in range(count):
                file.addfile(tarfile.TarInfo(f"{number:07d}.jpg"))
        return {
            "files of a folder": round(
                count / cpu_seconds(lambda: find_files(str(root / "photos")))
            ),
            "images of a tar file": round(
                count / cpu_seconds(lambda: find_files(str(root / "x.tar")))
            ),
        }


def measure_bytes(count: int) -> int:
    """Return the peak memory of listing ``count`` files of an embedding job, in bytes per file."""
    from vitgraph.embedding.manifest import write_list
    from vitgraph.embedding.sources.listing import Source
    from vitgraph.embedding.storage import open_storage

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as out:
        for number in range(count):
            (Path(folder) / f"{number:014d}.jpg").touch()
        tracemalloc.start()
        try:
            write_list(open_storage(out), Source(folder), items_per_shard=1000)
            return round(tracemalloc.get_traced_memory()[1] / count)
        finally:
            tracemalloc.stop()


# --- GPU ------------------------------------------------------------------------------------------


def measure_gpu(images: int, workers: int, repeats: int) -> dict[str, Any]:
    """Return the images per second of every tower and image size, with decoded images in memory."""
    from benchmarks.measuring.machine import describe_machine

    return {
        "about": describe_machine(),
        "cores": os.cpu_count(),
        "images": images,
        "workers": workers,
        "encoders": {name: identity(repo_id) for name, repo_id in TOWERS.items()},
        "towers": {name: dict(rates_of(name, images, workers, repeats)) for name in TOWERS},
    }


def measure_small_towers(
    images: int, workers: int, repeats: int, names: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rates of the towers of ``benchmarks/folders.py`` so far, after each of them.

    Args:
        images: the number of images of a tower with :data:`MOST_TOKENS` tokens per image. A tower
            with fewer tokens encodes an image faster, and gets as many more.
        workers: the number of threads that preprocess images.
        repeats: the number of timed runs.
        names: the towers to measure; None for all.
    """
    from benchmarks.folders import TOWERS as SMALL_TOWERS
    from benchmarks.measuring.machine import describe_machine

    body: dict[str, Any] = {
        "about": describe_machine(),
        "cores": os.cpu_count(),
        "images": images,
        "workers": workers,
        "encoders": {},
        "towers": {},
    }
    for name in names or SMALL_TOWERS:
        found = rate_of_small(name, images, workers, repeats)
        body["encoders"][name] = identity(SMALL_TOWERS[name].repo_id)
        body["towers"][name] = {"x".join(map(str, SMALL_SIZE)): found}
        yield body


def rate_of_small(
    name: str, images: int, workers: int, repeats: int, tiny: bool = False
) -> dict[str, float]:
    """Return the tokens per image and images per second of a tower of ``benchmarks/folders.py``."""
    from benchmarks.folders import write_checkpoint
    from graphwrap import GraphedEncoder

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), name, tiny)
        encoder = load_encoder(folder, dtype=torch.bfloat16, device=device, progress=False)
    assert isinstance(encoder, VisionEncoder)
    graphed = GraphedEncoder(encoder, outputs=("pooler_output",)).capture(progress=False)
    shown = [np.asarray(image) for image in cut_photographs([SMALL_SIZE] * 16)]
    (spec,) = encoder.item_specs(encoder.preprocess(shown[:1]).grid_thw)
    count = images * MOST_TOKENS // spec.output_tokens
    items = [shown[number % len(shown)] for number in range(count)]
    found = rate_of(graphed, encoder, items, workers, repeats)
    graphed.release()
    return found


def identity(repo_id: str) -> dict[str, Any]:
    """Return the class and width by which ``vitgraph embed --plan`` looks up a tower's speed."""
    encoder = without_weights(repo_id)
    return {"class": type(encoder).__name__, "features": encoder.num_features}


def rates_of(
    name: str, images: int, workers: int, repeats: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield, per image size, its name and the tokens per image and images per second of a tower."""
    from benchmarks.towers import TOWERS as PUBLISHED_TOWERS
    from graphwrap import GraphedEncoder

    encoder = PUBLISHED_TOWERS[name].build()
    graphed = GraphedEncoder(encoder, outputs=("pooler_output",)).capture(progress=False)
    for size, (width, height) in SIZES.items():
        # Larger images take the GPU longer, so fewer of them give as precise a measurement.
        count = max(images * 448 * 448 // (width * height), 256) if width > 448 else images
        shown = [np.asarray(image) for image in cut_photographs([(width, height)] * 16)]
        items = [shown[number % len(shown)] for number in range(count)]
        yield size, rate_of(graphed, encoder, items, workers, repeats)
    graphed.release()


def rate_of(
    graphed: Any, encoder: VisionEncoder, items: list[Any], workers: int, repeats: int
) -> dict[str, float]:
    """Time the encoding of ``items`` after a warm-up run; return tokens and images per second."""
    grid = encoder.preprocess([items[0]]).grid_thw
    found = rates({"ours": lambda part: ours(graphed, part, workers=workers)}, [items], repeats)
    return {
        "tokens": encoder.item_specs(grid)[0].output_tokens,
        "images per second": round(statistics.median(found["ours"]), 1),
    }
