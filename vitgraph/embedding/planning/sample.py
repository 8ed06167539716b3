"""The measurements of ``vitgraph embed --plan``: of a sample of images, and of a device's speed.

If no device is named, the speed of a GPU is looked up in the files ``scale_*.json``, which have the
images per second of one GPU for some encoders, by the number of output tokens of an image.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from encoders import Encoder
from encoders.contract import Limits
from encoders.inputs import to_rgb
from encoders.streams import EitherItemEncoder, ResultSettings, StreamOptions, stream_items

from ..sources.reading import File
from .estimate import Rate, Sample

RATES = sorted(Path(__file__).parent.glob("scale_*.json"))
"""The files with measured images per second of a GPU, which ``benchmarks.scale`` writes."""
SAMPLED = 32
"""The most images that are read for an estimate."""
LEAST_SECONDS = 3.0
"""The least duration of a speed measurement, repeated with more images until it lasts that long."""


class _Measured(NamedTuple):
    """One decoded image of the sample, with its sizes and the seconds that it took.

    ``read_bytes`` is the size of its file, ``written_bytes`` the size of its vector or tokens in
    the job's output files, and ``tokens`` the number of its output tokens.
    """

    image: Tensor
    read_bytes: int
    read_seconds: float
    decode_seconds: float
    written_bytes: int
    tokens: int


def sample_files(files: Iterable[File], max_count: int = SAMPLED) -> tuple[int, list[File]]:
    """Count files, and choose some of them at random, all with the same probability.

    Args:
        files: the image files of a job. They are consumed one by one, so that millions of them need
            not fit into memory.
        max_count: largest number of files to choose.

    Returns:
        The number of all files, and the chosen files.
    """
    chance, sampled, count = Random(0), list[File](), 0
    for file in files:
        count += 1
        if len(sampled) < max_count:
            sampled.append(file)
        elif (index := chance.randrange(count)) < max_count:
            sampled[index] = file
    return count, sampled


def take_sample(
    files: Sequence[File],
    read_file: Callable[[File], bytes],
    encoder: Encoder,
    limits: Limits,
    written_bytes: Callable[[Tensor], int],
) -> tuple[Sample, list[Tensor]]:
    """Read and decode some images in one thread, and measure the time of each step.

    Args:
        files: the image files.
        read_file: returns the bytes of an image file.
        encoder: the encoder whose preprocessing is measured; it may be on the meta device.
        limits: keywords of ``preprocess`` that bound the size of an image.
        written_bytes: returns the bytes that the job writes for a decoded image uint8 [3, H, W].

    Returns:
        The means per image, and the decoded images.

    Raises:
        ValueError: none of the images can be read.
    """
    all_figures: list[_Measured] = []
    errors: list[str] = []
    with _one_thread():
        # The first call imports modules; without it, their time would be added to the first image.
        encoder.preprocess([torch.zeros(3, 64, 64, dtype=torch.uint8)], **limits._asdict())
        for file in files:
            start_time = time.perf_counter()
            try:
                data = read_file(file)
                seconds = time.perf_counter() - start_time
                all_figures.append(_measure(data, seconds, encoder, limits, written_bytes))
            except Exception as error:  # noqa: BLE001  # drivers of remote stores raise any class
                errors.append(f"{file.key}: {error}")
    if not all_figures:
        raise ValueError(f"none of {len(files)} sampled images can be read; {errors[0]}")
    columns = np.array([image_figures[1:5] for image_figures in all_figures])
    read_bytes, read_seconds, decode_seconds, mean_written_bytes = columns.mean(axis=0).tolist()
    tokens = [image_figures.tokens for image_figures in all_figures]
    sample = Sample(
        read_bytes, read_seconds, decode_seconds, mean_written_bytes, tokens, len(errors)
    )
    return sample, [image_figures.image for image_figures in all_figures]


def _measure(
    data: bytes,
    read_seconds: float,
    encoder: Encoder,
    limits: Limits,
    written_bytes: Callable[[Tensor], int],
) -> _Measured:
    item_encoder = encoder.item_encoder()
    start_time = time.thread_time()
    # With a stager, a job's threads only decode images, and resize them where the CPU does that.
    if item_encoder.stager is not None:
        item_encoder.stager.stage([data], [], limits, item_encoder.device)
    else:
        encoder.preprocess([data], **limits._asdict())
    decode_seconds = time.thread_time() - start_time
    image = to_rgb(data)
    tokens = item_encoder.tokens(encoder.preprocess([image], **limits._asdict()))
    output_bytes = written_bytes(image)
    return _Measured(image, len(data), read_seconds, decode_seconds, output_bytes, tokens)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread inside the block, as a decoding thread of a job has one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- rates ----------------------------------------------------------------------------------------


def measure_rate(
    item_encoder: EitherItemEncoder,
    images: Sequence[Tensor],
    limits: Limits,
    settings: ResultSettings,
    options: StreamOptions,
) -> Rate:
    """Encode decoded images over and over, and return how many images a device encodes per second.

    Args:
        item_encoder: the encoder to time, on the device to measure.
        images: decoded images uint8 [3, H, W].
        limits: keywords of ``preprocess`` that bound the size of an image.
        settings: pooling of the output.
        options: tokens per batch, and number of threads that preprocess images.
    """
    options = options._replace(progress=False, on_error="raise")

    def seconds_of(count: int) -> float:
        items = islice(cycle(images), count)
        start_time = time.perf_counter()
        with closing(stream_items(item_encoder, items, limits, settings, options)) as results:
            for _ in results:
                pass
        return time.perf_counter() - start_time

    seconds_of(1)  # an untimed warm-up run
    count = len(images)
    while (seconds := seconds_of(count)) < LEAST_SECONDS:
        count *= 4
    return Rate(count / seconds, f"measured on {_name_of(item_encoder.device)}")


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device}"


def committed_rate(encoder: Encoder, tokens: Sequence[int]) -> Rate | None:
    """Return the images per second of one GPU, from the measurements in :data:`RATES`.

    Args:
        encoder: the encoder, which a file identifies by its class and width.
        tokens: number of output tokens of each sampled image.

    Returns:
        The images per second; None if no file has such an encoder.
    """
    tower_identity = {"class": type(encoder).__name__, "features": encoder.num_features}
    for committed in (json.loads(path.read_text()) for path in RATES):
        for name, identity in committed["encoders"].items():
            if identity == tower_identity:
                measured_seconds = seconds_by_tokens(committed["towers"][name].values())
                seconds = sum(seconds_of(count, measured_seconds) for count in tokens) / len(tokens)
                measurement = committed["about"]
                return Rate(
                    1 / seconds, f"as {name} on one {measurement['gpu']} ({measurement['date']})"
                )
    return None


def seconds_by_tokens(sizes: Iterable[Mapping[str, float]]) -> dict[int, float]:
    """Return the mean seconds per image by number of output tokens, in ascending order of tokens.

    Args:
        sizes: measurements of one encoder, each with the keys "tokens" and "images per second".
    """
    seconds = defaultdict[int, list[float]](list)
    for size in sizes:
        seconds[int(size["tokens"])].append(1 / size["images per second"])
    return {tokens: sum(seconds[tokens]) / len(seconds[tokens]) for tokens in sorted(seconds)}


def seconds_of(tokens: int, measured_seconds: Mapping[int, float]) -> float:
    """Return the seconds that an image takes, interpolated between measured numbers of tokens.

    Args:
        tokens: number of output tokens of the image. Beyond the largest number that was measured,
            and below it if it is the only one, the seconds are in proportion to the tokens.
        measured_seconds: seconds per image by number of output tokens, in ascending order.
    """
    largest = max(measured_seconds)
    interpolated = float(np.interp(tokens, list(measured_seconds), list(measured_seconds.values())))
    ratio = tokens / largest
    return interpolated * (ratio if len(measured_seconds) == 1 else max(ratio, 1))
