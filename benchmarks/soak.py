"""A soak test of ``GraphedEncoder``, called by eight threads: equal results, constant memory.

    python -m benchmarks.soak --json benchmarks/results/soak_h200.json    (ten minutes)
    python -m benchmarks.soak --device cpu --seconds 10    (a rehearsal: a small tower, no graphs)

Each thread calls the encoder again and again with random ones of some inputs: an image, several
images, a video, images and videos, or an item above the largest token budget, which runs eagerly.
The pixels lie on the GPU or the CPU. The result for an input is compared bit for bit with the first
result for this input, which is compared with a result of another thread. Memory is read once per
second. The first tenth of the time is a warm-up; its latencies and memory do not count. The run
fails if a bit differs, or if memory in the last quarter of the remaining time is more than 1 %
above memory in its first quarter. Compared are the medians of the GPU bytes that torch has reserved
and of the process's bytes on the host, and the minimum of the bytes of tensors on the GPU, because
their number at any one moment depends on the calls that are running.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measuring.results import write_results
from encoders import VisionEncoder
from encoders.contract import Grid, OutputField, PartialOutput
from graphwrap import GraphedEncoder

GROWTH = 0.01
"""The share by which memory may grow after the warm-up."""
FIELDS: tuple[OutputField, ...] = ("pooler_output", "deepstack_features")


class Call(NamedTuple):
    """An input for the encoder, with a name for its kind, such as one image or a video."""

    name: str
    pixels: Tensor
    grids: list[Grid]


def tower(name: str | None) -> VisionEncoder:
    """Build the tower with this name with random weights on the GPU; None builds a small one on the
    CPU."""
    if name is not None:
        from benchmarks.towers import TOWERS

        return TOWERS[name].build()
    from vitgraph.seeded import write_seeded_checkpoint
    from weights import load_encoder

    with tempfile.TemporaryDirectory() as folder:
        repo = write_seeded_checkpoint(folder, "qwen3_vl", width=64)
        encoder = load_encoder(repo, dtype=torch.float32, progress=False)
    assert isinstance(encoder, VisionEncoder)
    return encoder


def draw_calls(encoder: VisionEncoder, count: int, largest: int, seed: int) -> list[Call]:
    """Make random inputs of every kind, each with its own pixels.

    Args:
        encoder: the encoder, which determines the shape, dtype and device of the pixels.
        count: number of inputs.
        largest: most output tokens of an image or video that fits a graph.
        seed: the same seed gives the same inputs.
    """
    dice, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    weight = next(encoder.parameters())
    kinds = ("image", "images", "clip", "images and clips", "large image")
    calls = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        counts = {"image": 1, "images": chance.randint(2, 8), "images and clips": 3}
        grids = [image(chance, largest // 8) for _ in range(counts.get(kind, 0))]
        if "clip" in kind:
            t, h, w = image(chance, largest // 32)
            grids.append((t * chance.randint(2, 8), h, w))
        if kind == "large image":
            grids.append(encoder.grid_for(largest + 64))
        chance.shuffle(grids)
        rows = sum(spec.input_size for spec in encoder.item_specs(grids))
        pixels = torch.randn(rows, *encoder.row_shape, generator=dice).to(weight.dtype)
        place = weight.device if number % 3 else torch.device("cpu")
        calls.append(Call(kind, pixels.to(place), grids))
    return calls


def image(chance: random.Random, tokens: int) -> Grid:
    """Return a random grid (t, h, w) of an image of at most ``tokens`` tokens of 2x2 patches."""
    height = chance.randint(1, max(int(tokens**0.5), 1))
    width = chance.randint(1, max(tokens // height, 1))
    return 1, 2 * height, 2 * min(width, 4 * height)


class Soak:
    """Threads that call one encoder until a number of seconds is over."""

    def __init__(self, graphed: GraphedEncoder, calls: list[Call], seconds: float) -> None:
        self.graphed, self.calls = graphed, calls
        self.began = time.monotonic()
        self.end, self.warm = self.began + seconds, self.began + seconds / 10
        self.first: list[PartialOutput | None] = [None] * len(calls)
        self.wrong: list[str] = []
        self.milliseconds: dict[str, list[float]] = {}
        self.lock = threading.Lock()
        self.failure: BaseException | None = None

    def run(self, threads: int) -> list[dict[str, int]]:
        """Run this number of threads; return samples of the memory in use, one per second.

        Raises:
            BaseException: a thread has raised this error.
        """
        workers = [threading.Thread(target=self._work, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()
        samples = []
        while any(worker.is_alive() for worker in workers):
            time.sleep(1)
            if time.monotonic() > self.warm:
                samples.append(read_memory())
        for worker in workers:
            worker.join()
        if self.failure is not None:
            raise self.failure
        return samples

    def _work(self, seed: int) -> None:
        chance = random.Random(seed)
        try:
            while time.monotonic() < self.end and self.failure is None:
                self._call(chance.randrange(len(self.calls)))
        except BaseException as error:  # noqa: BLE001  # `run` raises it in the main thread
            self.failure = error

    def _call(self, number: int) -> None:
        call = self.calls[number]
        began = time.perf_counter()
        output = self.graphed(call.pixels, call.grids)
        if self.graphed.device.type == "cuda":
            torch.cuda.current_stream(self.graphed.device).synchronize()
        milliseconds = (time.perf_counter() - began) * 1e3
        with self.lock:
            first = self.first[number] or output
            self.first[number] = first
            if time.monotonic() > self.warm:
                self.milliseconds.setdefault(call.name, []).append(milliseconds)
        if not same_bits(output, first):
            with self.lock:
                self.wrong.append(
                    f"call {number} ({call.name}) at {time.monotonic() - self.began:.1f} s"
                )


def same_bits(one: PartialOutput, other: PartialOutput) -> bool:
    """Return whether all fields of two outputs are equal bit for bit."""
    pairs = [(one.pooler_output, other.pooler_output)]
    pairs += zip(one.deepstack_features or (), other.deepstack_features or (), strict=True)
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def read_memory() -> dict[str, int]:
    """Return the bytes that torch has reserved on the GPU, the bytes of tensors there, and the
    bytes of the process on the host."""
    host = Path("/proc/self/statm")
    if host.exists():
        resident = int(host.read_text().split()[1]) * resource.getpagesize()
    else:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    on_gpu = torch.cuda.is_available()
    return {
        "reserved": torch.cuda.memory_reserved() if on_gpu else 0,
        "allocated": torch.cuda.memory_allocated() if on_gpu else 0,
        "resident": resident,
    }


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of the values lies; 0.5 gives the median."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def growth(samples: list[dict[str, int]], name: str) -> float:
    """Return the relative growth of one kind of memory from the first to the last quarter."""
    quarter, share = max(len(samples) // 4, 1), 0.0 if name == "allocated" else 0.5
    first = percentile([float(one[name]) for one in samples[:quarter]], share)
    last = percentile([float(one[name]) for one in samples[-quarter:]], share)
    return last / first - 1 if first else 0.0


def nine_parts(count: int) -> list[int]:
    """Return ten equally spaced indices into ``count`` samples, from the first to the last."""
    return [(count - 1) * part // 9 for part in range(10)]


def report(soak: Soak, samples: list[dict[str, int]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a soak run as plain data."""
    everything = [value for values in soak.milliseconds.values() for value in values]
    stats = soak.graphed.stats()
    grown = {name: round(growth(samples, name), 4) for name in samples[0]}
    return {
        **options,
        "calls": len(everything),
        "calls per second": round(len(everything) / (0.9 * options["seconds"]), 1),
        "eager items": stats.eager_items,
        "ms": {
            name: {
                "calls": len(values),
                "p50": round(percentile(values, 0.5), 3),
                "p99": round(percentile(values, 0.99), 3),
                "max": round(max(values), 3),
            }
            for name, values in {"all": everything, **soak.milliseconds}.items()
        },
        "memory": {name: [samples[at][name] for at in nine_parts(len(samples))] for name in grown},
        "growth": grown,
        "wrong": soak.wrong[:20],
        "wrong calls": len(soak.wrong),
        "passed": not soak.wrong and max(grown.values()) <= GROWTH,
    }


def sentence(body: Mapping[str, Any]) -> str:
    """Return the result of a run as a sentence for ``docs/scale.md``."""
    about, ms, grown, held = body["about"], body["ms"]["all"], body["growth"], body["memory"]
    least = grown["allocated"]
    gpu, host = (
        f"{held[name][0] / 1e9:.2f} to {held[name][-1] / 1e9:.2f} GB"
        for name in ("reserved", "resident")
    )
    return (
        f"{body['tower']} on one {about['gpu']}: {body['calls']:,} calls of mixed sizes in "
        f"{body['seconds']:,.0f} s from {body['threads']} threads, {body['wrong calls']} results "
        f"that differ by a bit from the first of their call; p50 {ms['p50']:.1f} ms and p99 "
        f"{ms['p99']:.1f} ms per call, waiting for the other threads included. After the first "
        f"tenth of the time, GPU memory went from {gpu} and host memory from {host}. Their "
        f"medians over the last quarter are {grown['reserved']:.2%} and {grown['resident']:.2%} "
        "above those over the first quarter, and the least that tensors took on the GPU is "
        f"{abs(least):.2%} {'below' if least < 0 else 'above'} that of the first quarter."
    )


def main() -> None:
    """Run the test, print its result, and exit with 1 if a bit differed or memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tower", default="Qwen3-VL-2B", help="of benchmarks/towers.py")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=60, help="different calls")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    on_cuda = options.device == "cuda"
    encoder = tower(options.tower if on_cuda else None)
    graphed = GraphedEncoder(
        encoder,
        budgets=None if on_cuda else [64, 256],
        outputs=FIELDS,
        backend="cudagraph" if on_cuda else "static",
    ).capture(progress=False)
    calls = draw_calls(encoder, options.calls, max(b.tokens for b in graphed.budgets), 0)
    settings = {
        "tower": options.tower if on_cuda else "a small tower",
        "seconds": options.seconds,
        "threads": options.threads,
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", ""),
    }
    soak = Soak(graphed, calls, options.seconds)
    body = report(soak, soak.run(options.threads), settings)
    if on_cuda:
        from benchmarks.measuring.machine import describe_machine

        body["about"] = describe_machine()
    print(json.dumps(body, indent=1))
    if options.json:
        write_results(options.json, body)
    sys.exit(0 if body["passed"] else 1)


if __name__ == "__main__":
    main()
