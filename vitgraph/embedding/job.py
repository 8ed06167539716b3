"""The work of one ``vitgraph embed`` process: it encodes and writes shards not written yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from math import prod
from typing import TYPE_CHECKING, NamedTuple

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

from ..devices import DTYPES, cast_in_range, device_text
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

if TYPE_CHECKING:
    from weights import JsonObject

SAMPLED = 16
"""The most images that are read to estimate the disk space of a job that writes all tokens."""


class Calls(NamedTuple):
    """The arguments with which the encoder is called for the images of a job."""

    limits: Limits
    """The keywords of ``preprocess`` that bound the size of an image."""
    results: ResultSettings
    """The pooling of each output ("none" keeps all tokens), and the most tokens per call."""
    stream: StreamOptions
    """The tokens per batch, the number of decoding threads, and whether to show progress."""


class Job:
    """The shards of an embedding job that one process encodes and writes.

    Args:
        storage: the folder of the job, local or remote, to which shards are written.
        manifest: the settings of the job, and the list of its image files.
        worker: rank of this process among those that share the job, and their number (size). The
            process writes every shard whose number modulo the size is the rank.
        reader: reads the bytes of the images.
        calls: the bounds of image size, the pooling and the batching of the encoder's calls.
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
            encoder: the encoder of the job's checkpoint, or CUDA graphs of it.

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
            next(results, None)  # lets the generator end, so that its progress bar is completed

    def prepare(self, encoder: Encoder | GraphedEncoder) -> list[str]:
        """Check that the settings of the job fit the encoder, and describe the work to be done.

        Args:
            encoder: the encoder of the job's checkpoint, or CUDA graphs of it.

        Returns:
            Lines of text for the user: the numbers of files and shards, and the bytes to write.

        Raises:
            ValueError: the settings do not fit the encoder, or the disk has too little free space.
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
        lines.append(f"writes {description} of {dtype} to {self.storage.name}")
        return [*lines, f"encodes on {device_text(item_encoder.device)}"]

    def _empty_arrays(self, encoder: Encoder | GraphedEncoder) -> dict[str, Array]:
        """Return an array [0, .., D] for each output field that the job writes, by its name.

        The arrays have the dtypes and widths of the results but no rows.

        Args:
            encoder: the encoder of the job's checkpoint, or CUDA graphs of it. If the job writes
                all tokens, it encodes a small blank image to find the widths.

        Raises:
            ValueError: the encoder has none of the fields, or refuses the bounds of image size.
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
        """Check that the disk has room for all shards of the job that are not written yet.

        Args:
            total: bytes of all shards of the job, written or not.

        Raises:
            ValueError: there is too little free space.
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
        """Estimate the bytes of a job that writes all tokens, from the sizes of up to 16 images.

        Args:
            item_encoder: holds the encoder (``.encoder``) and the functions that count the output
                tokens of an image.
            empty: an array without rows for each output field that the job writes, by its name.

        Returns:
            The number of bytes, and a text such as "about 3 GB, by a sample of 16 images,".
        """
        sizes = []
        count = self.manifest.items
        for number in range(0, count, -(-count // SAMPLED)):
            item = self.reader.item(self.files.file(number))
            try:
                inputs = item_encoder.encoder.preprocess([item], **self.calls.limits._asdict())
            except Exception:  # noqa: BLE001  # drivers of remote stores raise errors of any class
                continue  # `_write_shard` will report this image in errors.csv
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
        """Return the image files of shard ``number``, or [] if another process has written it."""
        with self._listing:
            if number not in self._files_of:
                is_done = self.shards[number].is_done
                self._files_of[number] = [] if is_done else self.files.shard(number)
            return self._files_of[number]

    def _tasks(self) -> Iterator[tuple[str, ItemLike]]:
        """Yield (key, image) for each file that this process encodes; runs in a thread."""
        for number in self.todo:
            for file in self._shard_files(number):
                yield file.key, self.reader.item(file)

    def _write_shard(
        self, number: int, results: Iterator[ItemResult], empty: Mapping[str, Array]
    ) -> None:
        """Write shard ``number`` from the next results of the encoder, one per image.

        If no image of the shard could be encoded, the arrays without rows in ``empty`` are written.
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
            value: a pooled vector, which is returned under the name :data:`VECTORS`, or the
                encoder's whole output, from which the fields that the job writes are returned.

        Raises:
            ValueError: a finite number of ``value`` is too large for the dtype.
        """
        tensors = {VECTORS: value} if isinstance(value, Tensor) else self._fields(value)
        arrays = {}
        for name, tensor in tensors.items():
            converted = cast_in_range(tensor, self.dtype, name).cpu()
            # Numpy has no bfloat16; float32 represents all of its values exactly.
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
        """Count the encoded images of the job; if some images failed, list them in ``errors.csv``.

        While other workers still write shards, only the images of this worker are counted, and no
        ``errors.csv`` is written.

        Returns:
            The counts as text, and the exit code: 0, or 3 if images could not be encoded.
        """
        if missing := missing_of(self.shards):
            return self._finish_own(missing)
        stats = read_all_stats(self.shards)
        errors = [(error["key"], error["error"]) for record in stats for error in record["errors"]]
        rows, name = sum(shard_stats["rows"] for shard_stats in stats), self.storage.name
        files, shards = counted(self.manifest.items, "file"), counted(len(self.shards), "shard")
        line = f"{name}: {rows:,} of {files} in {shards}"
        summary = self._summary(rows, len(errors), 0)
        if not errors:
            self.storage.delete(["errors.csv"])
            return JobReport([line], 0, summary)
        with self.storage.exclusive(JOB), self.storage.writing("errors.csv") as temporary:
            temporary.write_bytes(csv_bytes([("key", "error"), *errors]))
        failures = (
            f"{counted(len(errors), 'file')} could not be encoded: {name}/errors.csv; the same "
            "command with --retry-errors tries them again"
        )
        return JobReport([line, failures], 3, summary)

    def _summary(self, rows: int, errors: int, missing_shards: int) -> JsonObject:
        """Return the counts of a report for programs."""
        return {
            "folder": self.storage.name,
            "files": self.manifest.items,
            "rows": rows,
            "errors": errors,
            "shards": len(self.shards),
            "missing_shards": missing_shards,
        }

    def _finish_own(self, missing: Sequence[int]) -> JobReport:
        """Count the shards and errors of this worker, while other workers still write theirs.

        Args:
            missing: numbers of the shards that no worker has written yet.

        Returns:
            The counts as text, and the exit code: 0, or 3 if images of this worker could not be
            encoded.
        """
        own_shards = set(self.worker.shards_of_worker(range(len(self.shards)))).difference(missing)
        stats = read_all_stats([self.shards[number] for number in sorted(own_shards)])
        errors = sum(len(shard_stats["errors"]) for shard_stats in stats)
        shard_text, error_text = counted(len(own_shards), "shard"), counted(errors, "error")
        line = (
            f"{self.storage.name}: {self.worker} has written its {shard_text}, with {error_text}; "
            f"{len(missing)} of all {len(self.shards)} are left to other workers"
        )
        rows = sum(shard_stats["rows"] for shard_stats in stats)
        return JobReport([line], 3 if errors else 0, self._summary(rows, errors, len(missing)))


def _blank() -> Tensor:
    """Return a small black image, uint8 [3, 64, 64]."""
    return torch.zeros(3, 64, 64, dtype=torch.uint8)
