"""Images per second of ``vitgraph embed`` over a folder of JPEG files, beside other libraries.

    python -m benchmarks.folders --json benchmarks/results/folders_h100.json
    python -m benchmarks.folders --repeats 1 --items 2048 --peer-items 1024 --seconds 200 --json ...
    python -m benchmarks.folders --table benchmarks/results/folders_h100.json

Small towers of published sizes with random weights in bfloat16, and photographs of seven sizes.
``replays`` are back-to-back replays of the job's graphs with pixels on the GPU, and ``decoding``
decodes the same files in as many threads: the job can be no faster than the slower of them. timm
and open_clip run their tower eagerly (with ``--compile`` compiled) behind a DataLoader with as many
workers and their own transform. ``sentence_transformers`` is its ``encode`` of transformers'
processor and tower, on the main thread and in batches of 32, and on the first files only
(``benchmarks/folder_peers.py``). Building a tower, capturing its graphs and starting the workers
come before the time begins, and so does a run on the first files. ``--peers`` names the libraries
to run, and ``--peer-items`` the files that each gets. Figures are medians of repeats. A library
that is not installed is left out, and so is one that fails, whose error is printed. A second ratio
of the job (``steady``) leaves out its start and end, which take as long for any number of files.
``seconds`` are those that the parts of this command took. The file is written after the job of a
tower and after each library; after ``--seconds`` nothing more begins. The second command above is
the shortest that has all towers and libraries.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from benchmarks.encode_many import MIXED, cut_batches, images_per_second, rates
from benchmarks.folder_peers import AT_ONCE, LABELS, Run, Task, batch_of, find_peers
from benchmarks.gate import JOB, STEADY, Setup, compare_times, decode_in_threads, time_jobs
from benchmarks.image_towers import TINY_SIDE, is_late
from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown
from benchmarks.speed.measure import empty_cache
from benchmarks.towers import Tower
from encoders.base.vision_encoder import VisionEncoder
from encoders.inputs.intake import to_rgb
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME
from tests.oracles.configs import edited
from vitgraph.timing import synchronize
from weights import load_encoder
from weights.published import family_facts

TOWERS = {
    tower.name: tower
    for tower in (
        Tower("CLIP-L/14-336", "clip", "openai/clip-vit-large-patch14-336"),
        Tower("SigLIP2-B/16", "siglip", "google/siglip2-base-patch16-224"),
        Tower("SigLIP2-so400m-384", "siglip", "google/siglip2-so400m-patch14-384"),
        Tower("DINOv3-L/16 at 512", "dinov3", "facebook/dinov3-vitl16-pretrain-lvd1689m"),
    )
}
SIDES = {"DINOv3-L/16 at 512": 512}
"""The sides of images in pixels that differ from those of the checkpoint's processor."""
DISTINCT = 490
"""The number of different files in the folder, which come again in turn."""
FIRST = 256
"""The number of files that a library without threads gets, and that begin a job untimed."""
BESIDE = (
    "timm and open_clip run their towers eagerly behind a DataLoader with as many workers as the "
    "job has threads; sentence-transformers decodes on its main thread"
)
"""How the other libraries of the table run."""
GOAL = 0.90
"""The images per second of the job over the smaller of replays and decoding, at least."""


class Clock:
    """The seconds that the parts of a measurement took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def note(self, part: str) -> None:
        """Note the end of a part, which began when the part before it ended."""
        now = time.perf_counter()
        self.seconds[part], self._began = round(now - self._began, 1), now


def write_photographs(folder: Path, options: argparse.Namespace) -> list[Path]:
    """Write the files of the folder, in seven sizes, and return their paths in order."""
    setup = Setup(TOWERS[options.towers[0]], options)
    count = min(options.items, DISTINCT)
    files = setup.files([MIXED[number % len(MIXED)] for number in range(count)])
    paths = [folder / f"{number:05d}.jpg" for number in range(options.items)]
    for number, path in enumerate(paths):
        path.write_bytes(files[number % count])
    return paths


def measure(
    name: str, paths: Sequence[Path], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure one tower, and yield its row after the job and after each of the other libraries."""
    setup, clock = Setup(TOWERS[name], options), Clock()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tower"
        write_checkpoint(checkpoint, name, options.tiny)
        encoder = load_encoder(checkpoint, dtype=torch.bfloat16, device=device, progress=False)
        assert isinstance(encoder, VisionEncoder)
        setup.encoder = encoder
        clock.note("tower")
        found = measure_limits(setup, paths, options, clock)
        empty_cache()  # the job captures graphs of its own
        photos = paths[0].parent
        count, first = options.repeats, paths[:FIRST]
        jobs = time_jobs(checkpoint, photos, Path(folder), options, count, first=first)
        clock.note(JOB)
        job = compare_times(len(paths), {JOB: jobs})
        yield row_of(name, job, found, clock)
        task = Task(name, checkpoint, paths, SIDES.get(name), setup, options)
        for peer, opened in find_peers(task):
            if not is_late(options, f"{name}, {peer}"):
                found |= measure_peer(name, peer, opened, paths, options)
                clock.note(peer)
                yield row_of(name, job, found, clock)
                empty_cache()


def measure_peer(
    name: str,
    peer: str,
    opened: AbstractContextManager[Run],
    paths: Sequence[Path],
    options: argparse.Namespace,
) -> dict[str, list[float]]:
    """Return the images per second of another library by its label; nothing if it fails."""
    slow = peer == LABELS["sentence_transformers"]
    some = paths[: FIRST if slow else options.peer_items]
    try:
        with opened as run:
            run(some[: AT_ONCE if slow else FIRST])
            return {peer: rates_of(run, some, options.repeats)}
    except Exception as error:  # noqa: BLE001  # any of another library: the rest is still measured
        print(f"{name}, {peer}: left out, {type(error).__name__}: {error}", flush=True)
        return {}


def rates_of(run: Run, paths: Sequence[Path], repeats: int) -> list[float]:
    """Return the images per second of each repeat."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run(paths)
        found.append(len(paths) / (time.perf_counter() - began))
    return found


def row_of(
    name: str, job: dict[str, Any], found: dict[str, list[float]], clock: Clock
) -> dict[str, Any]:
    """Return the row of a tower from its job and the images per second of all repeats so far."""
    measured = images_per_second(found)
    rate = measured["images per second"] | job["images per second"]
    slower = min(rate["replays"], rate["decoding"])
    return {
        "tower": name,
        **job,
        "images per second": rate,
        "range": measured["range"] | job["range"],
        "over the slower": rate[JOB] / slower,
        "steady over the slower": job[STEADY][JOB] / slower,
        "goal": GOAL,
        "seconds": dict(clock.seconds),
    }


def measure_limits(
    setup: Setup, paths: Sequence[Path], options: argparse.Namespace, clock: Clock
) -> dict[str, list[float]]:
    """Return images per second of replays and of decoding, which take turns."""
    encoder, graphed = setup.encoder, capture(setup)
    clock.note("capture")
    sizes = [to_rgb(path).permute(1, 2, 0).numpy() for path in paths[: len(MIXED)]]
    first = range(min(FIRST, len(paths)))
    parts = [first, *([range(FIRST, len(paths))] if len(paths) > FIRST else [])]
    batches = {
        part: cut_batches(encoder, [sizes[n % len(sizes)] for n in part], options.batch_tokens)
        for part in parts
    }
    specs = [encoder.item_specs(grids) for found in batches.values() for grids in found]
    most = max(sum(spec.input_size for spec in items) for items in specs)
    pixels = torch.randn((most, *encoder.row_shape), device=encoder.device).to(encoder.dtype)

    def replay(part: range) -> None:
        for grids in batches[part]:
            rows = sum(spec.input_size for spec in encoder.item_specs(grids))
            graphed(pixels[:rows], grids)
        synchronize()

    def decode(part: range) -> None:
        decode_in_threads(paths[part.start : part.stop], "cpu", options.workers, 1)

    found = rates({"replays": replay, "decoding": decode}, parts, options.repeats)
    graphed.release()
    clock.note("replays and decoding")
    return found


def capture(setup: Setup) -> GraphedEncoder[VisionEncoder]:
    """Return the graphs that the job captures, which keeps their times for it."""
    if setup.tiny:
        return setup.graphed
    return GraphedEncoder(setup.encoder, outputs=("pooler_output",)).capture(progress=False)


def write_checkpoint(folder: Path, name: str, tiny: bool) -> None:
    """Write a tower with random weights in its published layout.

    Its processor file is written where the size of images is not that of the tower's facts.
    """
    tower = TOWERS[name]
    family = BY_NAME[tower.family]
    config: Any = edited(dict(tower.config), **family.tiny) if tiny else tower.config
    section = config.get("vision_config", config)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # drawn faster there
        theirs = AutoModel.from_config(AutoConfig.for_model(**section)).bfloat16()
    theirs.save_pretrained(folder)
    if name in SIDES:
        (processor,) = family_facts(tower.family).processors.values()
        side = TINY_SIDE if tiny else SIDES[name]
        settings = {**processor["preprocessor_config"], "size": {"height": side, "width": side}}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def table(body: Mapping[str, Any]) -> str:
    """Return the images per second of each tower as a Markdown table, with its caption."""
    peers = [
        label
        for label in LABELS.values()
        if any(label in row["images per second"] for row in body["towers"])
    ]
    columns = ("replays", "decoding", JOB, *peers)
    rows = [
        (
            row["tower"],
            *(shown(row["images per second"].get(column)) for column in columns),
            f"{row['over the slower']:.2f}",
        )
        for row in body["towers"]
    ]
    machine = body["about"]
    items = max(row["items"] for row in body["towers"])
    head = ("tower", "replays alone", "decoding alone", f"`{JOB}`", *peers, "of the slower")
    caption = (
        f"Images per second of `{JOB}` from {items:,} JPEG files of seven sizes, {machine['gpu']}, "
        f"torch {machine['torch']}, and its part of the slower of replays and decoding alone"
    )
    beside = f". {BESIDE}{idle(machine.get('loaders'))}:" if peers else ":"
    return f"{caption}{beside}\n\n{markdown(head, rows)}"


def idle(loaders: Mapping[str, int] | None) -> str:
    """Return that some workers of the DataLoaders had no batch, and what this means; else ""."""
    if loaders is None or (busy := loaders["files"] // loaders["batch"]) >= loaders["workers"]:
        return ""
    files, workers = loaders["files"], loaders["workers"]
    return (
        f". Their {files} files were work for {busy} of the {workers} workers of a DataLoader: "
        "with work for all, timm and open_clip would be faster"
    )


def shown(rate: float | None) -> str:
    """Return images per second as text; a dash if they were not measured."""
    return "-" if rate is None else f"{rate:,.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the towers that the command line names, and write the file after each tower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--towers", nargs="+", default=list(TOWERS), choices=tuple(TOWERS))
    parser.add_argument("--items", type=int, default=8192, help="files in the folder")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes over the folder")
    parser.add_argument("--workers", type=int, default=16, help="threads and processes that decode")
    parser.add_argument("--batch", type=int, default=128, help="images per batch of a DataLoader")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per batch")
    parser.add_argument("--peer-items", type=int, help="files of a library; None for all")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin nothing after these"
    )
    parser.add_argument("--peers", nargs="*", default=list(LABELS), choices=tuple(LABELS))
    parser.add_argument(
        "--most-peers",
        type=int,
        default=len(LABELS),
        help="most libraries per tower; the first that have it, in the order of --peers",
    )
    parser.add_argument("--compile", action="store_true", help="compile timm's and open_clip's")
    parser.add_argument("--tiny", action="store_true", help="small towers and files, for a test")
    parser.add_argument("--table", type=Path, help="print the table of a results file")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    options.end = time.perf_counter() + options.seconds
    files = min(options.items, options.peer_items or options.items)
    loaders = {"files": files, "batch": batch_of(options, files), "workers": options.workers}
    body: dict[str, Any] = {"about": {**about(options.repeats), "loaders": loaders}, "towers": []}
    with tempfile.TemporaryDirectory() as photos:
        paths = write_photographs(Path(photos), options)
        for name in options.towers:
            if is_late(options, name):
                continue
            body["towers"].append({})
            for row in measure(name, paths, options):
                body["towers"][-1] = row
                print(json.dumps(row), flush=True)
                if options.json is not None:
                    write_results(options.json, body)


if __name__ == "__main__":
    main()
