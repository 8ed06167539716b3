"""Encoding images inside another library that schedules the work: Ray Data, or ``datasets.map``.

Shapes: n rows of a batch, D width of a vector.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sized
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import torch

from encoders import Encoder
from encoders.contract import OutputField
from encoders.inputs import ItemLike
from encoders.streams import ItemError, VectorKeywords, VectorPool, check_pool
from graphwrap import GraphedEncoder
from weights import DtypeName

from .parquet_files import VECTOR_COLUMN

ERROR_COLUMN = "error"
"""The name of the column of error texts, which :class:`EmbedBatch` adds beside the vectors."""
_REPO_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


class LoadKeywords(TypedDict):
    """The keywords of ``load_encoder`` that a user of :class:`EmbedBatch` may set."""

    dtype: DtypeName | None
    revision: str | None
    subfolder: str | None
    local_files_only: bool


class EmbedBatch:
    """Adds a vector per image to batches of columns: ``ds.map_batches(EmbedBatch, ...)``.

    An instance loads its encoder when it is first called; until then it holds only settings, so it
    can be pickled and sent to other processes. It also works as the function of
    ``datasets.map(batched=True)``. The commit of a repo is looked up when an instance is first
    pickled or called, so all its copies load the same weights. Where each process makes its own
    instance, as in Ray, pass the commit as ``revision``: ``vitgraph.resolve_commit(repo)``.

    A child that was forked after its parent's torch has run threads cannot use torch: it hangs in
    the first operation that starts threads. Let engines start their processes by "spawn" or
    "forkserver", or import and call torch only in the children.

    The arguments from ``revision`` to ``dtype`` are keywords of ``load_encoder``, the bounds of an
    image's size keywords of ``preprocess``, and ``batch_tokens``, ``workers`` and
    ``max_tokens_per_call`` keywords of ``embed_many``.

    Args:
        repo: Hugging Face repo id, or the folder of a checkpoint.
        pool: how the tokens of an image become one vector: "mean", "max", "cls" or "head".
        normalize: divide each vector by its L2 norm.
        column: name of the column of images, which are arrays, bytes or paths of image files, PIL
            images, or anything else that ``preprocess`` accepts.
        revision: branch, tag or commit of the repo; None takes the main branch.
        subfolder: folder inside the repo that holds the checkpoint; None if it is not in one.
        local_files_only: never touch the network.
        dtype: dtype of the weights, such as "bfloat16"; None keeps the stored one.
        device: "auto" (a GPU if there is one), "cpu", "cuda", ...
        graph: whether to replay CUDA graphs; None does so on a CUDA device.
        batch_tokens: output tokens per batch; None takes the default of ``embed_many``.
        workers: threads that decode images; None takes one per core, at most 16.
        max_tokens_per_call: most output tokens of a call of the encoder; a larger image runs in
            several calls. None sets no bound.
        min_pixels: smallest area of an image in pixels.
        max_pixels: largest area of an image in pixels.
        max_tiles: most tiles per image, thumbnail not counted.
        max_soft_tokens: most tokens per image. For each of these four bounds, None takes the value
            of the checkpoint.

    Raises:
        ValueError: ``pool`` is unknown, or ``normalize`` is not a bool.
    """

    def __init__(
        self,
        repo: str,
        pool: VectorPool = "mean",
        *,
        normalize: bool = False,
        column: str = "image",
        revision: str | None = None,
        subfolder: str | None = None,
        local_files_only: bool = False,
        dtype: DtypeName | None = None,
        device: str = "auto",
        graph: bool | None = None,
        batch_tokens: int | None = None,
        workers: int | None = None,
        max_tokens_per_call: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
    ) -> None:
        check_pool(pool, normalize)
        self.repo, self.pool, self.column = str(repo), pool, column
        self.device, self.graph = device, graph
        self._source: LoadKeywords = {
            "dtype": dtype,
            "revision": revision,
            "subfolder": subfolder,
            "local_files_only": local_files_only,
        }
        self._encoding: VectorKeywords = {
            "pool": pool,
            "progress": False,
            "normalize": normalize,
            "batch_tokens": batch_tokens,
            "workers": workers,
            "max_tokens_per_call": max_tokens_per_call,
            "min_pixels": min_pixels,
            "max_pixels": max_pixels,
            "max_tiles": max_tiles,
            "max_soft_tokens": max_soft_tokens,
        }
        self._pinned = False
        self._loaded: tuple[Encoder | GraphedEncoder, int] | None = None

    def __getstate__(self) -> dict[str, object]:
        self._pin()  # otherwise copies in other processes might load a later commit of the branch
        return {**vars(self), "_loaded": None}

    def _pin(self) -> None:
        """Look up the commit of the repo once, so that this instance and all its copies load the
        same weights."""
        if self._pinned or not _REPO_ID.fullmatch(self.repo) or Path(self.repo).exists():
            return
        from weights import resolve_commit

        source = self._source
        self._source["revision"] = resolve_commit(
            self.repo,
            revision=source["revision"],
            subfolder=source["subfolder"],
            local_files_only=source["local_files_only"],
        )
        self._pinned = True

    def __call__(
        self, batch: Mapping[str, Collection[object]], rank: int | None = None
    ) -> dict[str, Collection[object]]:
        """Encode the images of a batch.

        Args:
            batch: the columns of the batch by name, each with n rows.
            rank: number of this process from 0, which ``datasets.map(with_rank=True)`` passes;
                process r uses GPU r, modulo the number of GPUs. None takes the default GPU.

        Returns:
            The columns of ``batch`` and two more: "embedding", float32 [n, D], and "error", n
            strings. If an image cannot be encoded, its vector is NaN and its error says why;
            otherwise the error is empty.

        Raises:
            ValueError: ``batch`` is not a dict of columns, has no column of images, has a single
                image instead of a column or columns of several lengths, or already has a column
                "embedding" or "error".
        """
        try:
            columns = {**batch}
        except TypeError:
            raise ValueError(
                f"the batch is a {type(batch).__name__}, not a dict of columns: take "
                "batch_format='numpy' in Ray, and no format or 'torch' in datasets"
            ) from None
        if self.column not in columns:
            raise ValueError(
                f"the batch has no column {self.column!r}: name one of {', '.join(columns)} with "
                "column="
            )
        for name in (VECTOR_COLUMN, ERROR_COLUMN):
            if name in columns:
                raise ValueError(f"the batch has a column {name!r} already: rename or drop it")
        images = columns[self.column]
        _require_rows(self.column, columns)
        if self._loaded is None:
            self._loaded = self._load(rank)
        encoder, width = self._loaded
        vectors = np.full((len(images), width), np.nan, np.float32)
        errors = [""] * len(images)
        # embed_many would read a row of two values as (key, image), so every row is given a key.
        pairs = list(enumerate(cast("Collection[ItemLike]", images)))
        for result in encoder.embed_many(pairs, on_error="keep", **self._encoding):
            if isinstance(result, ItemError):
                errors[result.index] = " ".join(str(result.error).split()) or repr(result.error)
            else:
                row, vector = result
                vectors[row] = vector.float().cpu().numpy()
        return {**columns, VECTOR_COLUMN: vectors, ERROR_COLUMN: errors}

    def _load(self, rank: int | None) -> tuple[Encoder | GraphedEncoder, int]:
        """Load the encoder, with CUDA graphs on a GPU unless ``graph`` says otherwise."""
        from weights import load_encoder

        self._pin()
        device = self.device
        if rank is not None and device in ("auto", "cuda") and torch.cuda.is_available():
            device = f"cuda:{rank % torch.cuda.device_count()}"
        encoder = load_encoder(self.repo, device=device, progress=False, **self._source)
        # Class tokens are extras, and their towers have no DeepStack: a graph keeps nothing else.
        field: OutputField = "deepstack_features" if self.pool == "cls" else "pooler_output"
        width = encoder.embed(pool=self.pool).shape[1]
        graphs = encoder.device.type == "cuda" if self.graph is None else self.graph
        if not graphs:
            return encoder, width
        graphed = GraphedEncoder(encoder, outputs=(field,))
        return graphed.capture(progress=False), width


def _require_rows(image_column: str, columns: Mapping[str, object]) -> None:
    """Raise a ValueError if a batch is a single row, or its columns have several lengths."""
    images, count = columns[image_column], _length(columns[image_column])
    fix = "pass batched=True to datasets.map, a list to a call"
    if count is None:
        kind = type(images).__name__
        raise ValueError(f"column {image_column!r} is one {kind}, not one image per row: {fix}")
    if isinstance(images, np.ndarray) and images.ndim == 3 and images.shape[2] in (3, 4):
        raise ValueError(
            f"column {image_column!r} has the shape {images.shape}, that of one image [H, W, C], "
            f"not one image per row: {fix}; grey images so narrow need the shape [n, H, W, 1]"
        )
    for name, values in columns.items():
        if not isinstance(values, Mapping) and (rows := _length(values)) != count:
            found = f"is one {type(values).__name__}" if rows is None else f"has {rows} rows"
            raise ValueError(f"column {name!r} {found}, {image_column!r} has {count}: {fix}")


def _length(values: object) -> int | None:
    """Return the number of rows of a column; None for a single value."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sized):
        return None
    if isinstance(values, np.ndarray | torch.Tensor) and not values.ndim:
        return None
    return len(values)
