"""Decoders of JPEG files: images per second by threads, and how far nvImageCodec is from PIL.

    python -m benchmarks.decoders cpu --threads 1 16
    python -m benchmarks.decoders gpu --json benchmarks/results/decoders_h200.json

Each command prints JSON, and ``--json`` writes it. Files are resized crops of the photographs of
scikit-learn and matplotlib.

- ``cpu``: images per second of ``open_image`` and an array of its pixels (PIL) and of what encoders
  decode with (simplejpeg, if it is installed), per size and number of threads, in turn.
- ``gpu``: the largest and the mean difference in levels of pixels decoded by nvImageCodec from
  PIL's, in one call for all photographs as encoders make it; the relative L2 differences of the
  features that a tower with random weights in float32 makes of both, per photograph; images per
  second of threads that share the decoder and give it 16 files per call; and the device memory that
  the decoder takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch

from benchmarks.measuring.results import write_results
from benchmarks.traffic.photographs import cut_photographs
from encoders.base.vision_encoder import VisionEncoder
from encoders.inputs.gpu_decoding import (
    MOST_FILES,
    DeviceImage,
    GpuDecoder,
    decoder_of,
    decoding_by,
)
from encoders.inputs.image_files import open_image
from encoders.inputs.intake import read_images, to_rgb

SIZES = ((640, 480), (1024, 768), (4032, 3024))


def jpegs(sizes: Sequence[tuple[int, int]], quality: int = 90) -> list[bytes]:
    """Return photographs of these sizes as JPEG files."""
    files = []
    for image in cut_photographs(sizes):
        image.save(file := BytesIO(), "JPEG", quality=quality)
        files.append(file.getvalue())
    return files


def by_pil(data: bytes) -> object:
    """Decode a file with PIL, and copy its pixels to an array."""
    return np.asarray(open_image(data).convert("RGB"))


def rate(decode: Callable[[bytes], object], data: bytes, threads: int, seconds: float) -> float:
    """Return how many times per second ``threads`` threads decode a file."""
    end = time.perf_counter() + seconds

    def work(_: int) -> int:
        count = 0
        while time.perf_counter() < end:
            decode(data)
            count += 1
        return count

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(work, range(threads)))
    return total / (time.perf_counter() - began)


def measure_rates(
    decoders: dict[str, Callable[[bytes], object]],
    sizes: Sequence[tuple[int, int]],
    threads: Sequence[int],
    seconds: float,
    files: int = 1,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return images per second by size, threads and decoder: medians of three turns.

    ``files`` is the number of files that a call of a decoder decodes.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (width, height), data in zip(sizes, jpegs(sizes), strict=True):
        by_threads = found.setdefault(f"{width}x{height}", {})
        for count in threads:
            turns = [
                {name: rate(decode, data, count, seconds) for name, decode in decoders.items()}
                for _ in range(3)
            ]
            by_threads[str(count)] = {
                name: round(files * statistics.median(turn[name] for turn in turns), 1)
                for name in decoders
            }
    return found


def differences(decoder: GpuDecoder, encoder: VisionEncoder, files: list[bytes]) -> dict[str, Any]:
    """Return how far pixels and features of files decoded by ``decoder`` are from PIL's."""
    wanted = [to_rgb(open_image(data)) for data in files]
    decoded = sum(isinstance(one, DeviceImage) for one in decoder.decode_files(list(files)))
    with decoding_by(decoder):
        found = [pixels.cpu() for pixels in read_images(files)]
    levels = [(a.int() - b.int()).abs() for a, b in zip(found, wanted, strict=True)]
    pairs = zip(encoder.encode(found), encoder.encode(wanted), strict=True)
    relative = torch.stack(
        [(a.pooler_output - b.pooler_output).norm() / b.pooler_output.norm() for a, b in pairs]
    )
    return {
        "photographs": len(files),
        "decoded by the decoder": decoded,
        "largest difference in levels": max(int(level.max()) for level in levels),
        "mean difference in levels": float(np.mean([level.double().mean() for level in levels])),
        "relative L2 of features": {
            "largest": float(relative.max()),
            "median": float(relative.median()),
        },
    }


def on_gpu(options: argparse.Namespace) -> dict[str, Any]:
    """Measure nvImageCodec on the GPU."""
    from benchmarks.measuring.machine import describe_machine
    from benchmarks.towers import TOWERS

    device = torch.device("cuda", torch.cuda.current_device())
    encoder = TOWERS[options.tower].build(torch.float32)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    decoder = decoder_of(device)
    rates = measure_rates(
        {"nvImageCodec": lambda data: decoder.decode_files([data] * MOST_FILES)},
        options.sizes,
        options.threads,
        options.seconds,
        MOST_FILES,
    )
    torch.cuda.empty_cache()
    taken = free - torch.cuda.mem_get_info()[0]
    sizes = [(640 - 7 * n % 320, 480 - 5 * n % 240) for n in range(options.items)]
    return {
        "machine": describe_machine(),
        "tower": options.tower,
        **differences(decoder, encoder, jpegs(sizes)),
        "images per second": rates,
        "device memory of the decoder, MiB": round(taken / 2**20, 1),
    }


def on_cpu(options: argparse.Namespace) -> dict[str, Any]:
    """Measure PIL and what encoders decode with on the CPU."""
    decoders: dict[str, Callable[[bytes], object]] = {"PIL": by_pil, "encoders": to_rgb}
    rates = measure_rates(decoders, options.sizes, options.threads, options.seconds)
    return {"cores": os.cpu_count(), "PIL": PIL.__version__, "images per second": rates}


def sentence(body: Mapping[str, Any]) -> str:
    """Return how far nvImageCodec's pixels, and features made of them, are from PIL's."""
    relative = body["relative L2 of features"]
    return (
        f"The pixels of {body['photographs']} photographs differ by at most "
        f"{body['largest difference in levels']} of 255 levels and by "
        f"{body['mean difference in levels']:.5f} on average, and their features by a relative L2 "
        f"difference of at most {100 * relative['largest']:.2g} %, with a median of "
        f"{100 * relative['median']:.2g} % ({body['machine']['gpu']}, {body['tower']} with random "
        "weights in float32)."
    )


def read_size(text: str) -> tuple[int, int]:
    """Read a size such as "640x480"."""
    width, height = text.split("x")
    return int(width), int(height)


def main() -> None:
    """Run the part ``cpu`` or ``gpu``, and print its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("cpu", "gpu"))
    parser.add_argument("--sizes", nargs="+", type=read_size, default=SIZES, metavar="WxH")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--seconds", type=float, default=2, help="of each turn")
    parser.add_argument("--items", type=int, default=64, help="photographs to compare (gpu)")
    parser.add_argument("--tower", default="Qwen3-VL-8B", help="of benchmarks/towers.py (gpu)")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    options = parser.parse_args()
    body = on_cpu(options) if options.part == "cpu" else on_gpu(options)
    print(json.dumps(body, indent=1))
    if options.json is not None:
        write_results(options.json, body)


if __name__ == "__main__":
    main()
