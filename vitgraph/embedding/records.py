"""The JSON records of an embedding job, its report to the user, and the values of its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypedDict

if TYPE_CHECKING:
    from encoders.contract import OutputField, Precision
    from encoders.streams import Pool
    from weights import DtypeName

Format: TypeAlias = Literal["npy", "safetensors", "parquet", "vllm"]
"""The format of a shard: numpy arrays, safetensors, a parquet table, or a file per image for vLLM.
"""
OutDtype: TypeAlias = Literal["float32", "float16"]
"""The dtypes that ``--out-dtype`` names; with ``--format vllm`` features have that of the weights.
"""


class JobSettings(TypedDict):
    """The settings of a job that determine every row: source, checkpoint, preprocessing, pooling,
    format."""

    version: str
    source: str
    """The text that :meth:`Source.identity <vitgraph.embedding.sources.listing.Source.identity>`
    returns for the source."""
    column: str
    subset: str | None
    split: str
    any_path: bool
    fetch_urls: bool
    checkpoint: str
    subfolder: str | None
    revision: str | None
    commit: str
    """The commit of a repo; for a checkpoint in a folder, a digest of its files' names, sizes and
    times."""
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
    """An image that could not be encoded: its key, and the text of the error."""

    key: str
    error: str
    place: int
    """The number of the image in its shard, from 0."""


class ShardStats(TypedDict):
    """The statistics of a shard that is written: its number, its images, and the seconds that it
    took.
    """

    shard: int
    items: int
    rows: int
    """The number of images that were encoded, out of ``items``."""
    seconds: float
    worker: str
    """The rank of the worker that wrote the shard and the number of workers, as "0/4"."""
    written: float
    """The time when the shard was written, in seconds since 1970."""
    errors: list[ErrorRecord]


class WrittenStats(ShardStats):
    """The statistics in the file ``_stats.json`` of a shard, with the files that belong to the
    shard.
    """

    tag: str
    """The part of the file names that stands for the writer; empty on a local disk."""
    files: dict[str, tuple[int, int]]
    """The size in bytes and the CRC-32 of each file of the shard, by its name."""


class JobReport(NamedTuple):
    """The report of a command about a job: lines of text for the user, and its exit code."""

    lines: list[str]
    exit_code: int
