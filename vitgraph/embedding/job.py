"""What ``vitgraph embed`` runs: shards that are left are encoded in order and written."""

from __future__ import annotations

import csv
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from encoders.contract import EncoderOutput
from encoders.streams import (
    Encoding,
    ItemError,
    ItemResult,
    ItemResults,
    StreamOptions,
    stream_items,
)
from encoders.vision_encoder import VisionEncoder

from ..encode import DTYPES
from .shards import VECTORS, Array, Manifest, Row, Shard, writing

if TYPE_CHECKING:
    from .command import File

SAMPLED = 16
"""Images that are read to estimate the size of whole outputs."""


@dataclass
class Plan:
    """Which files of a shard are encoded, and which have the content of another file."""

    files: Sequence[File]
    contents: list[str]
    """Digest of each file where another file has its size, else empty."""
    originals: list[int] = field(default_factory=list)
    """Places of the files to encode."""
    copies: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Place of a copy to the shard and the key of its original."""


class Job:
    """One embedding job: which shards are done, and how the others are made.

    Args:
        out: the folder of the job.
        files: all of them, in order.
        manifest: of this job.
    """

    def __init__(self, out: Path, files: Sequence[File], manifest: Manifest) -> None:
        self.out, self.files, self.manifest = out, files, manifest
        settings = manifest.settings
        self.pool: str = settings["pool"]
        self.dtype: torch.dtype = DTYPES[settings["out_dtype"]]
        self.shards = [
            Shard(out, number, settings["format"], self.pool) for number in range(manifest.shards)
        ]
        self.todo = [shard.number for shard in self.shards if not shard.is_done]
        sizes = Counter(file.size for file in files)
        self._repeated = {size for size, count in sizes.items() if count > 1 and size >= 0}
        self._seen: dict[str, tuple[int, str]] = {}
        """Content to the shard and the key of the first file that has it."""
        for shard in self.shards if self._repeated and self.todo else []:
            for line in shard.read_table() if shard.is_done else []:
                if line["content"]:
                    self._seen.setdefault(line["content"], (shard.number, line["key"]))
        self._plans: dict[int, Plan] = {}
        self._planning = threading.Lock()
        self._stored = lru_cache(maxsize=2)(self._read_shard)

    def run(
        self,
        encoding: Encoding,
        limits: Mapping[str, Any],
        wanted: ItemResults,
        options: StreamOptions,
    ) -> None:
        """Encode and write the shards that are left, one after the other.

        Args:
            encoding: the encoder, and how it is called.
            limits: keywords of ``preprocess``.
            wanted: what to write of each item.
            options: how the stream runs.

        Raises:
            ValueError: arguments that cannot be; nothing is written then.
        """
        total = sum(len(self._files_of(number)) for number in self.todo)
        options = options._replace(total=total)
        results = stream_items(encoding, self._tasks(), limits, wanted, options)
        with closing(results):
            self._announce(encoding, limits)
            self.manifest.write(self.out)
            for number in self.todo:
                self._run_shard(number, results)

    def _announce(self, encoding: Encoding, limits: Mapping[str, Any]) -> None:
        """Print how much there is to do, and how large the result will be."""
        encoder = cast(VisionEncoder, encoding.encoder)
        encoder.preprocess([torch.zeros(3, 64, 64, dtype=torch.uint8)], **limits)
        with torch.no_grad():
            nothing = encoder(torch.zeros(0, *encoder.row_shape), [])
        if self.pool == "none":
            self.empty = self._arrays(nothing)
            size = self._estimate(encoder, limits)
        else:
            name = "last_hidden_state" if self.pool == "cls" else "pooler_output"
            width = self._fields(nothing)[name].shape[-1]
            self.empty = self._arrays(torch.zeros(0, width))
            size = f"{len(self.files):,} vectors [{width}], about "
            size += _readable(len(self.files) * width * self.dtype.itemsize)
        read = _readable(sum(max(file.size, 0) for file in self.files))
        done = len(self.shards) - len(self.todo)
        print(f"{len(self.files):,} files, {read}; {len(self.shards)} shards, {done} of them done")
        print(f"writes {size} of {self.manifest.settings['out_dtype']} to {self.out}", flush=True)

    def _estimate(self, encoder: VisionEncoder, limits: Mapping[str, Any]) -> str:
        """The size of whole outputs, from the sizes of a few images."""
        sizes = []
        for file in self.files[:: -(-len(self.files) // SAMPLED)]:
            try:
                grid = encoder.preprocess([file.path], **limits).grid_thw
            except ValueError:
                continue  # the job itself says what is wrong with it
            (spec,) = encoder.item_specs(grid)
            rows = dict.fromkeys(self.empty, spec.output_tokens)
            if "last_hidden_state" in rows:
                rows["last_hidden_state"] = spec.input_size
            sizes.append(sum(rows[name] * _row_bytes(one) for name, one in self.empty.items()))
        if not sizes:
            return "an unknown number of bytes (no image of a sample can be read)"
        total = sum(sizes) / len(sizes) * len(self.files)
        return f"about {_readable(total)}, by a sample of {len(sizes)} images,"

    def _tasks(self) -> Iterator[tuple[str, str]]:
        """Key and path of each file to encode; a thread of the stream iterates it."""
        for number in self.todo:
            plan = self._plan(number)
            for place in plan.originals:
                yield plan.files[place].key, plan.files[place].path

    def _run_shard(self, number: int, results: Iterator[ItemResult]) -> None:
        began, plan = time.perf_counter(), self._plan(number)
        rows: dict[int, Row] = {}
        errors: dict[int, str] = {}
        keys: dict[str, int] = {}
        for place in plan.originals:
            file, result = plan.files[place], next(results)
            keys.setdefault(file.key, place)
            if isinstance(result.value, ItemError):
                errors[place] = " ".join(str(result.value.error).split())
            else:
                assert result.grid is not None
                arrays = self._arrays(result.value)
                rows[place] = Row(file.key, plan.contents[place], result.grid, arrays)
        for place, (shard, key) in plan.copies.items():
            if shard == number:
                row, error = rows.get(keys[key]), errors.get(keys[key], "")
            else:
                stored_rows, stored_errors = self._stored(shard)
                row, error = stored_rows.get(key), stored_errors.get(key, "")
            if row is not None:
                rows[place] = row._replace(key=plan.files[place].key)
            else:
                errors[place] = error
        stats = {
            "shard": number,
            "items": len(plan.files),
            "rows": len(rows),
            "copies": len(plan.copies),
            "seconds": round(time.perf_counter() - began, 3),
            "errors": [
                {"key": plan.files[place].key, "error": errors[place]} for place in sorted(errors)
            ],
        }
        self.shards[number].write([rows[place] for place in sorted(rows)], self.empty, stats)
        del self._plans[number]

    def _read_shard(self, number: int) -> tuple[dict[str, Row], dict[str, str]]:
        shard = self.shards[number]
        errors = {each["key"]: each["error"] for each in shard.read_stats()["errors"]}
        return shard.read_rows(), errors

    def _files_of(self, number: int) -> Sequence[File]:
        count = self.manifest.items_per_shard
        return self.files[number * count : (number + 1) * count]

    def _plan(self, number: int) -> Plan:
        """What to do for a shard; shards are planned in order, by whichever thread is first."""
        with self._planning:
            if number not in self._plans:
                self._plans[number] = self._make_plan(number)
            return self._plans[number]

    def _make_plan(self, number: int) -> Plan:
        files = self._files_of(number)
        plan = Plan(files, [self._content(file) for file in files])
        for place, (file, content) in enumerate(zip(files, plan.contents, strict=True)):
            if content in self._seen:
                plan.copies[place] = self._seen[content]
            else:
                plan.originals.append(place)
                if content:
                    self._seen[content] = number, file.key
        return plan

    def _content(self, file: File) -> str:
        """A digest of the file if another one has its size, else nothing."""
        if file.size not in self._repeated:
            return ""
        try:
            with open(file.path, "rb") as opened:
                return hashlib.blake2b(opened.read(), digest_size=16).hexdigest()
        except OSError:
            return ""  # encoding says what is wrong with it

    def _arrays(self, value: Any) -> dict[str, Array]:
        """A result as arrays by name, in the dtype that is written.

        Raises:
            ValueError: a value that float16 cannot hold.
        """
        tensors = {VECTORS: value} if isinstance(value, Tensor) else self._fields(value)
        arrays = {}
        for name, tensor in tensors.items():
            written = tensor.to("cpu", self.dtype)
            if self.dtype == torch.float16 and written.isinf().sum() > tensor.isinf().sum().cpu():
                raise ValueError(
                    f"--out-dtype float16 cannot hold {name} up to {float(tensor.abs().max()):.0f} "
                    "(65504 at most); write float32"
                )
            arrays[name] = written.numpy()
        return arrays

    def _fields(self, output: EncoderOutput) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name in self.manifest.settings["fields"]:
            field = output._asdict()[name]
            if isinstance(field, tuple):
                tensors |= {f"deepstack.{number}": layer for number, layer in enumerate(field)}
            else:
                tensors[name] = field
        return tensors

    def finish(self) -> int:
        """Write the table of errors, and print what there is.

        Returns:
            The exit code: 0, or 3 if files could not be encoded.
        """
        stats = [shard.read_stats() for shard in self.shards]
        errors = [(each["key"], each["error"]) for one in stats for each in one["errors"]]
        rows, copies = (sum(one[name] for one in stats) for name in ("rows", "copies"))
        print(
            f"{self.out}: {rows:,} of {len(self.files):,} files in {len(self.shards)} shards, "
            f"{copies:,} of them copies of another"
        )
        table = self.out / "errors.csv"
        if not errors:
            table.unlink(missing_ok=True)
            return 0
        with (
            writing(table) as temporary,
            open(temporary, "w", encoding="utf-8", errors="surrogateescape", newline="") as file,
        ):
            csv.writer(file, lineterminator="\n").writerows([("key", "error"), *errors])
        print(f"{len(errors):,} files could not be encoded: {table}")
        return 3


def _row_bytes(array: Array) -> int:
    """Bytes of one row of an array, which may have none."""
    count = array.itemsize
    for side in array.shape[1:]:
        count *= side
    return count


def _readable(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"
