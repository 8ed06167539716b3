"""Images per second from decoded images to shards of activations, over the tower's own rate.

    python -m benchmarks.activations --json benchmarks/results/activations_h100.json

Towers of published sizes with random weights in bfloat16, and photographs of seven sizes as
uncompressed files, which are read like decoded images. ``tower`` are back-to-back graph replays
with pixels on the GPU, without outputs of blocks, and ``with blocks`` the same with two of them.
``vitgraph embed`` writes these two at a sample of the patches of each image, or at all patches.
``disk`` is the rate at which the disk takes the bytes that the job writes, measured by a file of
its own: the job can be no faster than the slower of ``tower`` and ``disk``. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks import folders
from benchmarks.encode_many import MIXED, cut_batches, images_per_second, rates
from benchmarks.gate import Setup, build_reference, time_jobs
from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.towers import TOWERS as LANGUAGE_TOWERS
from encoders.base.vision_encoder import VisionEncoder
from encoders.inputs.intake import to_rgb
from graphwrap import GraphedEncoder
from vitgraph.timing import synchronize
from weights import load_encoder

TOWERS = {
    name: {**LANGUAGE_TOWERS, **folders.TOWERS}[name]
    for name in ("Qwen3-VL-2B", "DINOv3-L/16 at 512", "CLIP-L/14-336")
}
GOAL = 0.90
"""The images per second of the job over the smaller of tower and disk, at least."""


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one tower: replays without and with blocks, the disk, and the job."""
    setup = Setup(TOWERS[name], options)
    files = setup.files([MIXED[number % len(MIXED)] for number in range(options.items)])
    arrays = [to_rgb(data).permute(1, 2, 0).numpy() for data in files]
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        checkpoint, photos = Path(place) / "tower", Path(place) / "photos"
        if name in folders.TOWERS:
            folders.write_checkpoint(checkpoint, name, setup.tiny)
        else:
            build_reference(setup).save_pretrained(checkpoint)
        photos.mkdir()
        for number, array in enumerate(arrays):
            Image.fromarray(array).save(photos / f"{number:05d}.bmp")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        encoder = load_encoder(checkpoint, dtype=torch.bfloat16, device=device, progress=False)
        assert isinstance(encoder, VisionEncoder)
        depth = len(encoder.blocks)
        fields = [f"blocks.{depth // 3}", f"blocks.{2 * depth // 3}"]
        found = replays(encoder, arrays, fields, setup, options)
        written = ["--pool", "none", "--fields", ",".join(fields), "--out-dtype", "float16"]
        written += ["--sample", str(options.sample)] if options.sample else []
        seconds = time_jobs(checkpoint, photos, Path(place), options, written)
        found["vitgraph embed"] = [len(files) / one for one in seconds]
        size = sum(path.stat().st_size for path in (Path(place) / "out0").glob("*.npy"))
        speed = bytes_per_second(Path(place), setup.tiny)
    shown = images_per_second(found)
    rate = shown["images per second"]
    disk = speed / (size / len(files))
    ratio = rate["vitgraph embed"] / min(rate["tower"], disk)
    return {
        "tower": name,
        "items": len(files),
        "fields": fields,
        "sample": options.sample,
        "bytes per image": round(size / len(files)),
        "disk, MB per second": round(speed / 1e6, 1),
        **shown,
        "disk": round(disk, 1),
        "over the slower": round(ratio, 3),
        "goal": GOAL,
    }


def replays(
    encoder: VisionEncoder,
    arrays: Sequence[Any],
    fields: Sequence[str],
    setup: Setup,
    options: argparse.Namespace,
) -> dict[str, list[float]]:
    """Return images per second of replays with pixels on the device, without and with blocks."""
    batches = cut_batches(encoder, arrays, options.batch_tokens)
    rows = [sum(spec.input_size for spec in encoder.item_specs(grids)) for grids in batches]
    pixels = torch.randn((max(rows), *encoder.row_shape), device=encoder.device)
    pixels = pixels.to(encoder.dtype)
    runs: dict[str, Callable[[Any], None]] = {}
    for name, outputs in (("tower", ("pooler_output",)), ("with blocks", (*fields,))):
        if setup.tiny:
            graphed = GraphedEncoder(encoder, [256, 1024], outputs=outputs, backend="static")
        else:
            graphed = GraphedEncoder(encoder, outputs=outputs).capture(progress=False)

        def run(_: object, graphed: GraphedEncoder[VisionEncoder] = graphed) -> None:
            for grids, count in zip(batches, rows, strict=True):
                graphed(pixels[:count], grids)
            synchronize()

        runs[name] = run
    return rates(runs, [range(len(arrays))], options.repeats)


def bytes_per_second(folder: Path, tiny: bool) -> float:
    """Return the rate at which the disk of a folder takes a file of 2 GiB (a MiB for a test)."""
    block, count = os.urandom(1 << 20), 1 if tiny else 2048
    path = folder / "disk"
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return count * len(block) / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the towers that the command line names, and write the file after each tower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--towers", nargs="+", default=list(TOWERS), choices=tuple(TOWERS))
    parser.add_argument("--items", type=int, default=2048, help="photographs in the folder")
    parser.add_argument("--sample", type=int, help="patches of each image; by default all")
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes over the folder")
    parser.add_argument("--workers", type=int, default=16, help="threads that read images")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="tokens per batch")
    parser.add_argument("--tiny", action="store_true", help="small towers and files, for a test")
    options = parser.parse_args(arguments)
    body: dict[str, Any] = {"about": about(options.repeats), "towers": []}
    for name in options.towers:
        body["towers"].append(measure(name, options))
        print(json.dumps(body["towers"][-1]), flush=True)
        if options.json is not None:
            write_results(options.json, body)


if __name__ == "__main__":
    main()
