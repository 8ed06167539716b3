"""The arithmetic of ``vitgraph embed --plan``: hours, bytes and cores of a job.

    images per second of one GPU = min(rate of the GPU, threads per GPU / seconds of one thread)
    hours = images / (GPUs x images per second of one GPU) / 3600

A thread reads an image and decodes it. What goes in is measured by :mod:`.sample`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ...terminal import format_table, readable

GPUS = (1, 8, 64)
"""The numbers of GPUs for which an estimate has a row, unless ``--gpus`` gives one."""
THREADS_PER_GPU = 12
"""The decoding threads that are planned per GPU: the cores that a usual host of eight GPUs has per
GPU."""


class Sample(NamedTuple):
    """Means per image, measured on a few images of a source.

    ``read_bytes`` is the size of the image file, ``written_bytes`` that of its output in a shard.
    """

    read_bytes: float
    read_seconds: float
    """The seconds in which one thread reads an image, waiting included."""
    decode_seconds: float
    """The seconds in which one core decodes an image."""
    written_bytes: float
    tokens: Sequence[int]
    """The number of output tokens of each image that was sampled."""
    unreadable: int
    """The number of further images of the sample that cannot be encoded."""


class Rate(NamedTuple):
    """The images per second of one device, and a text that says where that number is from."""

    per_second: float
    known_by: str


class Estimate(NamedTuple):
    """The estimated speed and duration of an embedding job.

    ``threads`` is the number of threads per GPU that read and decode images.
    """

    images: int
    sample: Sample
    rate: Rate | None
    """The images per second that one GPU encodes, None if that was never measured for the tower."""
    threads: int = THREADS_PER_GPU

    @property
    def decoded_per_second(self) -> float:
        """The images per second that the threads of one GPU read and decode."""
        return self.threads / (self.sample.read_seconds + self.sample.decode_seconds)

    @property
    def per_second(self) -> float:
        """The images per second with one GPU: the least of what it encodes and what its threads
        decode."""
        gpu = self.rate.per_second if self.rate else float("inf")
        return min(gpu, self.decoded_per_second)

    @property
    def binds(self) -> str:
        """The resource that limits the speed of the job: "the GPU", "reading" or "decoding"."""
        if self.rate and self.rate.per_second <= self.decoded_per_second:
            return "the GPU"
        slower = self.sample.read_seconds > self.sample.decode_seconds
        return "reading" if slower else "decoding"

    @property
    def cores(self) -> float:
        """The number of cores per GPU that decoding keeps busy at this speed."""
        return self.per_second * self.sample.decode_seconds

    def hours(self, gpus: int) -> float:
        """Return the hours of the whole job on ``gpus`` GPUs, without the minute in which a worker
        starts."""
        return self.images / (gpus * self.per_second) / 3600


def report(estimate: Estimate, source: str, gpus: int | None, output_description: str) -> str:
    """Return an estimate as text: the figures of the sample, and a table by number of GPUs.

    Args:
        estimate: the estimate of the job.
        source: name of the source of the images.
        gpus: number of GPUs in the only row of the table; None shows several rows.
        output_description: description of what is written for each image.
    """
    images, sample, rate = estimate.images, estimate.sample, estimate.rate
    tokens = f"{statistics.mean(sample.tokens):,.0f} tokens ({min(sample.tokens):,} to "
    tokens += f"{max(sample.tokens):,})"
    bad = f", {sample.unreadable} more cannot be encoded" if sample.unreadable else ""
    head = [
        f"{source}: {images:,} images",
        f"sample: {len(sample.tokens)} images{bad}; on average {readable(sample.read_bytes)} and "
        f"{tokens}",
        f"one thread: {sample.read_seconds * 1e3:,.1f} ms to read, "
        f"{sample.decode_seconds * 1e3:,.1f} ms to decode; {estimate.threads} threads per GPU "
        f"(--workers) make {estimate.decoded_per_second:,.0f} images per second",
        f"one device: {rate.per_second:,.0f} images per second, {rate.known_by}"
        if rate
        else "one device: its rate is not known; --device cuda measures it on this machine. Below "
        "stands what the threads alone would take",
        "",
    ]
    rows = [
        (
            f"{count}",
            f"{count * estimate.per_second:,.0f}",
            _format_hours(estimate.hours(count)),
            f"{count * estimate.cores:,.1f}",
            f"{count * estimate.per_second * sample.read_bytes / 1e6:,.1f}",
        )
        for count in ([gpus] if gpus else GPUS)
    ]
    table = format_table(("GPUs", "images/s", "hours", "cores", "MB/s read"), rows)
    total = images * sample.written_bytes
    tail = [
        "",
        f"binds: {estimate.binds}",
        f"bytes: {readable(images * sample.read_bytes)} to read, about {readable(total)} to write "
        f"({output_description})",
    ]
    return "\n".join([*head, table, *tail])


def _format_hours(hours: float) -> str:
    """Return hours with two decimals, or with two significant digits if they are below 0.01."""
    return f"{hours:,.2f}" if hours >= 0.01 else f"{hours:.2g}"
