"""The work of ``vitgraph embed``: the shards that are left are encoded in order and written."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from encoders import Encoder
from encoders.contract import EncoderOutput, Limits, PartialOutput
from encoders.inputs import ItemLike
from encoders.streams import (
    EitherItemEncoder,
    ItemError,
    ItemResult,
    ResultSettings,
    StreamOptions,
    stream_items,
)
from graphwrap import GraphedEncoder

from ..devices import DTYPES
from ..terminal import counted, readable
from .feature_store import FeatureStore, language_rows
from .manifest import FileList, Manifest
from .parquet_files import VECTORS, Array
from .records import JobReport, ShardStats
from .shard import Row, csv_bytes
from .shards import missing_of, read_all_stats, shards_of
from .sources.reading import File, ImageReader
from .storage import JOB, TENSOR, Storage
from .workers import Worker

SAMPLED = 16
"""The most images that are read to estimate the bytes of a job with whole outputs."""


class Calls(NamedTuple):
    """The limits, the pooling and the batching of an encoder's calls for the images of a job."""

    limits: Limits
    """The keywords of ``preprocess`` that bound the size of an image."""
    results: ResultSettings
    """The pooling of each image's output, or its whole output, and the most tokens per call."""
    stream: StreamOptions
    """The batching, the decoding threads, and the progress bar of the calls."""


class Job:
    """The shards of an embedding job that one process encodes and writes.

    Args:
        storage: the folder, local or remote, that shards and manifest are written to.
        manifest: the settings that determine every row, and the list of files.
        worker: rank of this process, and number of processes that share the job; it writes the
            shards whose number modulo that number is its rank.
        reader: reads the bytes of the images.
        calls: the limits, pooling and batches with which the encoder is called.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        worker: Worker,
        reader: ImageReader,
        calls: Calls,
    ) -> None:
        self.storage, self.manifest, self.worker = storage, manifest, worker
        self.files, self.reader, self.calls = FileList(storage, manifest), reader, calls
        settings = manifest.settings
        self.commit = settings["commit"]
        self.pool = settings["pool"]
        self.dtype: torch.dtype = DTYPES[settings["out_dtype"]]
        self.shards = shards_of(storage, manifest)
        self.missing = missing_of(self.shards)
        self.todo = worker.shards_of_worker(self.missing)
        self._files_of: dict[int, list[File]] = {}
        self._listing = threading.Lock()

    def write_missing_shards(self, encoder: Encoder | GraphedEncoder) -> None:
        """Encode and write the shards of this process that are not written yet, in ascending order.

        Args:
            encoder: the encoder of the job's checkpoint, or graphs of it.

        Raises:
            OSError: the folder cannot be written to, or the disk is full.
        """
        last_items = self.manifest.items - (len(self.shards) - 1) * self.manifest.items_per_shard
        items_per_shard = self.manifest.items_per_shard
        total = sum(
            last_items if number == len(self.shards) - 1 else items_per_shard
            for number in self.todo
        )
        empty = self._empty_arrays(encoder)
        limits, settings, options = self.calls
        options = options._replace(total=total, per_line=items_per_shard)
        results = stream_items(encoder.item_encoder(), self._tasks(), limits, settings, options)
        with closing(results):
            for number in self.todo:
                self._write_shard(number, results, empty)
            next(results, None)  # the stream ends, and its progress bar prints the last line

    def prepare(self, encoder: Encoder | GraphedEncoder) -> list[str]:
        """Check that the settings of the job fit the encoder, and say how much there is to encode.

        Args:
            encoder: the encoder of the job's checkpoint, or graphs of it.

        Returns:
            Lines of text for the user.

        Raises:
            ValueError: settings that do not fit the encoder, or too little space for the result.
        """
        item_encoder = encoder.item_encoder()
        stream_items(item_encoder, [], *self.calls).close()
        limits = self.calls.limits
        if self.manifest.settings["format"] == "vllm":
            FeatureStore(
                self.storage.name,
                encoder,
                min_pixels=limits.min_pixels,
                max_pixels=limits.max_pixels,
                max_tiles=limits.max_tiles,
                max_soft_tokens=limits.max_soft_tokens,
            )
        empty = self._empty_arrays(encoder)
        if self.pool == "none":
            total, description = self._estimate(item_encoder, empty)
        else:
            encoder.preprocess([_blank()], **limits._asdict())
            width = empty[VECTORS].shape[1]
            total = self.manifest.items * width * self.dtype.itemsize
            description = f"{self.manifest.items:,} vectors [{width}], about {readable(total)}"
        self._require_space(total)
        source_bytes = self.manifest.files["bytes"]
        count = counted(self.manifest.items, "file")
        count += f", {readable(source_bytes)}" * (source_bytes > 0)
        done_count = len(self.shards) - len(self.missing)
        lines = [f"{count}; {counted(len(self.shards), 'shard')}, {done_count} of them done"]
        if self.worker.size > 1:
            lines.append(f"{self.worker} writes {counted(len(self.todo), 'shard')}")
        dtype = self.manifest.settings["out_dtype"]
        return [*lines, f"writes {description} of {dtype} to {self.storage.name}"]

    def _empty_arrays(self, encoder: Encoder | GraphedEncoder) -> dict[str, Array]:
        """Return an array without rows per field that the job writes.

        Args:
            encoder: the encoder of the job's checkpoint, or graphs of it. Unless vectors are
                written, it encodes a small blank image.

        Raises:
            ValueError: the encoder has none of the fields, or refuses the limits of the job.
        """
        if self.pool != "none":
            width = encoder.num_features if self.pool == "cls" else encoder.out_features
            return self._arrays(torch.zeros(0, width))
        with torch.no_grad():
            (output,) = encoder.encode([_blank()], **self.calls.limits._asdict())
        arrays = {name: array[:0] for name, array in self._arrays(output).items()}
        if not arrays:
            raise ValueError(
                f"--fields {','.join(self.manifest.settings['fields'])}: this encoder has no "
                "DeepStack features; name another field"
            )
        return arrays

    def _require_space(self, total: float) -> None:
        """Check that there is room for the shards that all workers have still to write.

        Args:
            total: bytes of all shards of the job.

        Raises:
            ValueError: fewer bytes are free.
        """
        needed_bytes = total * len(self.missing) / len(self.shards)
        free_bytes = self.storage.free()
        if free_bytes is not None and needed_bytes > free_bytes:
            raise ValueError(
                f"--out {self.storage.name}: about {readable(needed_bytes)} are still to be "
                f"written, and {readable(free_bytes)} are free; free some space, give another "
                "folder or --out-dtype float16"
            )

    def _estimate(
        self, item_encoder: EitherItemEncoder, empty: Mapping[str, Array]
    ) -> tuple[float, str]:
        """Estimate the bytes of the whole outputs of all images from the sizes of up to 16 images.

        Args:
            item_encoder: the encoder as ``encode`` uses it.
            empty: an array without rows per field that the job writes.

        Returns:
            The bytes, and a text that says them and how they are known.
        """
        sizes = []
        count = self.manifest.items
        for number in range(0, count, -(-count // SAMPLED)):
            item = self.reader.item(self.files.file(number))
            try:
                inputs = item_encoder.encoder.preprocess([item], **self.calls.limits._asdict())
            except Exception:  # noqa: BLE001  # drivers of stores and data sets raise any class
                continue  # encoding reports an image that cannot be read
            specs = [
                spec
                for name, path in inputs.paths.items()
                for spec in item_encoder.paths[name].item_specs(path.grid_thw)
            ]
            rows = dict.fromkeys(empty, sum(spec.output_tokens for spec in specs))
            if "last_hidden_state" in rows:
                rows["last_hidden_state"] = sum(spec.input_size for spec in specs)
            numbers = sum(rows[name] * prod(array.shape[1:]) for name, array in empty.items())
            sizes.append(numbers * self.dtype.itemsize)
        if not sizes:
            return 0, "an unknown number of bytes (no image of a sample can be read)"
        total = sum(sizes) / len(sizes) * count
        return total, f"about {readable(total)}, by a sample of {len(sizes)} images,"

    def _shard_files(self, number: int) -> list[File]:
        """Return the files of shard ``number``; none if another process has written that shard."""
        with self._listing:
            if number not in self._files_of:
                is_done = self.shards[number].is_done
                self._files_of[number] = [] if is_done else self.files.shard(number)
            return self._files_of[number]

    def _tasks(self) -> Iterator[tuple[str, ItemLike]]:
        """Yield key and image of each file that this process encodes, in a worker thread."""
        for number in self.todo:
            for file in self._shard_files(number):
                yield file.key, self.reader.item(file)

    def _write_shard(
        self, number: int, results: Iterator[ItemResult], empty: Mapping[str, Array]
    ) -> None:
        """Write shard ``number`` from the next results of the stream.

        A shard without images that could be encoded gets the arrays of ``empty``.
        """
        start_time, files = time.perf_counter(), self._shard_files(number)
        if not files:
            return
        rows: dict[int, Row] = {}
        errors: dict[int, str] = {}
        for index, file in enumerate(files):
            result = next(results)
            if isinstance(result.value, ItemError):
                errors[index] = " ".join(str(result.value.error).split())
            else:
                assert result.grid is not None
                arrays = self._arrays(result.value)
                rows[index] = Row(file.key, result.grid, arrays, self.reader.keys.get(file, ""))
            self.reader.keys.pop(file, None)
        for index, error in self.reader.changed(files).items():
            rows.pop(index, None)
            errors[index] = error
        stats: ShardStats = {
            "shard": number,
            "items": len(files),
            "rows": len(rows),
            "seconds": round(time.perf_counter() - start_time, 3),
            "worker": f"{self.worker.rank}/{self.worker.size}",
            "written": round(time.time(), 3),
            "errors": [
                {"key": files[index].key, "error": errors[index], "place": index}
                for index in sorted(errors)
            ],
        }
        self.shards[number].write([rows[index] for index in sorted(rows)], empty, stats)
        del self._files_of[number]

    def _arrays(self, value: EncoderOutput | PartialOutput | Tensor) -> dict[str, Array]:
        """Return one image's result as numpy arrays by name, in the dtype that the job writes.

        Args:
            value: a pooled vector, returned under :data:`VECTORS`, or a whole output, of which the
                fields of the job are returned.

        Raises:
            ValueError: a value is too large for float16.
        """
        tensors = {VECTORS: value} if isinstance(value, Tensor) else self._fields(value)
        arrays = {}
        for name, tensor in tensors.items():
            converted = tensor.to("cpu", self.dtype)
            if self.dtype == torch.float16 and converted.isinf().sum() > tensor.isinf().sum().cpu():
                raise ValueError(
                    f"--out-dtype float16 cannot hold {name} up to {float(tensor.abs().max()):.0f} "
                    "(65504 at most); write float32"
                )
            # Numpy has no bfloat16, whose values float32 holds exactly.
            is_bf16 = converted.dtype == torch.bfloat16
            arrays[name] = (converted.float() if is_bf16 else converted).numpy()
        return arrays

    def _fields(self, output: EncoderOutput | PartialOutput) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        if self.manifest.settings["format"] == "vllm":
            return {TENSOR: language_rows(output)}
        for name in self.manifest.settings["fields"]:
            field = output._asdict()[name]
            if isinstance(field, tuple):
                tensors |= {f"deepstack.{number}": layer for number, layer in enumerate(field)}
            else:
                tensors[name] = field
        return tensors

    def finish(self) -> JobReport:
        """Count the images of the job that are encoded, and write ``errors.csv`` if some failed.

        Returns:
            The counts, with the exit code 0, or 3 if files could not be encoded.
        """
        if missing := missing_of(self.shards):
            return self._finish_own(missing)
        stats = read_all_stats(self.shards)
        errors = [(error["key"], error["error"]) for record in stats for error in record["errors"]]
        rows, name = sum(shard_stats["rows"] for shard_stats in stats), self.storage.name
        files, shards = counted(self.manifest.items, "file"), counted(len(self.shards), "shard")
        line = f"{name}: {rows:,} of {files} in {shards}"
        if not errors:
            self.storage.delete(["errors.csv"])
            return JobReport([line], 0)
        with self.storage.exclusive(JOB), self.storage.writing("errors.csv") as temporary:
            temporary.write_bytes(csv_bytes([("key", "error"), *errors]))
        failures = f"{counted(len(errors), 'file')} could not be encoded: {name}/errors.csv"
        return JobReport([line, failures], 3)

    def _finish_own(self, missing: Sequence[int]) -> JobReport:
        """Count what this worker has written, while others still work; the last one writes
        ``errors.csv``.

        Args:
            missing: numbers of the shards that are not written yet.

        Returns:
            The counts, with the exit code 0, or 3 if files of this worker could not be encoded.
        """
        own_shards = set(self.worker.shards_of_worker(range(len(self.shards)))).difference(missing)
        stats = read_all_stats([self.shards[number] for number in sorted(own_shards)])
        errors = sum(len(shard_stats["errors"]) for shard_stats in stats)
        shard_text, error_text = counted(len(own_shards), "shard"), counted(errors, "error")
        line = (
            f"{self.storage.name}: {self.worker} has written its {shard_text}, with {error_text}; "
            f"{len(missing)} of all {len(self.shards)} are left to other workers"
        )
        return JobReport([line], 3 if errors else 0)


def _blank() -> Tensor:
    """Return a small black image, uint8 [3, 64, 64]."""
    return torch.zeros(3, 64, 64, dtype=torch.uint8)
