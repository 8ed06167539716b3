"""Images per second from decoded images to shards of activations, over the tower's own rate.

    python -m benchmarks.activations --json benchmarks/results/activations_h100.json

Towers of published sizes with random weights in bfloat16, and photographs of seven sizes as
decoded uint8 arrays in memory. ``tower`` are back-to-back graph replays with pixels on the GPU,
without outputs of blocks, and ``with blocks`` the same with two of them; ``stream`` is
``embed_many`` over the arrays, without outputs of blocks and without shards. ``vitgraph embed``
writes the two blocks, at a sample of the patches of each image and, of a quarter of the images, at
all patches. Its graphs are captured before it begins, with the times of those without blocks, and
one run comes before the timed ones.

The job lists a folder of empty files, and takes the array of a file's name where it would read and
decode the file. These two are left out; the manifest, keys, shards and their tables are those of
any job.

``whole`` counts from the first image to the last byte on the disk, ``steady`` from the end of the
first shard to that of the last, and ``start`` are the seconds between the two: the first batches,
and the flush of the last shard, which a job has once. ``disk`` is the rate at which the disk takes
the bytes that the job writes, measured by files of its own. ``eager`` is the share of images that
packing ran without a graph, and ``seconds`` are those that the parts of this command took. The goal
is for ``steady`` over the slower of ``tower`` and ``disk``. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import folders
from benchmarks.encode_many import MIXED, cut_batches, images_per_second, ours, rates
from benchmarks.gate import Setup, build_reference, time_jobs
from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.towers import TOWERS as LANGUAGE_TOWERS
from benchmarks.traffic.photographs import cut_photographs
from encoders.base.vision_encoder import VisionEncoder
from graphwrap import GraphedEncoder
from vitgraph.commands import embed
from vitgraph.embedding.activations import outputs_of
from vitgraph.embedding.parquet_files import Array
from vitgraph.embedding.shard_writer import WRITTEN_AT_ONCE
from vitgraph.embedding.sources.reading import ImageReader
from vitgraph.timing import synchronize
from weights import load_encoder

TOWERS = {
    name: {**LANGUAGE_TOWERS, **folders.TOWERS}[name]
    for name in ("Qwen3-VL-2B", "DINOv3-L/16 at 512", "CLIP-L/14-336")
}
GOAL = 0.90
"""The images per second (``steady``) of the job over the smaller of tower and disk, at least."""
DISTINCT = 256
"""The most photographs that are drawn; further images are the same arrays."""


def draw_photographs(folder: Path, items: int, tiny: bool) -> dict[str, Array]:
    """Return decoded photographs by the name of a file in ``folder``, which is made and is empty.

    For a test they are sixteen times smaller.
    """
    shrink, distinct = (16 if tiny else 1), min(items, DISTINCT)
    sizes = [MIXED[number % len(MIXED)] for number in range(distinct)]
    small = [(max(w // shrink, 16), max(h // shrink, 16)) for w, h in sizes]
    arrays = [np.asarray(image) for image in cut_photographs(small)]
    photos = {f"{number:05d}.png": arrays[number % distinct] for number in range(items)}
    folder.mkdir()
    for name in photos:
        (folder / name).touch()
    return photos


def measure(
    name: str, options: argparse.Namespace, folder: Path, photos: Mapping[str, Array]
) -> dict[str, Any]:
    """Measure one tower: replays without and with blocks, the stream, the disk, and the jobs.

    ``photos`` are the decoded images of the files in ``folder``.
    """
    setup, clock = Setup(TOWERS[name], options), [time.perf_counter()]
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
        clock.append(time.perf_counter())
        depth = len(encoder.blocks)
        fields = [f"blocks.{depth // 3}", f"blocks.{2 * depth // 3}"]
        graphed, found = replays(encoder, fields, options, [*photos.values()])
        clock.append(time.perf_counter())
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
            graphed.reset_stats()
            with in_place_of_files(graphed, photos):
                job = measure_job((checkpoint, folder, out), options, written, limit)
            job["eager"] = graphed.stats().eager_items / (limit * (options.repeats + 1))
            job["disk"] = speed / job["bytes per image"]
            slower = min(rate["tower"], job["disk"])
            ratios = {f"{part} over the slower": job[part] / slower for part in ("whole", "steady")}
            jobs[kind] = {**job, **ratios}
        graphed.release()
    clock.append(time.perf_counter())
    parts = zip(("load", "capture and replays", "disk and jobs"), pairwise(clock), strict=True)
    return {
        "tower": name,
        "items": options.items,
        "fields": fields,
        "disk, MB per second": speed / 1e6,
        "images per second": rate,
        "jobs": jobs,
        "goal": GOAL,
        "seconds": {part: round(end - began, 1) for part, (began, end) in parts},
    }


@contextmanager
def in_place_of_files(
    graphed: GraphedEncoder[VisionEncoder], photos: Mapping[str, Array]
) -> Iterator[None]:
    """Give jobs graphs that are captured already, and decoded images by the names of files."""
    load, item = embed._load, ImageReader.item
    embed._load = lambda command, commit: graphed
    ImageReader.item = lambda reader, file: photos[file.key]  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        embed._load, ImageReader.item = load, item  # type: ignore[method-assign]


def measure_job(
    places: tuple[Path, Path, Path],
    options: argparse.Namespace,
    written: Sequence[str],
    items: int,
) -> dict[str, Any]:
    """Return images per second of ``vitgraph embed``.

    ``places`` are the folders of the checkpoint, of the photographs and of the jobs, the last of
    which is removed.
    """
    checkpoint, photos, out = places
    _, *times = time_jobs(checkpoint, photos, out, options, options.repeats + 1, written)
    seconds = statistics.median(one.seconds for one in times)
    jobs = [out / f"out{number}" for number in range(1, options.repeats + 1)]
    steady = statistics.median(map(steady_rate, jobs))
    size = sum(path.stat().st_size for path in jobs[0].glob("*.npy"))
    shutil.rmtree(out)
    return {
        "images": items,
        "bytes per image": round(size / items),
        "whole": items / seconds,
        "steady": steady,
        "start, seconds": seconds - items / steady,
    }


def steady_rate(job: Path) -> float:
    """Return images per second between the end of the first shard of a job and that of its last."""
    ends = sorted((path.stat().st_mtime, path) for path in job.glob("*_stats.json"))
    items = sum(json.loads(path.read_text())["items"] for _, path in ends[1:])
    return items / max(ends[-1][0] - ends[0][0], 1e-9)


def replays(
    encoder: VisionEncoder,
    fields: Sequence[str],
    options: argparse.Namespace,
    photos: Sequence[Array],
) -> tuple[GraphedEncoder[VisionEncoder], dict[str, list[float]]]:
    """Return graphs that give blocks, and images per second of replays and of the stream.

    The replays have their pixels on the device. ``tower`` are those without blocks.
    """
    part = photos[: max(len(photos) // 2, 1)]
    batches = cut_batches(encoder, part, options.batch_tokens)
    rows = [sum(spec.input_size for spec in encoder.item_specs(grids)) for grids in batches]
    pixels = torch.randn((max(rows), *encoder.row_shape), device=encoder.device)
    pixels = pixels.to(encoder.dtype)
    tower = graphs_of(encoder, ("pooler_output",), options.tiny)
    graphed = graphs_of(encoder, outputs_of(encoder.paths, fields), options.tiny)
    tower.capture(progress=False)
    if tower.backend == "cudagraph":  # others measure no times
        take_times(graphed, tower)
    graphed.capture(progress=False)

    def replay(graphed: GraphedEncoder[VisionEncoder], _: object) -> None:
        for grids, count in zip(batches, rows, strict=True):
            graphed(pixels[:count], grids)
        synchronize()

    def stream(_: object) -> None:
        settings = {"batch_tokens": options.batch_tokens, "workers": options.workers}
        ours(tower, part, pool="mean", **settings)

    runs: dict[str, Callable[[Any], None]] = {
        "tower": partial(replay, tower),
        "with blocks": partial(replay, graphed),
        "stream": stream,
    }
    found = rates(runs, [part], options.repeats)
    tower.release()
    return graphed, found


def graphs_of(
    encoder: VisionEncoder, outputs: Sequence[str], tiny: bool
) -> GraphedEncoder[VisionEncoder]:
    """Return graphs of an encoder, not captured yet, that give some outputs."""
    if tiny:
        return GraphedEncoder(encoder, [256, 1024], outputs=outputs, backend="static")
    return GraphedEncoder(encoder, outputs=outputs)


def take_times(
    graphed: GraphedEncoder[VisionEncoder], other: GraphedEncoder[VisionEncoder]
) -> None:
    """Have graphs that are not captured yet use the times of others that give other outputs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.json"
        other.save_table(path)
        table = json.loads(path.read_text())
        for of_path in table.values():
            made_on = of_path["fingerprint"]
            kept = set(made_on["outputs"].split()).difference(other.outputs)
            made_on["outputs"] = " ".join(sorted(kept.union(graphed.outputs)))
        path.write_text(json.dumps(table))
        graphed.load_table(path)


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
    parser.add_argument("--items", type=int, default=1024, help="images of the job")
    parser.add_argument("--sample", type=int, default=64, help="patches of each image in a sample")
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--repeats", type=int, default=1, help="timed passes over the images")
    parser.add_argument("--workers", type=int, default=16, help="threads that prepare images")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per batch")
    parser.add_argument("--tiny", action="store_true", help="small towers and files, for a test")
    options = parser.parse_args(arguments)
    body: dict[str, Any] = {"about": about(options.repeats), "towers": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        files = Path(folder) / "photos"
        photos = draw_photographs(files, options.items, options.tiny)
        for name in options.towers:
            body["towers"].append(measure(name, options, files, photos))
            print(json.dumps(body["towers"][-1]), flush=True)
            if options.json is not None:
                write_results(options.json, body)


if __name__ == "__main__":
    main()
