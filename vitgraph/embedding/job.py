"""What ``vitgraph embed`` runs: shards that are left are encoded in order and written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from encoders.contract import EncoderOutput
from encoders.paths import PathsEncoder
from encoders.streams import (
    Encoding,
    ItemError,
    ItemResult,
    ItemResults,
    StreamOptions,
    stream_items,
)
from encoders.vision_encoder import VisionEncoder

from ..devices import DTYPES
from .manifest import Manifest, writing
from .plans import Plans
from .shards import VECTORS, Array, Row, Shard, write_csv
from .sources import File
from .workers import Worker

SAMPLED = 16
"""Images that are read to estimate the size of whole outputs."""


class Job:
    """One embedding job: which shards are done, and how the others are made.

    Args:
        out: the folder of the job.
        files: all of them, in order.
        manifest: of this job.
        worker: which of the processes that work on it; its shards are every ``size``-th.
        find_copies: whether images of equal content are encoded once, by each worker.
    """

    def __init__(
        self,
        out: Path,
        files: Sequence[File],
        manifest: Manifest,
        worker: Worker,
        find_copies: bool = True,
    ) -> None:
        self.out, self.files, self.manifest, self.worker = out, files, manifest, worker
        settings = manifest.settings
        self.pool: str = settings["pool"]
        self.dtype: torch.dtype = DTYPES[settings["out_dtype"]]
        self.shards = [
            Shard(out, number, settings["format"], self.pool) for number in range(manifest.shards)
        ]
        self.missing = [shard.number for shard in self.shards if not shard.is_done]
        self.todo = worker.own(self.missing)
        # Tables of shards that are done are read only if there is something to plan.
        self._plans = Plans(
            files, self.shards, manifest.items_per_shard, find_copies and bool(self.todo)
        )
        self._stored = lru_cache(maxsize=2)(self._read_shard)

    def run(
        self,
        encoding: Encoding[Any],
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
        total = sum(len(self._plans.files_of(number)) for number in self.todo)
        options = options._replace(total=total)
        results = stream_items(encoding, self._tasks(), limits, wanted, options)
        with closing(results):
            self._announce(encoding, limits)
            self.manifest.write(self.out)
            for number in self.todo:
                self._run_shard(number, results)

    def _announce(self, encoding: Encoding[Any], limits: Mapping[str, Any]) -> None:
        """Print how much there is to do, and how large the result will be."""
        encoder = cast(VisionEncoder | PathsEncoder, encoding.encoder)
        blank = torch.zeros(3, 64, 64, dtype=torch.uint8)
        if self.pool == "none":
            with torch.no_grad():
                (one,) = encoder.encode([blank], **limits)
            self.empty = {name: array[:0] for name, array in self._arrays(one).items()}
            if not self.empty:
                raise ValueError(
                    f"--fields {','.join(self.manifest.settings['fields'])}: this encoder has no "
                    "DeepStack features; name another field"
                )
            total, what = self._estimate(encoding, limits)
        else:
            encoder.preprocess([blank], **limits)
            width = encoder.num_features if self.pool == "cls" else encoder.out_features
            self.empty = self._arrays(torch.zeros(0, width))
            total = len(self.files) * width * self.dtype.itemsize
            what = f"{len(self.files):,} vectors [{width}], about {_readable(total)}"
        self._require_space(total)
        read = sum(max(file.size, 0) for file in self.files)
        count = f"{len(self.files):,} files" + f", {_readable(read)}" * (read > 0)
        done = len(self.shards) - len(self.missing)
        print(f"{count}; {len(self.shards)} shards, {done} of them done")
        if self.worker.size > 1:
            print(f"{self.worker} writes {len(self.todo)} shards")
        print(f"writes {what} of {self.manifest.settings['out_dtype']} to {self.out}", flush=True)

    def _require_space(self, total: float) -> None:
        """Check that there is room for what all workers have still to write.

        Raises:
            ValueError: there is not.
        """
        needed = total * len(self.missing) / len(self.shards)
        place = next(path for path in (self.out, *self.out.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free
        if needed > free:
            raise ValueError(
                f"--out {self.out}: about {_readable(needed)} are still to be written, and "
                f"{_readable(free)} are free; free some space, give another folder or --out-dtype "
                "float16"
            )

    def _estimate(self, encoding: Encoding[Any], limits: Mapping[str, Any]) -> tuple[float, str]:
        """The size of whole outputs, from the sizes of a few images."""
        sizes = []
        for file in self.files[:: -(-len(self.files) // SAMPLED)]:
            try:
                inputs = encoding.encoder.preprocess([file.item()], **limits)
            except ValueError:
                continue  # the job itself says what is wrong with it
            specs = [
                spec
                for name, path in inputs.paths.items()
                for spec in encoding.paths[name].item_specs(path.grid_thw)
            ]
            rows = dict.fromkeys(self.empty, sum(spec.output_tokens for spec in specs))
            if "last_hidden_state" in rows:
                rows["last_hidden_state"] = sum(spec.input_size for spec in specs)
            sizes.append(sum(rows[name] * _row_bytes(one) for name, one in self.empty.items()))
        if not sizes:
            return 0, "an unknown number of bytes (no image of a sample can be read)"
        total = sum(sizes) / len(sizes) * len(self.files)
        return total, f"about {_readable(total)}, by a sample of {len(sizes)} images,"

    def _tasks(self) -> Iterator[tuple[str, Any]]:
        """Key and item of each file to encode; a thread of the stream iterates it."""
        for number in self.todo:
            plan = self._plans.plan(number)
            for place in plan.originals:
                yield plan.files[place].key, plan.files[place].item()

    def _run_shard(self, number: int, results: Iterator[ItemResult]) -> None:
        began, plan = time.perf_counter(), self._plans.plan(number)
        if plan.done:
            return
        rows: dict[int, Row] = {}
        errors: dict[int, str] = {}
        for place in plan.originals:
            file, result = plan.files[place], next(results)
            if isinstance(result.value, ItemError):
                errors[place] = " ".join(str(result.value.error).split())
            else:
                assert result.grid is not None
                arrays = self._arrays(result.value)
                rows[place] = Row(file.key, plan.contents[place], result.grid, arrays)
        for place, original in plan.copies.items():
            here = original.shard == number
            its_rows, its_errors = (rows, errors) if here else self._stored(original.shard)
            row, error = its_rows.get(original.place), its_errors.get(original.place, "")
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
                {"key": plan.files[place].key, "error": errors[place], "place": place}
                for place in sorted(errors)
            ],
        }
        self.shards[number].write([rows[place] for place in sorted(rows)], self.empty, stats)
        self._plans.forget(number)

    def _read_shard(self, number: int) -> tuple[dict[int, Row], dict[int, str]]:
        """The rows and the errors of a shard that is done, by their places."""
        shard = self.shards[number]
        errors = {each["place"]: each["error"] for each in shard.read_stats()["errors"]}
        return dict(zip(shard.read_places(), shard.read_rows_in_order(), strict=True)), errors

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
        if missing := sum(not shard.is_done for shard in self.shards):
            return self._finish_own(missing)
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
        with writing(table) as temporary:
            write_csv(temporary, [("key", "error"), *errors])
        print(f"{len(errors):,} files could not be encoded: {table}")
        return 3

    def _finish_own(self, missing: int) -> int:
        """Say what is left for other workers; the last one writes the table of errors."""
        own = [self.shards[number] for number in self.worker.own(range(len(self.shards)))]
        errors = sum(len(shard.read_stats()["errors"]) for shard in own)
        print(
            f"{self.out}: {self.worker} has written its {len(own)} shards, with {errors:,} errors; "
            f"{missing} of all {len(self.shards)} are left to other workers"
        )
        return 3 if errors else 0


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
