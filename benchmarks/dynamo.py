"""Requests per second and latencies in Dynamo, with our encoder and with transformers' encoder.

    python -m benchmarks.dynamo --json benchmarks/results/dynamo_h200.json

``AsyncVisionEncoder`` of ai-dynamo 1.6 runs two backends with the same random weights, in turn:

- ``vitgraph``: :class:`vitgraph.integrations.dynamo.Encoder` with its defaults and CUDA graphs.
- ``transformers``: the same class, but with transformers' vision tower, run eagerly (sdpa).

Both prepare images with the same code. A request is one JPEG file of one of eight sizes, in a
``data:`` URL. The concurrency is the number of clients, each of which sends one request after the
other. In ``whole`` requests images are decoded each time, in ``prepared`` requests only once.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dynamo.vllm.multimodal_utils.custom_encoder.async_encoder import AsyncVisionEncoder
from PIL import Image
from torch import nn

from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.towers import SIZES_MIX8, TOWERS
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import PartialOutput, VisionInputs
from vitgraph.integrations.dynamo import Encoder

CONCURRENCY, KINDS = (1, 8, 32), ("whole", "prepared")
NAMES = ("requests/s", "p50 ms", "p95 ms", "p99 ms")


class Graphed(Encoder):
    """This library's encoder for Dynamo, with a vision tower that is already loaded."""

    def __init__(self, tower: VisionEncoder) -> None:
        super().__init__()
        self.tower, self.remembers = tower, False
        self.prepared: dict[str, Any] = {}

    def load_tower(self, checkpoint: str) -> VisionEncoder:
        """Return the tower that the constructor was given; ``checkpoint`` is ignored."""
        return self.tower

    def preprocess(self, raw: str) -> Any:
        """Prepare the image of a request; for "prepared" requests, reuse the earlier result."""
        if not (self.remembers and raw in self.prepared):
            self.prepared[raw] = super().preprocess(raw)
        return self.prepared[raw]


class Eager(Graphed):
    """An encoder for Dynamo that runs transformers' tower without graphs."""

    def __init__(self, tower: VisionEncoder, reference: nn.Module) -> None:
        super().__init__(tower)
        self.reference = reference
        self.options = self.options._replace(backend="eager")

    @torch.inference_mode()
    def encode(self, inputs: VisionInputs) -> Sequence[PartialOutput]:
        """Run transformers' tower on all images of a batch at once."""
        pixels = inputs.pixel_values.to(self.tower.dtype)
        found = self.reference(pixels, inputs.grid_thw.to(pixels.device))
        output = PartialOutput(None, found.pooler_output, tuple(found.deepstack_features))
        return self.tower.split(output, inputs.grid_thw)


def make_urls(count: int) -> list[str]:
    """Return ``count`` ``data:`` URLs of JPEG files of smooth random images, in eight sizes."""
    dice, urls = np.random.default_rng(0), []
    for number in range(count):
        coarse = dice.integers(0, 255, (12, 16, 3), dtype=np.uint8)
        image, file = Image.fromarray(coarse).resize(SIZES_MIX8[number % 8]), io.BytesIO()
        image.save(file, "JPEG", quality=90)
        urls.append("data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode())
    return urls


async def send(driver: Any, urls: Sequence[str], requests: int, clients: int) -> list[float]:
    """Send requests to an ``AsyncVisionEncoder``; return the figures that :data:`NAMES` lists.

    ``clients`` clients send ``requests`` requests in all, with the images of ``urls`` in turn.
    """
    numbers, seconds = iter(range(requests)), list[float]()

    async def client() -> None:
        for number in numbers:
            began = time.perf_counter()
            await driver.encode([urls[number % len(urls)]])
            seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    rate = requests / (time.perf_counter() - began)
    return [rate, *(np.percentile(seconds, (50, 95, 99)) * 1e3)]


def measure(
    tower: VisionEncoder, reference: nn.Module, requests: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row per kind of request and concurrency, with medians over rounds per backend."""
    backends = {"vitgraph": Graphed(tower), "transformers": Eager(tower, reference)}
    drivers = {name: AsyncVisionEncoder(backend) for name, backend in backends.items()}
    urls, rows = make_urls(min(requests, 32)), list[dict[str, Any]]()
    try:
        for driver in drivers.values():
            driver.load("")
        for remembers, clients in [(kind, n) for kind in (False, True) for n in CONCURRENCY]:
            found: dict[str, list[list[float]]] = {name: [] for name in drivers}
            for _ in range(rounds + 1):
                for name, driver in drivers.items():
                    backends[name].remembers = remembers
                    found[name].append(asyncio.run(send(driver, urls, requests, clients)))
            rows.append({"requests": KINDS[remembers], "concurrency": clients})
            for name, figures in found.items():
                medians = np.median(figures[1:], axis=0).round(2).tolist()  # without the warm-up
                rows[-1][name] = dict(zip(NAMES, medians, strict=True))
    finally:
        for driver in drivers.values():
            driver.shutdown()
    return rows


def main() -> None:
    """Measure the requests; print the rows, and write them to the file of ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tower", default="Qwen3-VL-8B", choices=("Qwen3-VL-8B", "Qwen3-VL-2B"))
    parser.add_argument("--requests", type=int, default=256, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    chosen = TOWERS[options.tower]
    tower = chosen.build()
    rows = measure(tower, chosen.reference(tower), options.requests, options.rounds)
    result = {"about": about(options.rounds), "tower": chosen.name, "rows": rows}
    print(json.dumps(result, indent=1))
    if options.json:
        write_results(options.json, result)


if __name__ == "__main__":
    main()
