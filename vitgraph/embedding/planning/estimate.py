"""The arithmetic of ``vitgraph embed --plan``: hours, bytes and cores of a job.

    images per second of one GPU = min(rate of the GPU, threads per GPU / seconds of one thread)
    hours = images / (GPUs x images per second of one GPU) / 3600

"Seconds of one thread" is the time in which a thread reads and decodes one image; "rate of the GPU"
is the number of images per second that it encodes. :mod:`.sample` measures both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ...terminal import counted, format_table, readable

GPUS = (1, 8, 64)
"""The numbers of GPUs for which an estimate has a row, if ``--gpus`` does not give a number."""
THREADS_PER_GPU = 12
"""The decoding threads per GPU that an estimate assumes: the number of cores per GPU of a typical
host with eight GPUs."""


class Sample(NamedTuple):
    """Means per image, measured on a random sample of the images of a job.

    ``read_bytes`` is the size of the image file, ``written_bytes`` the size of the image's vector
    or tokens in the job's output files.
    """

    read_bytes: float
    read_seconds: float
    """The wall-clock seconds in which one thread reads an image file, with waiting for the disk."""
    decode_seconds: float
    """The CPU seconds in which one thread decodes and resizes an image."""
    written_bytes: float
    tokens: Sequence[int]
    """The number of output tokens of each image that was sampled."""
    unreadable: int
    """The number of images that were sampled, too, but cannot be read or decoded."""


class Rate(NamedTuple):
    """The images per second that one device encodes, and a text that names the measurement."""

    per_second: float
    known_by: str


class Estimate(NamedTuple):
    """The estimated speed and duration of an embedding job.

    ``threads`` is the number of threads per GPU that read and decode images.
    """

    images: int
    sample: Sample
    rate: Rate | None
    """The images per second that one GPU encodes; None if this was not measured for the encoder."""
    threads: int = THREADS_PER_GPU

    @property
    def decoded_per_second(self) -> float:
        """The images per second that the threads of one GPU read and decode."""
        return self.threads / (self.sample.read_seconds + self.sample.decode_seconds)

    @property
    def per_second(self) -> float:
        """The images per second of a job on one GPU: the smaller of the images that the GPU encodes
        and the images that its threads read and decode."""
        gpu = self.rate.per_second if self.rate else float("inf")
        return min(gpu, self.decoded_per_second)

    @property
    def bottleneck(self) -> str:
        """The step that limits the speed of the job: "encoding", "reading" or "decoding"."""
        if self.rate and self.rate.per_second <= self.decoded_per_second:
            return "encoding"
        slower = self.sample.read_seconds > self.sample.decode_seconds
        return "reading" if slower else "decoding"

    @property
    def cores(self) -> float:
        """The number of cores per GPU that decoding keeps busy at the job's speed."""
        return self.per_second * self.sample.decode_seconds

    def hours(self, gpus: int) -> float:
        """Return the hours of the whole job on ``gpus`` GPUs, without the startup of the worker
        processes, which takes about a minute."""
        return self.images / (gpus * self.per_second) / 3600


def report(estimate: Estimate, source: str, gpus: int | None, output_description: str) -> str:
    """Return an estimate as text: the means of the sample, and a table of hours by number of GPUs.

    Args:
        estimate: the estimate of the job.
        source: name of the folder, list or dataset of the images.
        gpus: number of GPUs for which the table has its only row; None gives a row for each number
            in :data:`GPUS`.
        output_description: what the job writes for each image, such as "vectors [1024], float32".
    """
    images, sample, rate = estimate.images, estimate.sample, estimate.rate
    tokens = f"{statistics.mean(sample.tokens):,.0f} tokens ({min(sample.tokens):,} to "
    tokens += f"{max(sample.tokens):,})"
    bad = f", {sample.unreadable} more cannot be encoded" if sample.unreadable else ""
    head = [
        f"{source}: {counted(images, 'image')}",
        f"sample: {counted(len(sample.tokens), 'image')}{bad}; on average "
        f"{readable(sample.read_bytes)} and {tokens}",
        f"one thread: {sample.read_seconds * 1e3:,.1f} ms to read, "
        f"{sample.decode_seconds * 1e3:,.1f} ms to decode; {estimate.threads} threads per GPU "
        f"(--workers) make {estimate.decoded_per_second:,.0f} images per second",
        f"one device: {rate.per_second:,.0f} images per second, {rate.known_by}"
        if rate
        else "one device: its rate is not known; --device cuda measures it on this machine. Below "
        "is the time that only the threads would take",
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
        f"bottleneck: {estimate.bottleneck}",
        f"bytes: {readable(images * sample.read_bytes)} to read, about {readable(total)} to write "
        f"({output_description})",
    ]
    return "\n".join([*head, table, *tail])


def _format_hours(hours: float) -> str:
    """Return hours as text with two decimals, or two significant digits if they are below 0.01."""
    return f"{hours:,.2f}" if hours >= 0.01 else f"{hours:.2g}"
