"""Images per second from decoded images to shards of activations, over the tower's own rate.

    python -m benchmarks.activations --json benchmarks/results/activations_h100.json

Towers of published sizes with random weights in bfloat16, and photographs of seven sizes as
uncompressed files, which are read like decoded images. ``tower`` are back-to-back graph replays
with pixels on the GPU, without outputs of blocks, and ``with blocks`` the same with two of them;
``reading`` reads the files in as many threads as the job. ``vitgraph embed`` writes the two blocks,
at a sample of the patches of each image and, of a quarter of the images, at all patches. Its graphs
are captured before it begins, and one run comes before the timed ones.

``whole`` counts from the first read to the last byte on the disk, ``steady`` from the end of the
first shard to that of the last. ``disk`` is the rate at which the disk takes the bytes that the job
writes, measured by files of its own: the job can be no faster than the slower of ``tower`` and
``disk``, and the ratios are to that one. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import folders
from benchmarks.encode_many import MIXED, cut_batches, images_per_second, rates
from benchmarks.gate import Setup, build_reference, decode_in_threads, time_jobs
from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.towers import TOWERS as LANGUAGE_TOWERS
from benchmarks.traffic.photographs import cut_photographs
from encoders.base.vision_encoder import VisionEncoder
from encoders.inputs.intake import to_rgb
from graphwrap import GraphedEncoder
from vitgraph.commands import embed
from vitgraph.embedding.activations import outputs_of
from vitgraph.embedding.shard import WRITTEN_AT_ONCE
from vitgraph.timing import synchronize
from weights import load_encoder

TOWERS = {
    name: {**LANGUAGE_TOWERS, **folders.TOWERS}[name]
    for name in ("Qwen3-VL-2B", "DINOv3-L/16 at 512", "CLIP-L/14-336")
}
GOAL = 0.90
"""The images per second of the job over the smaller of tower and disk, at least."""
DISTINCT = 256
"""The most photographs that are drawn; the others are links to them."""


def write_photographs(folder: Path, items: int, tiny: bool) -> None:
    """Write photographs as uncompressed files, sixteen times smaller for a test."""
    shrink, distinct = (16 if tiny else 1), min(items, DISTINCT)
    sizes = [MIXED[number % len(MIXED)] for number in range(distinct)]
    small = [(max(w // shrink, 16), max(h // shrink, 16)) for w, h in sizes]
    folder.mkdir()
    for number, image in enumerate(cut_photographs(small)):
        image.save(folder / f"{number:05d}.bmp")
    for number in range(distinct, items):
        os.link(folder / f"{number % distinct:05d}.bmp", folder / f"{number:05d}.bmp")


def measure(name: str, options: argparse.Namespace, photos: Path) -> dict[str, Any]:
    """Measure one tower: reading, replays without and with blocks, the disk, and the jobs."""
    setup = Setup(TOWERS[name], options)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        checkpoint = Path(place) / "tower"
        if name in folders.TOWERS:
            folders.write_checkpoint(checkpoint, name, setup.tiny)
        else:
            build_reference(setup).save_pretrained(checkpoint)
        del setup
        device = "cuda" if torch.cuda.is_available() else "cpu"
        encoder = load_encoder(checkpoint, dtype=torch.bfloat16, device=device, progress=False)
        assert isinstance(encoder, VisionEncoder)
        depth = len(encoder.blocks)
        fields = [f"blocks.{depth // 3}", f"blocks.{2 * depth // 3}"]
        graphed, found = replays(encoder, fields, options, photos)
        speed = bytes_per_second(Path(place), options.tiny)
        rate: dict[str, Any] = images_per_second(found)["images per second"]
        jobs = {}
        for kind, sample, limit in (
            (f"sample of {options.sample}", options.sample, options.items),
            ("all patches", None, -(-options.items // 4)),
        ):
            written = ["--pool", "none", "--fields", ",".join(fields), "--out-dtype", "float16"]
            written += ["--limit", str(limit), *(["--sample", str(sample)] if sample else [])]
            written += ["--shard-items", "1"] if options.tiny else []
            out = Path(place) / "out"
            job = measure_job(graphed, (checkpoint, photos, out), options, written, limit)
            job["disk"] = speed / job["bytes per image"]
            slower = min(rate["tower"], job["disk"])
            ratios = {f"{part} over the slower": job[part] / slower for part in ("whole", "steady")}
            jobs[kind] = {**job, **ratios}
        graphed.release()
    return {
        "tower": name,
        "items": options.items,
        "fields": fields,
        "disk, MB per second": speed / 1e6,
        "images per second": rate,
        "jobs": jobs,
        "goal": GOAL,
    }


def measure_job(
    graphed: GraphedEncoder[VisionEncoder],
    places: tuple[Path, Path, Path],
    options: argparse.Namespace,
    written: Sequence[str],
    items: int,
) -> dict[str, Any]:
    """Return images per second of ``vitgraph embed`` with graphs that are captured already.

    ``places`` are the folders of the checkpoint, of the photographs and of the jobs, the last of
    which is removed.
    """
    load, (checkpoint, photos, out) = embed._load, places
    embed._load = lambda command, commit: graphed
    try:
        seconds = time_jobs(checkpoint, photos, out, options, written)
    finally:
        embed._load = load
    steady = [steady_rate(out / f"out{number}") for number in range(1, options.repeats + 1)]
    size = sum(path.stat().st_size for path in (out / "out1").glob("*.npy"))
    shutil.rmtree(out)
    return {
        "images": items,
        "bytes per image": round(size / items),
        "whole": items / statistics.median(seconds),
        "steady": statistics.median(steady),
    }


def steady_rate(job: Path) -> float:
    """Return images per second between the end of the first shard of a job and that of its last."""
    stats = [json.loads(path.read_text()) for path in sorted(job.glob("*_stats.json"))]
    times = [shard["written"] for shard in stats]
    items = sum(shard["items"] for shard in stats[1:])
    return items / max(times[-1] - times[0], 1e-9)


def replays(
    encoder: VisionEncoder, fields: Sequence[str], options: argparse.Namespace, photos: Path
) -> tuple[GraphedEncoder[VisionEncoder], dict[str, list[float]]]:
    """Return graphs that give blocks, and images per second of reading and of replays.

    The replays have their pixels on the device; ``tower`` are those without blocks.
    """
    paths = sorted(photos.iterdir())
    arrays = [to_rgb(path).permute(1, 2, 0).numpy() for path in paths[: len(MIXED)]]
    some = [arrays[number % DISTINCT % len(arrays)] for number in range(len(paths))]
    batches = cut_batches(encoder, some, options.batch_tokens)
    rows = [sum(spec.input_size for spec in encoder.item_specs(grids)) for grids in batches]
    pixels = torch.randn((max(rows), *encoder.row_shape), device=encoder.device)
    pixels = pixels.to(encoder.dtype)
    captured = {
        name: capture(encoder, outputs, options.tiny)
        for name, outputs in (
            ("tower", ("pooler_output",)),
            ("with blocks", outputs_of(encoder.paths, fields)),
        )
    }

    def replay(graphed: GraphedEncoder[VisionEncoder]) -> Callable[[object], None]:
        def run(_: object) -> None:
            for grids, count in zip(batches, rows, strict=True):
                graphed(pixels[:count], grids)
            synchronize()

        return run

    runs: dict[str, Callable[[Any], None]] = {
        "reading": lambda part: decode_in_threads(part, "cpu", options.workers, None),
        **{name: replay(graphed) for name, graphed in captured.items()},
    }
    found = rates(runs, [paths], options.repeats)
    captured["tower"].release()
    return captured["with blocks"], found


def capture(
    encoder: VisionEncoder, outputs: Sequence[str], tiny: bool
) -> GraphedEncoder[VisionEncoder]:
    """Return graphs of an encoder that give some outputs."""
    if tiny:
        return GraphedEncoder(encoder, [256, 1024], outputs=outputs, backend="static")
    return GraphedEncoder(encoder, outputs=outputs).capture(progress=False)


def bytes_per_second(folder: Path, tiny: bool) -> float:
    """Return the rate at which the disk of a folder takes files of 2 GiB in all (4 MiB for a test).

    As many files are written at once as the job writes of a shard.
    """
    block, count = os.urandom(1 << 20), 1 if tiny else 2048 // WRITTEN_AT_ONCE

    def write(path: Path) -> None:
        with path.open("wb") as file:
            for _ in range(count):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    paths = [folder / f"disk{number}" for number in range(WRITTEN_AT_ONCE)]
    began = time.perf_counter()
    with ThreadPoolExecutor(WRITTEN_AT_ONCE) as pool:
        for _ in pool.map(write, paths):
            pass
    seconds = time.perf_counter() - began
    for path in paths:
        path.unlink()
    return WRITTEN_AT_ONCE * count * len(block) / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the towers that the command line names, and write the file after each tower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--towers", nargs="+", default=list(TOWERS), choices=tuple(TOWERS))
    parser.add_argument("--items", type=int, default=2048, help="photographs in the folder")
    parser.add_argument("--sample", type=int, default=64, help="patches of each image in a sample")
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--repeats", type=int, default=1, help="timed passes over the folder")
    parser.add_argument("--workers", type=int, default=16, help="threads that read images")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="tokens per batch")
    parser.add_argument("--tiny", action="store_true", help="small towers and files, for a test")
    options = parser.parse_args(arguments)
    body: dict[str, Any] = {"about": about(options.repeats), "towers": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        photos = Path(folder) / "photos"
        write_photographs(photos, options.items, options.tiny)
        for name in options.towers:
            body["towers"].append(measure(name, options, photos))
            print(json.dumps(body["towers"][-1]), flush=True)
            if options.json is not None:
                write_results(options.json, body)


if __name__ == "__main__":
    main()
