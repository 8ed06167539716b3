"""The options of ``vitgraph embed``, parsed and checked before torch is imported."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..embedding.block_fields import is_block, stack_of
from ..embedding.manifest import Manifest
from ..embedding.sources.files import entries_below
from ..embedding.sources.listing import WHAT_TO_GIVE, Source
from ..embedding.sources.reading import File, ImageReader, SourceOptions
from ..embedding.sources.suffixes import LeftOut
from ..embedding.storage import STORE, local_folder, open_storage
from ..embedding.workers import read_worker
from .arguments import LIMITS, SIZES, check_checkpoint, check_names, check_source, is_video

if TYPE_CHECKING:
    from encoders.contract import Limits
    from encoders.streams import Pool

    from ..embedding.job import Calls
    from ..embedding.records import JobSettings, OutDtype

_POSITIVE = (
    *SIZES,
    "batch_tokens",
    "workers",
    "max_tokens_per_call",
    "shard_items",
    "limit",
    "sample",
)
"""The options whose values must be at least 1, unless they are left out."""


def check_embed(options: argparse.Namespace) -> None:
    """Check the options of ``vitgraph embed``, and that the checkpoint and the images exist.

    Raises:
        ValueError: an option has an invalid value or contradicts another, or the checkpoint or the
            source of the images does not exist.
    """
    _check_plan(options)
    _check_sampling(options)
    output_options = read_written(options)
    required = {"REPO_OR_FOLDER": options.repo, "FOLDER": options.files}
    if not options.plan:
        required["--out"] = options.out
    if missing := [name for name, value in required.items() if value is None]:
        options.parser.error(f"the following arguments are required: {', '.join(missing)}")
    check_names(options.dtype, options.device)
    for name in _POSITIVE:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if options.normalize and output_options.pool == "none":
        raise ValueError("--normalize: needs one vector per item; leave --pool none out")
    read_worker(options.shard, os.environ)
    if not options.plan and "://" not in options.out:
        storage = open_storage(options.out)
        manifest = Manifest.find(storage)
        if manifest is None and options.format != "vllm" and storage.exists(STORE):
            raise ValueError(
                f"--out {options.out}: is a feature store; give --format vllm or another folder"
            )
    if not options.plan and options.format == "vllm":
        local_folder(options.out)
    ending = ["--plan"] if options.plan else ["--out", options.out]
    corrected = ["vitgraph", "embed", "REPO_OR_FOLDER", options.repo, *ending]
    check_checkpoint(options.repo, shlex.join(corrected))
    check_source(options)
    _check_files(options)


class Written(NamedTuple):
    """The part of an encoder's output that an embedding job writes for each image."""

    pool: Pool
    """The pooling of the tokens into one vector, such as "mean"; "none" writes all tokens."""
    fields: tuple[str, ...]
    """The fields of the output that are written or pooled."""
    out_dtype: OutDtype | None
    """The dtype of the written numbers; None takes the dtype of the weights."""


def read_written(options: argparse.Namespace) -> Written:
    """Read ``--format``, ``--pool``, ``--fields`` and ``--out-dtype``, with their defaults.

    Raises:
        ValueError: ``--format vllm`` together with one of the three other options, ``--fields``
            together with a pool, or an unknown field.
    """
    if options.format != "vllm":
        pool: Pool = options.pool or "mean"
        return Written(pool, _read_fields(options, pool), options.out_dtype or "float32")
    for name in ("pool", "fields", "out_dtype", "sample", "seed"):
        value = vars(options)[name]
        if value not in (None, "none"):
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: --format vllm writes all that a language "
                "model reads, in the dtype of the weights (--dtype); leave it out"
            )
    return Written("none", ("pooler_output", "deepstack_features"), None)


def _check_plan(options: argparse.Namespace) -> None:
    """Check ``--gpus``, which only makes sense with ``--plan``, and options that do not with it.

    Raises:
        ValueError: the number of GPUs is not positive, ``--plan`` is missing, or an option that
            ``--plan`` does not take.
    """
    for name in ("json", "retry_errors"):
        if options.plan and vars(options)[name]:
            raise ValueError(
                f"--{name.replace('_', '-')}: is for a job, and --plan writes none; leave it out"
            )
    if options.gpus is None:
        return
    if not options.plan:
        raise ValueError(
            f"--gpus {options.gpus}: is for --plan; a job has one worker per "
            "GPU, each with its own --shard"
        )
    if options.gpus < 1:
        raise ValueError(f"--gpus {options.gpus}: must be at least 1")


def _check_sampling(options: argparse.Namespace) -> None:
    """Check ``--fps`` and ``--num-frames``, with which clips are encoded, too.

    Raises:
        ValueError: a value is not positive, both are given, or an option that takes only images.
    """
    given = [name for name in ("fps", "num_frames") if vars(options)[name] is not None]
    for name in given:
        option, value = f"--{name.replace('_', '-')}", vars(options)[name]
        if not 0 < value < math.inf:
            raise ValueError(f"{option} {value}: must be a positive number")
        for wrong in ["--plan"] * options.plan + ["--format vllm"] * (options.format == "vllm"):
            raise ValueError(f"{option} {value}: {wrong} takes only images; leave one of them out")
    if len(given) > 1:
        raise ValueError(
            f"--fps {options.fps} and --num-frames {options.num_frames}: give one of them"
        )
    if given:
        from encoders.inputs import require_av  # last: it imports torch, which takes seconds

        require_av()


def _source_options(options: argparse.Namespace) -> SourceOptions:
    """Return the options for images inside tables and lists, and whether clips are listed."""
    names = [name for name in SourceOptions._fields if vars(options).get(name) is not None]
    clips = options.fps is not None or options.num_frames is not None
    return SourceOptions(**{name: vars(options)[name] for name in names}, clips=clips)


def _check_files(options: argparse.Namespace) -> None:
    """Check that a local source exists, and is no folder without images (or clips).

    File name patterns, remote addresses and standard input are not checked here.

    Raises:
        ValueError: the source is of no kind that ``vitgraph embed`` accepts.
    """
    source = options.files
    if source == "-" or "://" in source or re.search(r"[*?[]", source):
        return
    path = Path(source).expanduser()
    source_options = _source_options(options)
    if is_video(path) and not source_options.clips:
        right = shlex.join(["vitgraph", "encode", options.repo, "--video", source, "--out"])
        raise ValueError(
            f"{source}: is a video: say which of its frames to take with --fps or --num-frames, or "
            f"encode all of them: `{right} FILE.safetensors`"
        )
    if not path.exists():
        raise ValueError(f"{source}: there is no such file or folder; {WHAT_TO_GIVE}")
    taken = LeftOut(source_options.clips)
    if path.is_dir() and not any(taken.takes(entry.name) for entry, _ in entries_below(str(path))):
        list(Source(source, source_options))


class Command:
    """One invocation of ``vitgraph embed``: its options, and the objects made from them.

    Args:
        options: the parsed options, which :func:`check_embed` has checked.

    Attributes:
        options: the parsed options.
        worker: rank of this process and number of processes that share the job.
        source: lists the images of the job.
        reader: reads the bytes of an image.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.worker = read_worker(options.shard, os.environ)
        source_options = _source_options(options)
        self.source = Source(options.files, source_options)
        self.reader = ImageReader(source_options, keyed=options.format == "vllm")

    def choose_pool(self, head: bool, job: JobSettings | None) -> None:
        """Choose the pool, unless the options name one: the encoder's head if it has one, else the
        mean.

        Args:
            head: whether the encoder has a head.
            job: the settings of the job that is resumed, whose pool is kept; None for a new job.
        """
        options = self.options
        if options.pool is None and options.format != "vllm":
            kept = None if job is None else job["pool"]
            options.pool = kept if kept in ("mean", "head") else "head" if head else "mean"

    @property
    def pool(self) -> Pool:
        """The pooling that the job writes, as in :class:`Written`."""
        return read_written(self.options).pool

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the output that the job writes or pools, as in :class:`Written`."""
        return read_written(self.options).fields

    @property
    def out_dtype(self) -> OutDtype | None:
        """The dtype that the job writes, as in :class:`Written`."""
        return read_written(self.options).out_dtype

    def files(self) -> Iterable[File]:
        """Return the images of the source, only the first ones with ``--limit``."""
        return islice(self.source, self.options.limit)

    def say(self, lines: Iterable[str]) -> None:
        """Print lines for the user; with ``--json``, standard output is kept for the summary."""
        for line in lines:
            print(line, file=sys.stderr if self.options.json else None, flush=True)

    def calls(self) -> Calls:
        """Return the arguments of the encoder's calls: size limits of images, pooling, batching."""
        from encoders.streams import ResultSettings, StreamOptions

        from ..embedding.job import Calls

        options = self.options
        threads = self.worker.threads() if options.workers is None else options.workers
        results = ResultSettings(self.pool, options.normalize, options.max_tokens_per_call)
        progress = not options.no_progress
        stream = StreamOptions(
            options.batch_tokens, threads, progress, on_error="keep", decode=options.decode
        )
        return Calls(self.limits, results, stream)

    @property
    def items_per_shard(self) -> int:
        """The images per shard: the value of ``--shard-items``, or else a default.

        The default is smaller if all tokens of an image are written, which take more space than a
        vector, and for vLLM, because then a shard has one file per image.
        """
        if self.options.shard_items is not None:
            return int(self.options.shard_items)
        if self.options.format == "vllm":
            return 16
        return 64 if self.pool == "none" else 1000

    @property
    def limits(self) -> Limits:
        """The keywords of ``preprocess`` that bound sizes and sample clips; None where the option
        is missing.
        """
        from encoders.contract import Limits

        return Limits(**{name: vars(self.options)[name] for name in LIMITS})


def _read_fields(options: argparse.Namespace, pool: Pool) -> tuple[str, ...]:
    """Return the fields of the encoder's output that are written or pooled."""
    fields: str | None = options.fields
    if pool != "none":
        if fields is not None:
            raise ValueError(
                f"--fields {fields}: is for --pool none, and --pool {pool} writes one vector per "
                "item; leave one of them out"
            )
        names: tuple[str, ...] = ("last_hidden_state" if pool == "cls" else "pooler_output",)
    else:
        names = tuple(dict.fromkeys((fields or "pooler_output").split(",")))
    known_fields = ("pooler_output", "last_hidden_state", "deepstack_features")
    for name in names:
        if name not in known_fields and not is_block(name):
            raise ValueError(
                f"--fields {name}: must be {', '.join(known_fields)}, or the output of a block, "
                "such as blocks.6"
            )
    of_blocks = any(map(is_block, names))
    if of_blocks:
        stack_of(names)
    for option in ("sample", "seed"):
        value = vars(options)[option]
        if value is not None and not of_blocks:
            raise ValueError(
                f"--{option} {value}: is for outputs of blocks; give --pool none --fields blocks.6"
            )
    if options.seed is not None and options.sample is None:
        raise ValueError(f"--seed {options.seed}: is for --sample; give the patches per image")
    return names
