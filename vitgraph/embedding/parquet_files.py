"""A shard as a parquet file with one row per image, for pandas, polars and pyarrow.

If the job pools, the columns are ``key``, ``kind`` ("image" or "clip") and ``embedding``, a list of
fixed size D. If it writes all tokens (``pool="none"``), they are ``key`` and ``kind``; the patch
grid ``t``, ``h``, ``w``; ``tokens``, the number of tokens of the image in ``pooler_output`` and in
each DeepStack feature; ``rows``, the number of its rows in ``last_hidden_state`` or, in jobs of
blocks, before its patches (0 if these are not written); and one column per field, a list of rows.
Each row is a list of fixed size D; in the ``last_hidden_state`` of encoders that take tiles, a row
is a tile, a list of lists of size D.

Text in parquet is UTF-8. In ``key``, a byte of a file name that is not valid UTF-8 is written as
six characters: 0xff becomes ``\\udcff``. The shard's CSV file of keys keeps such bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .block_fields import has_rows_apart

if TYPE_CHECKING:
    import pyarrow as arrow

    from encoders.contract import Grid
    from encoders.inputs import AnyArray

Array: TypeAlias = "AnyArray"
VECTORS = "embeddings"
"""The name of the array of pooled vectors among the arrays of a shard."""
VECTOR_COLUMN = "embedding"
"""The name of the column of vectors in a table, which has one vector per row."""
_BESIDE = ("key", "kind", "t", "h", "w", "tokens", "rows")
"""The columns of a parquet file that hold no features."""
_GROUP = 64 << 20
"""The bytes of a row group; to get one image, a reader has to read a whole row group."""


def write_vectors(file: Path, keys: Sequence[str], kinds: Sequence[str], matrix: Array) -> None:
    """Write the parquet file of a shard with one vector per image.

    Args:
        file: the file to write.
        keys: the keys of the images.
        kinds: "image" or "clip" per image.
        matrix: the vectors [images, D].
    """
    _write(file, keys, kinds, {VECTOR_COLUMN: _nested(matrix)}, matrix.nbytes)


def write_tokens(
    file: Path,
    keys: Sequence[str],
    kinds: Sequence[str],
    grids: Sequence[Grid],
    arrays: Mapping[str, Array],
    counts: Mapping[str, Sequence[int]],
) -> None:
    """Write the parquet file of a shard with all tokens of each image.

    Args:
        file: the file to write.
        keys: the keys of the images.
        kinds: "image" or "clip" per image.
        grids: the grid (t, h, w) of each image in patches.
        arrays: by output field, the rows of all images, concatenated, [rows, .., D].
        counts: by output field, the number of rows of each image.
    """
    import pyarrow as arrow

    none = [0] * len(keys)
    tokens = next((counts[name] for name in counts if not has_rows_apart(name)), none)
    rows = next((counts[name] for name in counts if has_rows_apart(name)), none)
    sizes = [*zip(*grids, strict=True)] or [(), (), ()]
    sizes += [tuple(tokens), tuple(rows)]
    columns = {
        name: arrow.array(values, arrow.int32())
        for name, values in zip(_BESIDE[2:], sizes, strict=True)
    }
    for name, array in arrays.items():
        ends = np.cumsum([0, *counts[name]], dtype=np.int32)
        columns[name] = arrow.ListArray.from_arrays(arrow.array(ends), _nested(array))
    _write(file, keys, kinds, columns, sum(array.nbytes for array in arrays.values()))


def read_arrays(path: Path, field: str | None = None) -> dict[str, Array]:
    """Read the arrays of a shard's parquet file, with the rows of all images concatenated.

    Args:
        path: the file to read.
        field: name of the only column to read; None for all columns of numbers.

    Returns:
        Arrays by field: [rows, D], or [rows, .., D] for fields with additional axes.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        columns = [name for name in file.schema_arrow.names if name not in _BESIDE]
        selected = [name for name in columns if field in (None, name)]
        table = file.read(columns=selected)
    return {VECTORS if name == VECTOR_COLUMN else name: _flat(table[name]) for name in selected}


def _write(
    file: Path,
    keys: Sequence[str],
    kinds: Sequence[str],
    columns: Mapping[str, object],
    size: int,
) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    texts = [key.encode("utf-8", "backslashreplace").decode() for key in keys]
    names = {"key": arrow.array(texts, arrow.string()), "kind": arrow.array(kinds, arrow.string())}
    table = arrow.table({**names, **columns})
    rows = max(_GROUP * len(keys) // max(size, 1), 1)
    # Dictionary encoding of floats made a file of tokens 15 % larger, and took twice as long.
    parquet.write_table(table, file, row_group_size=rows, use_dictionary=["key", "kind"])


def _nested(array: Array) -> arrow.Array:
    """Return an array [n, .., D] as an arrow array of n rows of nested lists of fixed sizes."""
    import pyarrow as arrow

    nested = arrow.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        nested = arrow.FixedSizeListArray.from_arrays(nested, size)
    return nested


def _flat(column: arrow.ChunkedArray) -> Array:
    """Return the rows of all images in a column of nested lists, concatenated, as [rows, .., D]."""
    import pyarrow as arrow

    shape, kind = [], column.type
    if arrow.types.is_list(kind):
        kind = kind.value_type
    while arrow.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    nothing = arrow.array([], kind).to_numpy(zero_copy_only=False)  # for the dtype if no chunks
    parts = [nothing.reshape(0, *shape)]
    for part in column.chunks:
        while arrow.types.is_list(part.type) or arrow.types.is_fixed_size_list(part.type):
            part = part.flatten()
        parts.append(part.to_numpy(zero_copy_only=False).reshape(-1, *shape))
    return np.concatenate(parts)
