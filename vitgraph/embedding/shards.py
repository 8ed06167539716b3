"""The files of an embedding job: a manifest, and shards of a fixed number of items.

In the folder of a job::

    manifest.json      what every shard has in common, and a digest of it
    00000.npy          the vectors of shard 0, [rows, D]; or 00000.safetensors, 00000.parquet
    00000.csv          its row table: one line per row, with the key of the item
    00000_stats.json   written last: the shard is done
    errors.csv         the items that could not be encoded

With ``pool="none"`` there is one array per field, ``00000.pooler_output.npy``; the row table says
which rows belong to an item, from ``offset`` on ``tokens`` rows of ``pooler_output`` and of a
DeepStack feature, from ``row_offset`` on ``rows`` rows of ``last_hidden_state``, and its grid
(``t``, ``h``, ``w``). Every file is written under a temporary name that ends in ``.tmp``, and
renamed when it is whole.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

Array = np.ndarray[Any, Any]
FORMATS = ("npy", "safetensors", "parquet")
VECTORS = "embeddings"
"""Name of the array of a pooled shard."""
_TEXT = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}


class Manifest(NamedTuple):
    """What all shards of a job have in common."""

    settings: dict[str, Any]
    """Plain data: checkpoint, preprocessing, pooling, format."""
    items: int
    items_per_shard: int
    keys: str
    """Digest of all keys in order."""

    @property
    def shards(self) -> int:
        """How many shards the job has."""
        return -(-self.items // self.items_per_shard)

    def check(self, folder: Path) -> None:
        """Raise unless the folder is empty or new, or holds this job.

        Raises:
            ValueError: the folder holds another job or something else.
        """
        if (folder / "manifest.json").exists():
            self._compare(Manifest.read(folder), folder)
        elif folder.is_dir() and any(path.suffix != ".tmp" for path in folder.iterdir()):
            raise ValueError(
                f"--out {folder}: holds files, and no manifest of an embedding job; give another "
                "folder"
            )

    def write(self, folder: Path) -> None:
        """Write the manifest into the folder of the job."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(self.settings, sort_keys=True)
        about = {**self._asdict(), "digest": hashlib.sha256(settings.encode()).hexdigest()}
        with writing(folder / "manifest.json") as temporary:
            temporary.write_text(json.dumps(about, indent=1) + "\n")

    def _compare(self, other: Manifest, folder: Path) -> None:
        mine, theirs = (
            {**each.settings, "items per shard": each.items_per_shard} for each in (self, other)
        )
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                raise ValueError(
                    f"--out {folder}: was begun with {name} {theirs.get(name)}, now it is "
                    f"{mine.get(name)}; give the same arguments to go on, or another folder"
                )
        if (self.items, self.keys) != (other.items, other.keys):
            raise ValueError(
                f"--out {folder}: was begun with {other.items:,} files, now there are "
                f"{self.items:,} or other ones; a job goes on with the same files alone, so give "
                "another folder"
            )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a job.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        try:
            about = json.loads((folder / "manifest.json").read_text())
            return cls(*(about[name] for name in cls._fields))
        except FileNotFoundError:
            raise ValueError(
                f"{folder}: has no manifest.json; `vitgraph embed` writes one into its folder"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder}/manifest.json: is damaged ({error!r})") from error


def digest_keys(keys: Iterable[str]) -> str:
    """A digest of keys and their order."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(key.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


class Row(NamedTuple):
    """One item of a shard that was encoded."""

    key: str
    content: str
    """Digest of the file where another file of its size exists, else empty."""
    grid: tuple[int, int, int]
    arrays: dict[str, Array]
    """By field, or the one vector [D] under :data:`VECTORS`."""


class Shard:
    """The files of one shard."""

    def __init__(self, folder: Path, number: int, format: str, pool: str) -> None:
        self.folder, self.number, self.format, self.pool = folder, number, format, pool

    def path(self, ending: str) -> Path:
        """The file of this shard with this ending."""
        return self.folder / f"{self.number:05d}{ending}"

    @property
    def is_done(self) -> bool:
        """Whether the shard was written as a whole."""
        return self.path("_stats.json").exists()

    def write(
        self, rows: Sequence[Row], empty: Mapping[str, Array], stats: Mapping[str, Any]
    ) -> None:
        """Write arrays, row table and statistics, in this order; nothing if the shard is done.

        Args:
            rows: the items that were encoded, in order.
            empty: an array without rows per field, for a shard without items.
            stats: plain data.

        Raises:
            OSError: the folder cannot be written to.
        """
        if self.is_done:  # by another process, meanwhile
            return
        join = np.stack if self.pool != "none" else np.concatenate
        arrays = {
            name: join([row.arrays[name] for row in rows]) if rows else none
            for name, none in empty.items()
        }
        self._write_arrays(arrays, [row.key for row in rows])
        with (
            writing(self.path(".csv")) as temporary,
            open(temporary, "w", **_TEXT) as file,  # type: ignore[call-overload]
        ):
            csv.writer(file, lineterminator="\n").writerows(self._table(rows))
        with writing(self.path("_stats.json")) as temporary:
            temporary.write_text(json.dumps(stats, indent=1) + "\n")

    def _write_arrays(self, arrays: Mapping[str, Array], keys: Sequence[str]) -> None:
        if self.format == "safetensors":
            with writing(self.path(".safetensors")) as temporary:
                save_file(dict(arrays), temporary)
        elif self.format == "parquet":
            with writing(self.path(".parquet")) as temporary:
                _write_parquet(temporary, keys, arrays[VECTORS])
        else:
            for name, array in arrays.items():
                with writing(self._npy(name)) as temporary, open(temporary, "wb") as file:
                    np.save(file, array)

    def _npy(self, name: str) -> Path:
        return self.path(".npy" if name == VECTORS else f".{name}.npy")

    def _table(self, rows: Sequence[Row]) -> Iterator[Sequence[object]]:
        if self.pool != "none":
            yield "key", "content"
            yield from ((row.key, row.content) for row in rows)
            return
        yield "key", "t", "h", "w", "offset", "tokens", "row_offset", "rows", "content"
        offset = row_offset = 0
        for row in rows:
            t, h, w = row.grid
            hidden = row.arrays.get("last_hidden_state")
            tokens = max(
                (len(a) for name, a in row.arrays.items() if name != "last_hidden_state"), default=0
            )
            count = 0 if hidden is None else len(hidden)
            yield row.key, t, h, w, offset, tokens, row_offset, count, row.content
            offset, row_offset = offset + tokens, row_offset + count

    def read_table(self) -> list[dict[str, str]]:
        """The row table, one dict per row."""
        with open(self.path(".csv"), **_TEXT) as file:  # type: ignore[call-overload]
            return list(csv.DictReader(file))

    def read_stats(self) -> dict[str, Any]:
        """The statistics that the shard was written with."""
        stats: dict[str, Any] = json.loads(self.path("_stats.json").read_text())
        return stats

    def read_arrays(self) -> dict[str, Array]:
        """All arrays by name; those of npy files are mapped, not read."""
        if self.format == "safetensors":
            return load_file(self.path(".safetensors"))
        if self.format == "parquet":
            return {VECTORS: _read_parquet(self.path(".parquet"))}
        if self.pool != "none":
            return {VECTORS: np.load(self.path(".npy"), mmap_mode="r")}
        start = f"{self.number:05d}."
        return {
            path.name[len(start) : -len(".npy")]: np.load(path, mmap_mode="r")
            for path in sorted(self.folder.glob(f"{start}*.npy"))
        }

    def read_rows(self) -> dict[str, Row]:
        """The items of the shard by key."""
        arrays, rows = self.read_arrays(), {}
        for number, line in enumerate(self.read_table()):
            if self.pool != "none":
                rows[line["key"]] = Row(
                    line["key"], line["content"], (0, 0, 0), {VECTORS: arrays[VECTORS][number]}
                )
                continue
            t, h, w, offset, tokens, row_offset, count = (
                int(line[name])
                for name in ("t", "h", "w", "offset", "tokens", "row_offset", "rows")
            )
            parts = {
                name: array[row_offset : row_offset + count]
                if name == "last_hidden_state"
                else array[offset : offset + tokens]
                for name, array in arrays.items()
            }
            rows[line["key"]] = Row(line["key"], line["content"], (t, h, w), parts)
        return rows


def read_embeddings(folder: Path) -> tuple[list[str], Array]:
    """See :func:`vitgraph.features.load_embeddings`."""
    manifest = Manifest.read(folder)
    pool, format = manifest.settings["pool"], manifest.settings["format"]
    if pool == "none":
        raise ValueError(
            f"{folder}: was made with --pool none, so there is no vector per item; read the arrays "
            "of each shard and its row table (.csv)"
        )
    shards = [Shard(folder, number, format, pool) for number in range(manifest.shards)]
    missing = [shard.number for shard in shards if not shard.is_done]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing, the first is "
            f"{missing[0]}; run the same command again, it goes on where it was"
        )
    keys: list[str] = []
    matrices = []
    for shard in shards:
        table, matrix = shard.read_table(), shard.read_arrays()[VECTORS]
        if len(table) != len(matrix):
            raise ValueError(
                f"{shard.path('.csv')}: has {len(table)} rows, the matrix {len(matrix)}; delete "
                f"{shard.path('_stats.json').name} and run the same command again"
            )
        keys += [line["key"] for line in table]
        matrices.append(matrix)
    return keys, np.concatenate(matrices)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which is renamed to it if nothing fails inside."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.touch()  # an OSError that names the folder, and the usual permissions
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def require_parquet() -> None:
    """Check that pyarrow is installed.

    Raises:
        ValueError: it is not; the message says how to install it.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ValueError(
            "parquet files need pyarrow: pip install 'vitgraph[parquet]', or in a clone pip "
            "install '.[parquet]'"
        ) from None


def _write_parquet(path: Path, keys: Sequence[str], matrix: Array) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    kind = arrow.list_(arrow.from_numpy_dtype(matrix.dtype), matrix.shape[1])
    flat = arrow.array(matrix.reshape(-1))
    vectors = arrow.FixedSizeListArray.from_arrays(flat, type=kind)
    parquet.write_table(arrow.table({"key": list(keys), "embedding": vectors}), path)


def _read_parquet(path: Path) -> Array:
    from pyarrow import parquet

    column = parquet.read_table(path, columns=["embedding"])["embedding"].combine_chunks()
    width = column.type.list_size
    values: Array = column.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(-1, width)
