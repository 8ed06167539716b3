"""What an embedding job writes as JSON, and the values of its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    from encoders.contract import OutputField, Precision
    from encoders.streams.pooling import Pool
    from weights.load import DtypeName

Format: TypeAlias = Literal["npy", "safetensors", "parquet", "vllm"]
"""The files of a shard: arrays, tensors, a table, or one file per image, which vLLM reads."""
OutDtype: TypeAlias = Literal["float32", "float16"]
"""The dtypes that ``--out-dtype`` names; a job for vLLM keeps that of the weights."""


class JobSettings(TypedDict):
    """All that determines a row of a job: source, checkpoint, preprocessing, pooling, format."""

    version: str
    source: str
    """The text of :meth:`vitgraph.embedding.sources.Source.identity`."""
    column: str
    subset: str | None
    split: str
    any_path: bool
    fetch_urls: bool
    checkpoint: str
    subfolder: str | None
    revision: str | None
    commit: str
    """The commit of a repo, or a text that changes with the files of a folder."""
    family: str | None
    dtype: DtypeName
    precision: Precision
    min_pixels: int | None
    max_pixels: int | None
    max_tiles: int | None
    max_soft_tokens: int | None
    pool: Pool
    normalize: bool
    fields: list[OutputField]
    format: Format
    out_dtype: str


class ErrorRecord(TypedDict):
    """An item that could not be encoded."""

    key: str
    error: str
    place: int
    """Number of the item in its shard, from 0."""


class ShardStats(TypedDict):
    """The statistics of a shard that is done."""

    shard: int
    items: int
    rows: int
    """The number of items that were encoded."""
    seconds: float
    worker: str
    """Number of the worker and count of the workers, as "0/4"."""
    written: float
    """The time when the shard was written, in seconds since 1970."""
    errors: list[ErrorRecord]


class WrittenStats(ShardStats, total=False):
    """The statistics as they are written: which files count, and what they hold."""

    tag: str
    """The part of the names of the files that stands for their writer."""
    files: dict[str, tuple[int, int]]
    """The size and the CRC-32 of each file by its name."""
