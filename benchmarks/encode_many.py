"""The speed of ``encode_many``, compared with a hand-written loop and with graph replays alone.

    python -m benchmarks.encode_many cpu
    python -m benchmarks.encode_many gpu --tower Qwen3-VL-8B --workers 16

Each command prints JSON. The photographs are resized crops of scikit-learn's and matplotlib's.

- ``cpu``: 2,000 JPEG files with sides of 160 to 400 pixels, and a small tower with seeded random
  weights in float32. The hand-written loop decodes and preprocesses in a pool, four batches ahead,
  and encodes a batch while the pool works. It is run with several pools (threads, processes) and
  batch sizes, and the fastest counts. ``ratio`` is the images per second of ``encode_many`` divided
  by those of that loop.
- ``gpu``: 4,096 photographs of seven sizes, a tower of real size with random weights in bfloat16.
  ``replays`` are back-to-back calls of a ``GraphedEncoder`` on the same batches of images, with
  pixels on the GPU. ``from memory`` is ``encode_many`` over decoded uint8 arrays; its ratio is to
  ``replays``. ``from files`` reads JPEG files; its ratio is to the slower of ``replays`` and
  ``decoding``, which only decodes and resizes the same files in as many threads.

After an untimed warm-up, the variants take turns every 200 files (on a GPU, every half of the
images). Figures are medians of the repeats in images per second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.traffic.photographs import cut_photographs, write_jpegs
from encoders import VisionEncoder
from encoders.contract import Grid, Limits, VisionInputs
from graphwrap import GraphedEncoder
from vitgraph.seeded import write_seeded_checkpoint
from vitgraph.timing import synchronize
from weights import load_encoder

MIXED = [(640, 480), (480, 640), (1024, 768), (512, 512), (1280, 720), (800, 600), (336, 336)]
"""The sizes (width, height) of the photographs of ``gpu``, which are used in turn."""
_ENCODER: list[VisionEncoder] = []
"""The encoder in one element; a worker process inherits it when it is forked."""


def prepare(path: Path) -> VisionInputs:
    """Decode and preprocess one file, in a thread or process of the hand-written loop."""
    with Image.open(path) as image:
        return _ENCODER[0].preprocess([image.convert("RGB")])


@torch.no_grad()
def by_hand(encoder: VisionEncoder, pool: Executor, batch: int, paths: Sequence[Path]) -> None:
    """Encode the files of ``paths`` in a hand-written loop, with ``batch`` images per batch.

    The pool decodes and preprocesses four batches ahead.
    """
    left = iter(paths)
    vectors: list[Tensor] = []
    ahead: deque[Future[VisionInputs]] = deque()
    while True:
        while len(ahead) < 4 * batch and (path := next(left, None)) is not None:
            ahead.append(pool.submit(prepare, path))
        if not ahead:
            break
        ready = [ahead.popleft().result() for _ in range(min(batch, len(ahead)))]
        grid = torch.cat([inputs.grid_thw for inputs in ready])
        output = encoder(torch.cat([inputs.pixel_values for inputs in ready]), grid)
        vectors += [item.pooler_output.mean(0) for item in encoder.split(output, grid)]
    assert len(vectors) == len(paths)


def ours(encoder: Any, items: Sequence[Any], **options: Any) -> None:
    """Encode all images to vectors with ``embed_many``."""
    vectors = list(encoder.embed_many(items, progress=False, **options))
    assert len(vectors) == len(items)


Part = TypeVar("Part", bound=Sequence[Any])


def rates(
    runs: dict[str, Callable[[Part], None]], parts: Sequence[Part], repeats: int
) -> dict[str, list[float]]:
    """Return the images per second of each variant over all parts of the images, per repeat.

    The variants take turns at every part, so that other work of the machine affects all alike. One
    untimed warm-up comes first.

    Args:
        runs: the variants by name, functions that encode a part of the images.
        parts: the images, divided into parts.
        repeats: number of timed repeats.
    """
    items = sum(map(len, parts))
    found: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        seconds = dict.fromkeys(runs, 0.0)
        for part in parts if repeat else parts[:1]:
            for name, run in runs.items():
                began = time.perf_counter()
                run(part)
                seconds[name] += time.perf_counter() - began
        for name in runs if repeat else ():
            found[name].append(items / seconds[name])
    return found


def on_cpu(options: argparse.Namespace) -> dict[str, Any]:
    """Measure ``encode_many`` and hand-written loops on the CPU; return their images per second."""
    chance = random.Random(1)
    sizes = [(chance.randint(160, 400), chance.randint(160, 400)) for _ in range(options.items)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as pools:
        paths = write_jpegs(Path(folder), cut_photographs(sizes))
        repo = write_seeded_checkpoint(
            Path(folder) / "repo", options.family, depth=options.depth, width=options.width
        )
        encoder = load_encoder(repo, dtype=torch.float32, progress=False)
        assert isinstance(encoder, VisionEncoder)
        _ENCODER.append(encoder)
        fork = get_context("fork")
        workers: dict[str, Executor] = {
            "1 thread": ThreadPoolExecutor(1),
            "2 threads": ThreadPoolExecutor(2),
            "2 processes": ProcessPoolExecutor(  # with 1 thread: OpenMP threads are lost in a fork
                2, mp_context=fork, initializer=torch.set_num_threads, initargs=(1,)
            ),
        }
        runs: dict[str, Callable[[Sequence[Path]], None]] = {
            "encode_many": lambda part: ours(encoder, part)
        }
        for name, pool in workers.items():
            pools.enter_context(pool)
            for batch in (4, 12):
                runs[f"{name}, batches of {batch}"] = partial(by_hand, encoder, pool, batch)
        parts: list[Sequence[Path]] = [
            paths[start : start + 200] for start in range(0, len(paths), 200)
        ]
        found = rates(runs, parts, options.repeats)
    result = images_per_second(found)
    rate = result["images per second"]
    best = max((name for name in rate if name != "encode_many"), key=rate.__getitem__)
    return {
        "items": options.items,
        "tower": f"{options.family}, {options.depth} blocks of width {options.width}",
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **result,
        "best by hand": best,
        "ratio": round(rate["encode_many"] / rate[best], 3),
    }


def images_per_second(found: dict[str, list[float]]) -> dict[str, Any]:
    """Return the median and the range of images per second of each variant."""
    medians = {name: round(statistics.median(values), 1) for name, values in found.items()}
    ranges = {name: [round(min(v), 1), round(max(v), 1)] for name, v in found.items()}
    return {"images per second": medians, "range": ranges}


def on_gpu(options: argparse.Namespace) -> dict[str, Any]:
    """Measure ``encode_many``, replays and decoding on a GPU; return their images per second."""
    from benchmarks.measuring.machine import describe_machine
    from benchmarks.towers import TOWERS

    graphed = GraphedEncoder(TOWERS[options.tower].build()).capture()
    encoder: Any = graphed.encoder
    sizes = [MIXED[number % len(MIXED)] for number in range(options.items)]
    settings = {"batch_tokens": options.batch_tokens, "workers": options.workers}
    with tempfile.TemporaryDirectory() as folder:
        images = list(cut_photographs(sizes))
        paths = write_jpegs(Path(folder), images)
        arrays = [np.asarray(image) for image in images]
        most = 4 * options.batch_tokens  # four patches are merged into one output token
        pixels = torch.randn(most, *encoder.row_shape, dtype=torch.bfloat16, device="cuda")
        half = options.items // 2

        parts = [range(half), range(half, options.items)]
        batches = {
            part: cut_batches(encoder, arrays[part.start : part.stop], options.batch_tokens)
            for part in parts
        }
        rows = {
            part: [sum(spec.input_size for spec in encoder.item_specs(grids)) for grids in found]
            for part, found in batches.items()
        }

        def replay(part: range) -> None:
            for grids, count in zip(batches[part], rows[part], strict=True):
                graphed(pixels[:count], grids)
            synchronize()

        def decode(part: range) -> None:
            def one(path: Path) -> object:
                return encoder.preprocessor.stage([path], [], Limits(), encoder.device)

            with ThreadPoolExecutor(options.workers) as pool:
                deque(pool.map(one, paths[part.start : part.stop]), maxlen=0)

        found = rates(
            {
                "replays": replay,
                "decoding": decode,
                "from memory": lambda part: ours(
                    graphed, arrays[part.start : part.stop], **settings
                ),
                "from files": lambda part: ours(graphed, paths[part.start : part.stop], **settings),
            },
            parts,
            options.repeats,
        )
    result = images_per_second(found)
    rate = result["images per second"]
    slower = min(rate["replays"], rate["decoding"])
    return {
        "items": options.items,
        "tower": options.tower,
        **settings,
        "machine": describe_machine(),
        **result,
        "ratio from memory": round(rate["from memory"] / rate["replays"], 3),
        "ratio from files": round(rate["from files"] / slower, 3),
    }


def cut_batches(encoder: VisionEncoder, arrays: Sequence[Any], most: int) -> list[list[Grid]]:
    """Return the patch grids of each batch that ``encode_many`` makes of these images.

    ``most`` is the largest number of output tokens per batch.
    """
    known: dict[tuple[int, ...], tuple[Grid, int]] = {}
    batches: list[list[Grid]] = [[]]
    used = 0
    for array in arrays:
        if array.shape not in known:
            ((t, h, w),) = encoder.preprocess([array]).grid_thw.tolist()
            known[array.shape] = (t, h, w), encoder.item_specs([(t, h, w)])[0].output_tokens
        grid, tokens = known[array.shape]
        if batches[-1] and used + tokens > most:
            batches.append([])
            used = 0
        batches[-1].append(grid)
        used += tokens
    return batches


def sentence(body: Mapping[str, Any]) -> str:
    """Return what :func:`on_gpu` measured as a sentence for ``docs/embedding.md``."""
    rate = {name: round(value) for name, value in body["images per second"].items()}
    return (
        f"On an H200, `GraphedEncoder.embed_many` with the tower of {body['tower']} (flash-attn-4, "
        f"{body['items']:,} photographs of seven sizes) encoded {rate['from memory']} decoded "
        f"photographs per second where replays alone made {rate['replays']}, and "
        f"{rate['from files']} from JPEG files with {body['workers']} threads, which decode "
        f"{rate['decoding']} (`python -m benchmarks.encode_many gpu`)."
    )


def main() -> None:
    """Run the part ``cpu`` or ``gpu``, and print its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("cpu", "gpu"))
    parser.add_argument("--items", type=int, help="by default 2000, on a GPU 4096")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--family", default="qwen3_vl", help="of the seeded tower (cpu)")
    parser.add_argument("--depth", type=int, default=1, help="of the seeded tower (cpu)")
    parser.add_argument("--width", type=int, default=64, help="of the seeded tower (cpu)")
    parser.add_argument("--tower", default="Qwen3-VL-8B", help="of benchmarks/towers.py (gpu)")
    parser.add_argument("--workers", type=int, default=16, help="threads that decode (gpu)")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per batch (gpu)")
    options = parser.parse_args()
    options.items = options.items or (2000 if options.part == "cpu" else 4096)
    print(json.dumps(on_cpu(options) if options.part == "cpu" else on_gpu(options), indent=1))


if __name__ == "__main__":
    main()
