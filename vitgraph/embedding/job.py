"""The work of one ``vitgraph embed`` process: it encodes and writes shards not written yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import closing
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from encoders import Encoder, VisionEncoder
from encoders.contract import EncoderOutput, Limits, PartialOutput
from encoders.inputs import ItemLike, read_item
from encoders.streams import (
    EitherItemEncoder,
    EncodedItem,
    ItemError,
    ItemResult,
    ResultSettings,
    StreamOptions,
    stream_items,
)
from graphwrap import GraphedEncoder

from ..devices import DTYPES, device_text
from ..terminal import counted, readable
from .block_fields import PREFIX, is_block, stack_of
from .collector import Collector
from .feature_store import FeatureStore
from .large_images import MOST_TOKENS, warn_if_large
from .manifest import FileList, Manifest
from .parquet_files import VECTORS, Array
from .records import ShardStats
from .shard import Row, rows_by_place
from .shard_writer import ShardWriter
from .shards import missing_of, read_all_stats, shards_of
from .sources.reading import File, ImageReader
from .storage import Storage
from .workers import Worker

SAMPLED = 16
"""The most images that are read to estimate the disk space of a job that writes all tokens."""
TILED = 1536
"""The side in pixels of an image that every tower with an input path "tiles" divides into tiles."""


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
        retry_errors: whether to encode the images again that could not be encoded, in the shards of
            this process.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        worker: Worker,
        reader: ImageReader,
        calls: Calls,
        retry_errors: bool = False,
    ) -> None:
        self.storage, self.manifest, self.worker = storage, manifest, worker
        self.files, self.reader, self.calls = FileList(storage, manifest), reader, calls
        settings = manifest.settings
        self.commit = settings["commit"]
        self.pool = settings["pool"]
        self.dtype: torch.dtype = DTYPES[settings["out_dtype"]]
        self.of_blocks = any(map(is_block, settings["fields"]))
        """Whether the job writes outputs of blocks."""
        self.shards = shards_of(storage, manifest)
        self.missing = missing_of(self.shards)
        missing = set(self.missing)
        done = [shard for shard in self.shards if shard.number not in missing]
        own = set(worker.shards_of_worker(shard.number for shard in done)) if retry_errors else ()
        self.failed = {
            stats["shard"]: [error["place"] for error in stats["errors"]]
            for stats in read_all_stats([shard for shard in done if shard.number in own])
            if stats["errors"]
        }
        """The places of the images to try again, by the number of their finished shard."""
        self.todo = sorted([*worker.shards_of_worker(self.missing), *self.failed])
        self._files_of: dict[int, dict[int, File]] = {}
        self._empty: Mapping[str, Array] = {}
        self._listing = threading.Lock()
        self.is_warned = False
        """Whether the user was warned about an image that makes very many tokens."""

    def write_missing_shards(self, encoder: Encoder | GraphedEncoder) -> None:
        """Encode and write the shards of this process that are not written yet, in ascending order.

        Args:
            encoder: the encoder of the job's checkpoint, or CUDA graphs of it.

        Raises:
            OSError: the folder cannot be written to, or the disk is full.
        """
        items_per_shard, failed = self.manifest.items_per_shard, self.failed
        total = sum(
            len(failed[number]) if number in failed else self._items(number) for number in self.todo
        )
        empty, item_encoder = self._empty_arrays(encoder), encoder.item_encoder()
        collector = Collector(self.manifest.settings, _paths_of(encoder))
        options = self.calls.stream._replace(
            total=total, per_line=items_per_shard, collect=collector
        )
        results = stream_items(item_encoder, self._tasks(), *self.calls[:2], options)
        with closing(results), ShardWriter() as writer:
            for number in self.todo:
                self._write_shard(number, results, item_encoder, empty, writer)
            next(results, None)  # lets the generator end, so that its progress bar is completed

    def _warn_if_large(
        self, file: File, result: ItemResult, item_encoder: EitherItemEncoder
    ) -> None:
        """Warn about the first image of this process that makes too many tokens."""
        if self.is_warned or file.media != "image" or not (result.grid and result.layout):
            return
        if prod(result.grid) > MOST_TOKENS:  # patches, of which at least one makes a token
            self.is_warned = warn_if_large(file.key, item_encoder.tokens(result.layout))

    def _items(self, number: int) -> int:
        """Return the number of images in shard ``number``."""
        per_shard = self.manifest.items_per_shard
        return min(per_shard, self.manifest.items - number * per_shard)

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
            prefix_rows = max(path.prefix_rows for path in _paths_of(encoder).values())
            total, description = self._estimate(item_encoder, empty, prefix_rows)
        else:
            encoder.preprocess([_blank()], **limits._asdict())
            width = empty[VECTORS].shape[1]
            total = self.manifest.items * width * self.dtype.itemsize
            vectors = counted(self.manifest.items, "vector")
            description = f"{vectors} [{width}], about {readable(total)}"
        self._require_space(total)
        source_bytes = self.manifest.files["bytes"]
        count = counted(self.manifest.items, "file")
        count += f", {readable(source_bytes)}" * (source_bytes > 0)
        done_count = len(self.shards) - len(self.missing)
        lines = [f"{count}; {counted(len(self.shards), 'shard')}, {done_count} of them done"]
        if self.worker.size > 1:
            lines.append(f"{self.worker} writes {counted(len(self.todo), 'shard')}")
        if failed := sum(map(len, self.failed.values())):
            lines.append(f"tries {counted(failed, 'file')} with errors again")
        dtype = self.manifest.settings["out_dtype"]
        lines.append(f"writes {description} of {dtype} to {self.storage.name}")
        return [*lines, f"encodes on {device_text(item_encoder.device)}"]

    def _empty_arrays(self, encoder: Encoder | GraphedEncoder) -> Mapping[str, Array]:
        """Return an array [0, .., D] for each output field that the job writes, by its name.

        The arrays have the dtypes and widths of the results but no rows. The encoder, always the
        same, runs once.
        """
        if self._empty:
            return self._empty
        item_encoder, paths = encoder.item_encoder(), _paths_of(encoder)
        fields = self.manifest.settings["fields"]
        has_path = self.of_blocks and stack_of(fields)
        inputs = item_encoder.preprocess([_blank(TILED if has_path else 64)], (), self.calls.limits)
        value: EncoderOutput | PartialOutput | Tensor
        with torch.no_grad():
            if self.pool == "none":
                (value,) = item_encoder.encode(lambda: inputs)
            else:
                (value,) = item_encoder.embed(lambda: inputs, self.calls.results)
        self._empty = Collector(self.manifest.settings, paths).empty(EncodedItem("", value, inputs))
        if not self._empty:
            raise ValueError(
                f"--fields {','.join(fields)}: this encoder has no DeepStack features; name "
                "another field"
            )
        return self._empty

    def _require_space(self, total: float) -> None:
        """Check that the disk has room for all shards of the job that are not written yet."""
        needed_bytes = total * len(self.missing) / len(self.shards)
        free_bytes = self.storage.free()
        if free_bytes is not None and needed_bytes > free_bytes:
            raise ValueError(
                f"--out {self.storage.name}: about {readable(needed_bytes)} are still to be "
                f"written, and {readable(free_bytes)} are free; free some space, give another "
                "folder or --out-dtype float16"
            )

    def _estimate(
        self, item_encoder: EitherItemEncoder, empty: Mapping[str, Array], prefix_rows: int
    ) -> tuple[float, str]:
        """Estimate the bytes of a job that writes all tokens, from the sizes of up to 16 images.

        ``prefix_rows`` is the number of rows before the patches of a segment.
        """
        sizes = []
        count = self.manifest.items
        for number in range(0, count, -(-count // SAMPLED)):
            images, videos = read_item(self.reader.item(self.files.file(number)))
            try:
                inputs = item_encoder.preprocess(images, videos, self.calls.limits)
            except Exception:  # noqa: BLE001  # drivers of remote stores raise errors of any class
                continue  # `_write_shard` will report this image in errors.csv
            specs = [
                spec
                for name, path in inputs.paths.items()
                for spec in item_encoder.paths[name].item_specs(path.grid_thw)
            ]
            rows = dict.fromkeys(empty, sum(spec.output_tokens for spec in specs))
            if self.of_blocks:
                most = self.manifest.settings["sample"]
                patches = sum(prod(grid) for grid in inputs.grid_thw.tolist())
                rows = dict.fromkeys(empty, min(most or patches, patches))
                before = sum(spec.segments for spec in specs) * prefix_rows
                rows |= {name: before for name in empty if name.endswith(PREFIX)}
            if "last_hidden_state" in rows:
                rows["last_hidden_state"] = sum(spec.hidden_rows for spec in specs)
            numbers = sum(rows[name] * prod(array.shape[1:]) for name, array in empty.items())
            sizes.append(numbers * self.dtype.itemsize)
        if not sizes:
            return 0, "an unknown number of bytes (no image of a sample can be read)"
        total = sum(sizes) / len(sizes) * count
        return total, f"about {readable(total)}, by a sample of {counted(len(sizes), 'image')},"

    def _shard_files(self, number: int) -> dict[int, File]:
        """Return the image files of shard ``number`` to encode, each by its place in the shard.

        There are none if another process has written the shard. A file that is tried again is read
        as it is now, whatever its size and time were when the job listed it.
        """
        with self._listing:
            if number not in self._files_of:
                files = dict[int, File]()
                if number in self.failed:
                    listed = self.files.shard(number)
                    files = {place: _as_it_is(listed[place]) for place in self.failed[number]}
                elif not self.shards[number].is_done:
                    files = dict(enumerate(self.files.shard(number)))
                self._files_of[number] = files
            return self._files_of[number]

    def _tasks(self) -> Iterator[tuple[str, ItemLike]]:
        """Yield (key, image) for each file that this process encodes; runs in a thread."""
        for number in self.todo:
            for file in self._shard_files(number).values():
                yield file.key, self.reader.item(file)

    def _write_shard(
        self,
        number: int,
        results: Iterator[ItemResult],
        item_encoder: EitherItemEncoder,
        empty: Mapping[str, Array],
        writer: ShardWriter,
    ) -> None:
        """Collect the next results of the encoder, one per image of shard ``number``, and let
        ``writer`` write them.

        If no image of the shard could be encoded, the arrays without rows in ``empty`` are written.
        """
        start_time, files = time.perf_counter(), self._shard_files(number)
        if not files:
            return
        first = number * self.manifest.items_per_shard
        rows = rows_by_place(self.shards[number], first) if number in self.failed else {}
        errors: dict[int, str] = {}
        for index, file in files.items():
            result = next(results)
            self._warn_if_large(file, result, item_encoder)
            if isinstance(result.value, ItemError):
                error = result.value.error
                errors[index] = " ".join(str(error).split()) or repr(error)
                self.reader.keys.pop(file, None)
            else:
                assert result.grid is not None
                assert isinstance(result.value, dict)
                arrays = result.value or {**empty}  # no view in the input path of the blocks
                uuid = self.reader.take_key(file)
                rows[index] = Row(file.key, result.grid, arrays, file.media, uuid, first + index)
        seconds = round(time.perf_counter() - start_time, 3)
        writer.begin(partial(self._finish_shard, number, files, rows, errors, empty, seconds))
        del self._files_of[number]

    def _finish_shard(
        self,
        number: int,
        files: Mapping[int, File],
        rows: dict[int, Row],
        errors: dict[int, str],
        empty: Mapping[str, Array],
        seconds: float,
        pool: Executor,
    ) -> None:
        """Write a shard, but no row of a file that has changed; runs in a thread of ``writer``."""
        places = list(files)
        for index, error in self.reader.changed(list(files.values())).items():
            rows.pop(places[index], None)
            errors[places[index]] = error
        stats: ShardStats = {
            "shard": number,
            "items": self._items(number),
            "rows": len(rows),
            "seconds": seconds,
            "worker": f"{self.worker.rank}/{self.worker.size}",
            "written": round(time.time(), 3),
            "errors": [
                {"key": files[index].key, "error": errors[index], "place": index}
                for index in sorted(errors)
            ],
        }
        sorted_rows = [rows[index] for index in sorted(rows)]
        self.shards[number].write(sorted_rows, empty, stats, number in self.failed, pool)


def _as_it_is(file: File) -> File:
    """Return a file without the size and time that it had when the job listed it."""
    return file._replace(size=-1, version="") if file.kind == "file" else file


def _blank(side: int = 64) -> Tensor:
    """Return a small black image, uint8 [3, side, side]."""
    return torch.zeros(3, side, side, dtype=torch.uint8)


def _paths_of(encoder: Encoder | GraphedEncoder) -> Mapping[str, VisionEncoder]:
    """Return the input paths of the encoder, which say where patches lie in an image."""
    inner = encoder.encoder if isinstance(encoder, GraphedEncoder) else encoder
    assert isinstance(inner, Encoder)  # `load_encoder` returned it
    return inner.paths
