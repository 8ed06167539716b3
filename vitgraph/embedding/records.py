"""The types of an embedding job's JSON files, of its report to the user, and of option values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypedDict

if TYPE_CHECKING:
    from encoders.contract import Precision
    from encoders.streams import Decode, Pool
    from weights import DtypeName, JsonObject

Format: TypeAlias = Literal["npy", "safetensors", "parquet", "vllm"]
"""The file format of a shard: numpy arrays, safetensors, parquet, or a file per image for vLLM."""
OutDtype: TypeAlias = Literal["float32", "float16"]
"""The values of ``--out-dtype``; with ``--format vllm`` the dtype of the weights is written."""


class JobSettings(TypedDict):
    """The settings of a job on which its output depends: the source of the images, checkpoint,
    preprocessing, pooling, and file format."""

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
    """The commit of the checkpoint's repo; for a checkpoint in a local folder, a digest of its
    files' names, sizes and modification times."""
    family: str | None
    dtype: DtypeName
    precision: Precision
    decode: Decode
    min_pixels: int | None
    max_pixels: int | None
    max_tiles: int | None
    max_soft_tokens: int | None
    fps: float | None
    num_frames: int | None
    pool: Pool
    normalize: bool
    fields: list[str]
    """The fields of :class:`EncoderOutput` that are written, or outputs of blocks: "blocks.6"."""
    sample: int | None
    """The most patches per image whose outputs of blocks are written; None writes all."""
    seed: int | None
    """The seed by which they are chosen; None without a sample."""
    format: Format
    out_dtype: str
    limit: int | None
    """The most images of the source that the job takes, the first ones; None takes all."""


class ErrorRecord(TypedDict):
    """An image that could not be encoded: its key, and the text of the error."""

    key: str
    error: str
    place: int
    """The number of the image in its shard, from 0."""


class ShardStats(TypedDict):
    """The statistics of a finished shard. ``items`` is the number of its images, ``seconds`` the
    time that it took.
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
    """The content of a shard's file ``_stats.json``: its statistics, and a description of its
    files.
    """

    tag: str
    """A random text in the names of the shard's files that identifies the worker which wrote them;
    empty on a local disk."""
    files: dict[str, tuple[int, int]]
    """The size in bytes and the CRC-32 of each file of the shard, by its name."""


class JobReport(NamedTuple):
    """The result of a command about a job: lines of text to print, the exit code, and the same
    result for programs, which ``--json`` prints.
    """

    lines: list[str]
    exit_code: int
    summary: JsonObject
