"""From bytes to features: what reading images adds to the tower alone, in calls, streams and jobs.

    python -m benchmarks.gate --parts bytes memory
    python -m benchmarks.gate --parts stream --towers Qwen3-VL-8B --items 2048

Towers have their published sizes and random weights in bfloat16, and run as CUDA graphs. Each
command adds what it measured to ``benchmarks/results/gate_<gpu>.json`` (``--json``). Photographs
are crops of scikit-learn's and matplotlib's, as JPEG files of quality 90. Rows have ``cpu`` or
``gpu`` for the place where JPEG files are decoded; ``gpu`` is left out without nvImageCodec.

- ``bytes``: milliseconds of ``encode`` from the bytes of files over those of a replay with pixels
  on the GPU (``tower``), and of decoding the same files in one thread; 12 MP is bounded to 1 MP.
- ``stream``: images per second of ``embed_many`` over files of seven sizes in 16 threads
  (``files``), over the smaller of ``replays`` and ``decoding`` of the same files in as many
  threads; and over decoded images (``memory``) over ``replays``. Each of these goes over the images
  as many times as it does in two seconds (``--seconds``), a stream without a break: 2,048 images
  are a sixth of a second of a small tower, less than a stream takes to begin and to end.
- ``job``: images per second of ``vitgraph embed`` over ``embed_many`` from the same files, as many
  as a stream goes over; and that ratio without the first eighth of the images and the last one
  (``steady``), with the seconds to the first result, after the last one, and of listing the files.
- ``peers``: images per second of transformers with its fast processor on the CPU and on the GPU,
  and of a loop with torchvision's decoder and resize on the GPU before our graphs, on such files.
- ``memory``: MiB on the device that the decoder takes, and that a stream takes beyond the graphs,
  for 500 images and for four times as many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import PIL
import torch

from benchmarks.encode_many import MIXED, cut_batches, images_per_second, rates
from benchmarks.measuring.machine import ROOT, describe_machine
from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown
from benchmarks.towers import TOWERS, Tower
from benchmarks.traffic.photographs import cut_photographs, write_jpegs
from encoders.base.vision_encoder import VisionEncoder
from encoders.inputs.gpu_decoding import MOST_FILES, decoder_of
from encoders.inputs.image_files import open_image
from encoders.inputs.intake import to_rgb
from encoders.streams import stream_items
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, build_encoder, build_pair
from vitgraph.timing import medians, synchronize

LABELS: dict[str, list[tuple[int, int]]] = {
    "1x448": [(448, 448)],
    "1x1024x768": [(1024, 768)],
    "1x1920x1080": [(1920, 1080)],
    "8x448": [(448, 448)] * 8,
    "1x4032x3024": [(4032, 3024)],
}
"""The sizes (width, height) of the files of each workload of ``bytes``."""
SIGLIP = Tower("SigLIP2-B/16", "siglip", "google/siglip2-base-patch16-224")
GATED = {"Qwen3-VL-8B": TOWERS["Qwen3-VL-8B"], "Qwen3.5-0.8B": TOWERS["Qwen3.5-0.8B"]}
ALL = {**GATED, SIGLIP.name: SIGLIP}
GOALS: dict[str, dict[str, list[float]]] = {
    "bytes": {"Qwen3-VL-8B": [1.4, 1.15, 1.1, 1.2, 1.8], "Qwen3.5-0.8B": [2.0, 1.6, 1.3, 1.9, 3.6]},
    "stream": {  # gpu, cpu, from memory
        "Qwen3-VL-8B": [0.98, 0.98, 0.99],
        "Qwen3.5-0.8B": [0.95, 0.92, 0.98],
        "SigLIP2-B/16": [0.90, 0.90, 0.95],
    },
    "job": {"all": [0.97]},
}
"""The ratios to reach: ``bytes`` in the order of the labels, at most, and the others at least."""
MEGAPIXEL = 1024 * 1024
JOB, STEADY = "vitgraph embed", "steady images per second"
"""Names in results: of a job, and of images per second without the start and the end."""
Result = TypeVar("Result")


class Setup:
    """A tower with its graphs, and the options of the command."""

    def __init__(self, tower: Tower, options: argparse.Namespace) -> None:
        self.tower, self.options, self.tiny = tower, options, options.tiny
        self.decodes = ["cpu", *(["gpu"] if has_gpu_decoder() else [])]

    @cached_property
    def encoder(self) -> VisionEncoder:
        """The encoder with random weights."""
        family = BY_NAME[self.tower.family]
        return build_encoder(family, family.tiny) if self.tiny else self.tower.build()

    @cached_property
    def graphed(self) -> GraphedEncoder[VisionEncoder]:
        """The captured graphs."""
        if self.tiny:
            return GraphedEncoder(self.encoder, [256, 1024], backend="static")
        return GraphedEncoder(self.encoder).capture(progress=False)

    def limits(self, size: tuple[int, int]) -> dict[str, Any]:
        """Return the keywords that bound a photograph of 12 MP to 1 MP."""
        large = size[0] * size[1] > 4 * MEGAPIXEL and self.tower.family != "siglip"
        return {"max_pixels": MEGAPIXEL} if large else {}

    def files(self, sizes: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return photographs of these sizes as JPEG files, sixteen times smaller for a test."""
        shrink = 16 if self.tiny else 1
        small = [(max(w // shrink, 16), max(h // shrink, 16)) for w, h in sizes]
        with tempfile.TemporaryDirectory() as folder:
            paths = write_jpegs(Path(folder), cut_photographs(small))
            return [path.read_bytes() for path in paths]


def has_gpu_decoder() -> bool:
    """Return whether nvImageCodec decodes on a CUDA device here."""
    if not torch.cuda.is_available():
        return False
    try:
        decoder_of(torch.device("cuda", torch.cuda.current_device()))
    except ValueError:
        return False
    return True


def measure_bytes(setup: Setup) -> dict[str, Any]:
    """Time ``encode`` from bytes, replays alone, and decoding alone, of each label."""
    graphed: Any = setup.graphed
    found: dict[str, Any] = {}
    for number, (label, sizes) in enumerate(LABELS.items()):
        files, limits = setup.files(sizes), setup.limits(sizes[0])
        inputs = setup.encoder.preprocess(files, **limits)
        pixels = inputs.pixel_values.to(setup.encoder.device, setup.encoder.dtype)
        grids = inputs.grid_thw.tolist()
        calls: dict[str, Callable[[], object]] = {
            "tower": partial(graphed, pixels, grids),
            "decoding": partial(decode_all, files),
        }
        for place in setup.decodes:
            calls[place] = partial(graphed.encode, files, decode=place, **limits)
        times = medians(calls, setup.options.runs)
        row: dict[str, Any] = {f"{name}_ms": round(value, 3) for name, value in times.items()}
        goal = GOALS["bytes"][setup.tower.name][number]
        if "gpu" in times:
            row["gpu over tower"] = round(times["gpu"] / times["tower"], 3)
        row["cpu over its goal"] = round(
            times["cpu"] / (times["decoding"] + goal * times["tower"]), 3
        )
        found[label] = {**row, "goal": goal}
    return found


def decode_all(files: Sequence[bytes]) -> None:
    """Decode files in one thread, as ``encode`` does."""
    for data in files:
        to_rgb(data)


def measure_stream(setup: Setup) -> dict[str, Any]:
    """Return images per second of streams, replays and decoding, and their ratios."""
    graphed: Any = setup.graphed
    options, encoder = setup.options, setup.encoder
    settings = {"batch_tokens": options.batch_tokens, "workers": options.workers}
    files = setup.files([MIXED[number % len(MIXED)] for number in range(options.items)])
    arrays = [to_rgb(data).permute(1, 2, 0).numpy() for data in files]
    batches = cut_batches(encoder, arrays, options.batch_tokens)
    rows = [sum(spec.input_size for spec in encoder.item_specs(grids)) for grids in batches]
    shape = (max(rows), *encoder.row_shape)
    pixels = torch.randn(shape, device=encoder.device).to(encoder.dtype)

    def replay(passes: int) -> None:
        for grids, count in [*zip(batches, rows, strict=True)] * passes:
            graphed(pixels[:count], grids)
        synchronize()

    def embed(items: Sequence[Any], place: str, passes: int) -> None:
        several = [*items] * passes
        results = graphed.embed_many(several, decode=place, progress=False, **settings)
        assert sum(1 for _ in results) == len(several)

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number:05d}.jpg" for number in range(len(files))]
        for path, data in zip(paths, files, strict=True):
            path.write_bytes(data)
        runs: dict[str, Callable[[int], None]] = {
            "replays": replay,
            "memory": partial(embed, arrays, "cpu"),
        }
        for place in setup.decodes:
            runs[f"decoding, {place}"] = partial(decode_in_threads, paths, place, options.workers)
            runs[f"files, {place}"] = partial(embed, paths, place)
        found = lasting_rates(runs, len(files), options)
    result = {"items": len(files), **settings, **images_per_second(found)}
    rate = result["images per second"]
    result["memory over replays"] = round(rate["memory"] / rate["replays"], 3)
    for place in setup.decodes:
        slower = min(rate["replays"], rate[f"decoding, {place}"])
        result[f"files over the slower, {place}"] = round(rate[f"files, {place}"] / slower, 3)
    return {**result, "goals (gpu, cpu, memory)": GOALS["stream"].get(setup.tower.name)}


def lasting_rates(
    runs: dict[str, Callable[[int], None]], items: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the images per second of each variant per repeat, each timed for some seconds.

    Args:
        runs: the variants by name, functions that go over the images as many times as they are
            told; they take turns.
        items: number of images.
        options: the options of the benchmark.
    """
    passes = {}
    for name, run in runs.items():
        run(1)
        began = time.perf_counter()
        run(1)
        passes[name] = max(math.ceil(options.seconds / (time.perf_counter() - began)), 1)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            run(passes[name])
            found[name].append(items * passes[name] / (time.perf_counter() - began))
    return found


def decode_in_threads(paths: Sequence[Path], place: str, workers: int, passes: int) -> None:
    """Decode files in threads, on the CPU or by nvImageCodec as a stream does, ``passes`` times."""
    size = 1 if place == "cpu" else MOST_FILES

    def together(some: Sequence[Path]) -> object:
        if place == "cpu":
            return to_rgb(some[0])
        return decoder_of(torch.device("cuda", torch.cuda.current_device())).decode_files(some)

    files = [*paths] * passes
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(together, [files[n : n + size] for n in range(0, len(files), size)]):
            pass
    synchronize()


class Times(NamedTuple):
    """How long a stream or a job took."""

    start: float
    """The seconds until the first result."""
    between: float
    """The seconds from the first result to the last one."""
    end: float
    """The seconds from the last result to the end, when a job has written its last shard."""
    steady: float
    """The images per second of all but the first eighth of the results and the last one: threads
    have prepared some images before the first result, and none are left to prepare at the end."""
    listing: float = 0.0
    """The seconds in which a job lists its files, before the encoder is loaded."""

    @property
    def seconds(self) -> float:
        """All seconds but those of the listing."""
        return self.start + self.between + self.end


def noted(results: Iterable[Result], came: list[float]) -> Iterator[Result]:
    """Yield results, and note when each of them came."""
    for result in results:
        came.append(time.perf_counter())
        yield result


def times_of(began: float, came: Sequence[float], listing: float = 0.0) -> Times:
    """Return the times of a stream that ends now, from its beginning and when its results came."""
    ended = time.perf_counter()
    first, last = len(came) // 8, len(came) - 1 - len(came) // 8
    steady = (last - first) / max(came[last] - came[first], 1e-9)
    return Times(came[0] - began, came[-1] - came[0], ended - came[-1], steady, listing)


def time_stream(results: Iterable[object]) -> Times:
    """Return the times of a stream that nobody has begun."""
    began, came = time.perf_counter(), list[float]()
    for _ in noted(results, came):
        pass
    return times_of(began, came)


def time_jobs(
    checkpoint: Path,
    photos: Path,
    out: Path,
    options: argparse.Namespace,
    count: int,
    written: Sequence[str] = ("--pool", "mean"),
    first: Sequence[Path] = (),
) -> list[Times]:
    """Return the times in which ``vitgraph embed`` writes the shards of a folder, of each job.

    Args:
        checkpoint: the folder of the tower.
        photos: the folder of the images.
        out: the folder to which the folders of the jobs are written.
        options: the options of the benchmark.
        count: the number of jobs, one after the other.
        written: the arguments that say what the jobs write.
        first: images that the encoder of each job embeds before its time begins.
    """
    from vitgraph.cli import main as vitgraph
    from vitgraph.embedding import job as jobs
    from vitgraph.embedding import manifest

    write, write_list = jobs.Job.write_missing_shards, manifest.write_list
    listings: list[float] = []
    times: list[Times] = []

    def listed(*given: Any) -> Any:
        began = time.perf_counter()
        result = write_list(*given)
        listings.append(time.perf_counter() - began)
        return result

    def timed(job: Any, encoder: Any) -> None:
        settings = {"batch_tokens": options.batch_tokens, "workers": options.workers}
        for _ in encoder.embed_many(first, progress=False, **settings) if first else ():
            pass
        synchronize()
        began, came = time.perf_counter(), list[float]()
        with patch.object(jobs, "stream_items", lambda *given: noted(stream_items(*given), came)):
            write(job, encoder)
        times.append(times_of(began, came, listings[-1]))

    command = ["--no-progress", "--batch-tokens", str(options.batch_tokens)]
    command += ["--workers", str(options.workers), *written]
    with (
        patch.object(jobs.Job, "write_missing_shards", timed),
        patch.object(manifest, "write_list", listed),
        contextlib.redirect_stdout(None),
    ):
        for number in range(count):
            folder = str(out / f"out{number}")
            code = vitgraph(["embed", str(checkpoint), str(photos), "--out", folder, *command])
            assert code == 0
    return times


def measure_job(setup: Setup) -> dict[str, Any]:
    """Return images per second of the shards of ``vitgraph embed``, and of ``embed_many``."""
    options = setup.options
    files = setup.files([MIXED[number % len(MIXED)] for number in range(options.items)])
    settings = {"batch_tokens": options.batch_tokens, "workers": options.workers}

    def stream(paths: Sequence[Path]) -> Times:
        return time_stream(setup.graphed.embed_many(paths, progress=False, **settings))

    with tempfile.TemporaryDirectory() as folder:
        checkpoint, photos = Path(folder) / "tower", Path(folder) / "photos"
        build_reference(setup).save_pretrained(checkpoint)
        photos.mkdir()
        paths = [photos / f"{number:06d}.jpg" for number in range(len(files))]
        for path, data in zip(paths, files, strict=True):
            path.write_bytes(data)
        stream(paths)
        passes = max(math.ceil(options.seconds / stream(paths).seconds), 1)
        for number in range(len(files), len(files) * passes):
            paths.append(photos / f"{number:06d}.jpg")
            os.link(paths[number - len(files)], paths[-1])
        found = {"embed_many": [stream(paths) for _ in range(options.repeats)]}
        found[JOB] = time_jobs(checkpoint, photos, Path(folder), options, options.repeats)
    return {**compare_times(len(paths), found), "goal": GOALS["job"]["all"][0]}


def compare_times(items: int, found: Mapping[str, Sequence[Times]]) -> dict[str, Any]:
    """Return the images per second of streams and jobs with and without their start and end.

    ``ratio`` is that of ``vitgraph embed`` to ``embed_many``, where both were measured.
    """
    whole = {name: [items / one.seconds for one in times] for name, times in found.items()}
    inner = {name: [one.steady for one in times] for name, times in found.items()}
    rate, steady = (images_per_second(part)["images per second"] for part in (whole, inner))
    result: dict[str, Any] = {"items": items, **images_per_second(whole)}
    result[STEADY] = steady
    for part in ("start", "end", "listing"):
        result[f"seconds, {part}"] = {
            name: round(statistics.median(getattr(one, part) for one in times), 3)
            for name, times in found.items()
        }
    if "embed_many" in found:
        for label, rates_of in (("ratio", rate), ("steady ratio", steady)):
            result[label] = round(rates_of[JOB] / rates_of["embed_many"], 3)
    return result


def measure_peers(setup: Setup) -> dict[str, Any]:
    """Return images per second of other libraries from the bytes of files, eight to a batch."""
    options, encoder = setup.options, setup.encoder
    count = max(options.items // 8, 8)
    files = setup.files([MIXED[number % len(MIXED)] for number in range(count)])
    batches = [files[start : start + 8] for start in range(0, count, 8)]
    runs: dict[str, Callable[[Any], None]] = {
        f"embed_many, {place}": partial(ours, setup, place) for place in setup.decodes
    }
    if setup.tower.family != "siglip":
        reference = build_reference(setup)
        for device in dict.fromkeys(("cpu", encoder.device.type)):
            runs[f"transformers, processor on {device}"] = partial(
                by_transformers, reference, setup, device
            )
        if encoder.device.type == "cuda":
            runs["torchvision on the GPU, our graphs"] = partial(by_torchvision, setup)
    found = rates(runs, batches, options.repeats)
    return {"items": count, **images_per_second(found)}


def ours(setup: Setup, place: Any, batch: Sequence[bytes]) -> None:
    """Embed a batch of files with this library."""
    setup.graphed.embed(batch, decode=place)
    synchronize()


def build_reference(setup: Setup) -> Any:
    """Return transformers' tower with the weights of the encoder."""
    if not setup.tiny:
        return setup.tower.reference(setup.encoder)
    family = BY_NAME[setup.tower.family]
    return build_pair(family, family.tiny)[1]


def image_processor(setup: Setup) -> Any:
    """Return transformers' fast processor with the sizes of the tower."""
    from transformers import Qwen2VLImageProcessor

    ours: Any = setup.encoder.preprocessor
    edges = {"shortest_edge": ours.images.min_pixels, "longest_edge": ours.images.max_pixels}
    return Qwen2VLImageProcessor(patch_size=ours.patch_size, merge_size=ours.merge_size, size=edges)


@torch.no_grad()
def by_transformers(reference: Any, setup: Setup, device: str, batch: Sequence[bytes]) -> None:
    """Run transformers' fast processor on a device, then its tower, on a batch of files."""
    images = [open_image(data).convert("RGB") for data in batch]
    made = image_processor(setup)(images, return_tensors="pt", device=device)
    weight = next(reference.parameters())
    grid_thw = made["image_grid_thw"].to(weight.device)
    reference(made["pixel_values"].to(weight.device, weight.dtype), grid_thw=grid_thw)
    synchronize()


@torch.no_grad()
def by_torchvision(setup: Setup, batch: Sequence[bytes]) -> None:
    """Decode and resize with torchvision on the GPU, cut by hand, and replay our graphs."""
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2.functional import resize

    ours: Any = setup.encoder.preprocessor
    data = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in batch]
    parts, grids = [], []
    for image in decode_jpeg(data, mode=ImageReadMode.RGB, device="cuda"):
        ((t, h, w),) = setup.encoder.preprocess(
            torch.empty(image.shape, dtype=torch.uint8)
        ).grid_thw.tolist()
        p, m = ours.patch_size, ours.merge_size
        pixels = resize(image, [h * p, w * p], interpolation=3, antialias=True)
        pixels = pixels.to(torch.bfloat16).div_(127.5).sub_(1)
        cut = pixels.view(3, h // m, m, p, w // m, m, p).permute(1, 4, 2, 5, 0, 3, 6)
        pair = cut.unsqueeze(5).expand(*cut.shape[:5], ours.temporal_patch_size, p, p)
        parts.append(pair.reshape(h * w, -1))
        grids.append([t, h, w])
    setup.graphed(torch.cat(parts), grids)
    synchronize()


def measure_memory(setup: Setup) -> dict[str, Any]:
    """Return MiB on the device that decoder and streams take."""
    graphed: Any = setup.graphed
    options = setup.options
    result: dict[str, Any] = {}
    for place in setup.decodes:
        for count in (options.items // 4, options.items):
            files = setup.files([MIXED[number % len(MIXED)] for number in range(count)])
            before = device_memory()
            for _ in graphed.embed_many(
                files, decode=place, progress=False, workers=options.workers
            ):
                pass
            peak, now = device_memory(peak=True), device_memory()
            result[f"{place}, {count} images"] = {
                "torch, peak": round((peak[0] - before[0]) / 2**20, 1),
                "device, after": round((now[1] - before[1]) / 2**20, 1),
            }
    return result


def device_memory(peak: bool = False) -> tuple[int, int]:
    """Return the bytes of torch's tensors on the device, and all that are taken there."""
    if not torch.cuda.is_available():
        return 0, 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    tensors = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    if not peak:
        torch.cuda.reset_peak_memory_stats()
    return tensors, total - free


PARTS: dict[str, tuple[Callable[[Setup], dict[str, Any]], dict[str, Tower]]] = {
    "bytes": (measure_bytes, GATED),
    "stream": (measure_stream, ALL),
    "job": (measure_job, ALL),
    "peers": (measure_peers, ALL),
    "memory": (measure_memory, GATED),
}
"""What measures each part, and its towers."""


def table(results: Mapping[str, Any]) -> str:
    """Return the tables of calls and of streams of ``docs/embedding.md``, with their captions."""
    gpu, cores = results["machine"]["gpu"], results["machine"]["cores"]
    calls = [
        (tower, label, *(f"{row[name]:.1f}" for name in ("tower_ms", "cpu_ms", "gpu_ms")))
        for tower, rows in results["bytes"].items()
        for label, row in rows.items()
    ]
    rates = ("replays", "memory", "decoding, cpu", "files, cpu", "decoding, gpu", "files, gpu")
    streams = [
        (tower, *(f"{row['images per second'][rate]:,.0f}" for rate in rates))
        for tower, row in results["stream"].items()
    ]
    from_bytes = ('from bytes, `decode="cpu"`', 'from bytes, `decode="gpu"`')
    by_files = ("CPU decoding alone", "files", "GPU decoding alone", 'files, `decode="gpu"`')
    return "\n\n".join(
        (
            f"Milliseconds of `GraphedEncoder.encode` from the bytes of JPEG files, {gpu}:",
            markdown(("tower", "images", "tower alone", *from_bytes), calls),
            "Images per second of `embed_many` over images of seven sizes, "
            f"{gpu}, {cores} cores, 16 threads:",
            markdown(("tower", "replays", "decoded images", *by_files), streams),
        )
    )


def sentence(results: Mapping[str, Any]) -> str:
    """Return the milliseconds from bytes to features of one image of 448x448 pixels."""
    row = results["bytes"]["Qwen3-VL-8B"]["1x448"]
    return f'{row["cpu_ms"]:.1f} ms, or {row["gpu_ms"]:.1f} ms with `decode="gpu"`'


def result_file() -> Path:
    """Return the result file of this machine's GPU."""
    name = torch.cuda.get_device_name().split()[1] if torch.cuda.is_available() else "cpu"
    return ROOT / "benchmarks" / "results" / f"gate_{name.lower()}.json"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--towers", nargs="+", choices=tuple(ALL), default=list(ALL))
    parser.add_argument("--items", type=int, default=2048, help="images of streams and jobs")
    parser.add_argument("--runs", type=int, default=15, help="timed calls of bytes")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes of streams and jobs")
    parser.add_argument("--seconds", type=float, default=2.0, help="least time of streams and jobs")
    parser.add_argument("--workers", type=int, default=16, help="threads that decode")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per batch")
    parser.add_argument("--json", type=Path, help="the result file, which is added to")
    parser.add_argument("--tiny", action="store_true", help="small towers and files, for a test")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the parts, print a line per row, and add the rows to the result file."""
    options = parse(arguments)
    path = options.json or result_file()
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    result["machine"] = {**describe_machine(), "cores": os.cpu_count(), "PIL": PIL.__version__}
    for name in options.towers:
        setup = Setup(ALL[name], options)
        for part in options.parts:
            measure, towers = PARTS[part]
            if name in towers:
                row = measure(setup)
                result.setdefault(part, {})[name] = row
                write_results(path, result)
                rows = row.items() if part in ("bytes", "memory") else [("", row)]
                for label, values in rows:
                    print(part, name, label, json.dumps(values), flush=True)
        del setup
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
