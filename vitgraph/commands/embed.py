"""``vitgraph embed``: encodes the images and clips of a folder or list into shards of vectors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, get_args

from .. import __version__
from ..embedding.records import Format, JobReport, JobSettings, OutDtype
from .arguments import POOLS, add_encoder, add_sampling, add_sizes, add_source, read_source

if TYPE_CHECKING:
    from encoders import Encoder
    from graphwrap import GraphedEncoder

    from ..embedding.job import Job
    from ..embedding.manifest import Manifest
    from ..embedding.storage import Storage
    from .embed_options import Command

    Load: TypeAlias = Callable[[str], Encoder | GraphedEncoder]


def add_embed(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command ``embed`` to its parser."""
    add_source(parser, optional=True)
    parser.add_argument(
        "files",
        nargs="?",
        metavar="FOLDER|GLOB|LIST.txt|-|hf://datasets/NAME",
        help="images and, with --fps or --num-frames, clips: a folder (with all folders in it), a "
        "quoted pattern, a text file with one path per line (relative to that file), - for such "
        "lines on standard input, or a dataset of the Hub; a pattern or a list may also name .tar "
        "files (WebDataset) and .parquet files; s3://, gs://, https:// and "
        "hf://datasets/NAME/PATH name such files elsewhere",
    )
    parser.add_argument("--out", metavar="DIR", help="folder to write; may be s3:// or gs://")
    _add_features(parser)
    _add_output(parser)
    _add_encoder(parser)
    _add_inside(parser.add_argument_group("images inside other files"))
    _add_planning(parser.add_argument_group("planning"))
    _add_workers(parser.add_argument_group("several workers"))


def _add_features(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which features are written: pooling, fields and a sample."""
    parser.add_argument(
        "--pool",
        choices=(*POOLS[1:], POOLS[0]),
        help="one vector per item: the mean or max of its tokens, its class token (cls), or the "
        "vector that the checkpoint was trained to compare (head: CLIP, SigLIP, C-RADIO); none "
        "writes all tokens; by default head where there is one, else mean",
    )
    parser.add_argument("--normalize", action="store_true", help="scale each vector to length 1")
    parser.add_argument(
        "--fields",
        metavar="NAME,...",
        help="with --pool none: pooler_output, last_hidden_state, deepstack_features, or outputs "
        "of blocks (blocks.6, blocks.6.mlp, tiles.blocks.6); by default pooler_output",
    )
    parser.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="with --fields of blocks: N random patches of each image; by default all",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of --sample; by default 0")


def _add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options for the output: file format, dtype, shards, errors and the summary."""
    parser.add_argument(
        "--format",
        choices=get_args(Format),
        default="npy",
        help="format of the files; by default npy; vllm writes all tokens of each image to a file "
        "of its own, which vLLM reads",
    )
    parser.add_argument(
        "--out-dtype",
        choices=get_args(OutDtype),
        help="dtype of the files; by default float32, with --format vllm the dtype of the weights",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="for a trial: the first N images of the source"
    )
    parser.add_argument(
        "--retry-errors",
        action="store_true",
        help="encode those images of an existing job again that had errors, from their current "
        "files",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a summary for programs; all other lines go to stderr",
    )
    parser.add_argument(
        "--shard-items",
        type=int,
        metavar="N",
        help="images per shard; by default 1000, 64 with --pool none, 16 with --format vllm",
    )


def _add_encoder(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how images are resized and how the encoder runs."""
    add_sizes(parser)
    add_sampling(parser, "; clips are then embedded beside images, one row per clip")
    add_encoder(parser)
    parser.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="replay CUDA graphs; by default if the device is CUDA",
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        metavar="N",
        help="output tokens per batch; by default 8,192 on a GPU and 1,024 on the CPU",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="threads that decode images; by default one per core, at most 16",
    )


def _add_inside(group: argparse._ArgumentGroup) -> None:
    """Add the options for images inside parquet tables, lists of paths and datasets."""
    group.add_argument(
        "--column",
        metavar="NAME",
        help="column of images in parquet files and datasets; by default image",
    )
    group.add_argument("--subset", metavar="NAME", help="configuration of the dataset")
    group.add_argument("--split", metavar="NAME", help="split of the dataset; by default train")
    group.add_argument(
        "--any-path",
        action="store_true",
        help="a list or a cell may name files outside its own folder",
    )
    group.add_argument(
        "--fetch-urls",
        action="store_true",
        help="a list or a cell may name https URLs of public addresses, 64 MiB and 60 s at most",
    )


def _add_planning(group: argparse._ArgumentGroup) -> None:
    """Add ``--plan``, which estimates the time and disk space of a job, and its options."""
    group.add_argument(
        "--plan",
        action="store_true",
        help="write nothing: read a sample of the images, and print hours, cores, bytes and the "
        "bottleneck of the job; with --device, measure the encoder on that device",
    )
    group.add_argument("--gpus", type=int, metavar="N", help="GPUs to plan for; by default several")


def _add_workers(group: argparse._ArgumentGroup) -> None:
    """Add the options for several worker processes, and ``--status`` and ``--verify``, which check
    a job.
    """
    group.add_argument(
        "--shard",
        metavar="I/N",
        help="this process is worker I of N, counted from 0, and writes shards I, I+N, ...; by "
        "default as torchrun or SLURM say",
    )
    group.add_argument(
        "--status",
        metavar="DIR",
        help="print the progress of the job in this folder; exit code 1 until it is complete",
    )
    group.add_argument(
        "--verify",
        metavar="DIR",
        help="read every file of the job in this folder, and list missing and damaged ones",
    )


def embed(options: argparse.Namespace) -> int:
    """Run ``vitgraph embed``.

    Returns:
        The exit code: 0; 3 if images could not be encoded; 1 if ``--status`` finds shards that are
        missing, or ``--verify`` files that are missing or damaged.

    Raises:
        ValueError: an option has an invalid value, or the folder holds a job with other settings.
    """
    from ..embedding.verify import read_status, verify
    from .embed_options import Command, check_embed

    for folder, check in ((options.status, read_status), (options.verify, verify)):
        if folder is not None:
            if options.repo is not None:
                raise ValueError(
                    f"{options.repo}: --status and --verify take only the folder of a job; leave "
                    "the checkpoint and the images out"
                )
            return _print_report(check(folder), options.json)
    check_embed(options)
    return run_worker(Command(options))


def run_worker(command: Command) -> int:
    """Encode and write the shards of this worker, or print an estimate if ``--plan`` is given.

    Args:
        command: the parsed options, with the source of images and the rank of this worker.

    Returns:
        The exit code: 0, or 3 if images could not be encoded.

    Raises:
        ValueError: an option has an invalid value, or the folder holds a job with other settings.
        OSError: the folder cannot be written to, or the disk is full.
    """
    from ..embedding.report import finish
    from ..embedding.storage import open_storage
    from ..packages import require_pyarrow

    options = command.options
    if options.format == "parquet":
        require_pyarrow()
    load = cache(partial(_load, command))
    if options.plan:
        from .embed_plan import print_plan

        print_plan(command, lambda: load(_settings(command, None)["commit"]))
        return 0
    job = _open_job(command, open_storage(options.out), load)
    if job.todo:
        job.write_missing_shards(load(job.commit))
    return _print_report(finish(job), options.json)


def _print_report(report: JobReport, as_json: bool) -> int:
    """Print a report about a job as lines or as JSON, and return the exit code that it names."""
    if as_json:
        print(json.dumps({**report.summary, "exit_code": report.exit_code}))
    else:
        print(*report.lines, sep="\n")
    return report.exit_code


def _open_job(command: Command, storage: Storage, load: Load) -> Job:
    """Open the embedding job whose manifest lies in a folder, or begin a new job there.

    The manifest holds the job's settings and its list of files. The first worker writes it after
    the encoder is loaded and checked, when nothing but a bad image can fail any more. If the
    storage has locks, the other workers wait for the manifest; otherwise several workers may try to
    write it, and all take the one that was written first.
    """
    from ..embedding.job import Job
    from ..embedding.manifest import Manifest
    from ..embedding.storage import JOB

    manifest = Manifest.find(storage)
    if manifest is None:
        with storage.exclusive(JOB):
            manifest = Manifest.find(storage)
            if manifest is None:
                job = _begin_job(command, storage, load)
                if job is not None:
                    return job
    manifest = manifest or Manifest.read(storage)
    settings = _settings(command, manifest)
    manifest.compare(settings, command.items_per_shard, storage.name)
    storage.tidy()
    retry = command.options.retry_errors
    job = Job(storage, manifest, command.worker, command.reader, command.calls(), retry)
    if job.todo:
        command.say(job.prepare(load(job.commit)))
    return job


def _begin_job(command: Command, storage: Storage, load: Load) -> Job | None:
    """List the files of a job, load its encoder, and write its manifest."""
    from ..embedding.job import Job
    from ..embedding.large_images import LargestFiles
    from ..embedding.manifest import Manifest, is_listed_in_manifest, write_list

    settings, source = _settings(command, None), command.source
    largest = LargestFiles()
    file_list = write_list(storage, largest.watch(command.files()), command.items_per_shard)
    created = False
    try:
        notes = [*source.notes, *source.left_out.describe()]
        command.say(notes)
        file_list.files["said"] = notes
        manifest = Manifest(
            settings, file_list.items, command.items_per_shard, file_list.keys, file_list.files
        )
        job = Job(storage, manifest, command.worker, command.reader, command.calls())
        if job.todo:
            encoder = load(job.commit)
            command.say(job.prepare(encoder))
            job.is_warned = largest.warn(command.reader, encoder.item_encoder(), job.calls.limits)
        created = manifest.create(storage)
    finally:
        # It may have been created even if an error or Ctrl-C came before its function returned.
        if not created and not is_listed_in_manifest(storage, file_list):
            storage.delete([file_list.files["name"]])
    return job if created else None


def _settings(command: Command, manifest: Manifest | None) -> JobSettings:
    """Return all settings that the vectors of a job depend on, without reading any tensor.

    The default of ``--pool``, which depends on the checkpoint, is chosen here.
    """
    from weights import DtypeName, inspect_checkpoint

    from ..embedding.sources.files import FILES, checkpoint_state

    names: tuple[DtypeName, ...] = get_args(DtypeName)
    options = command.options
    source = read_source(options)
    job_settings = None if manifest is None else manifest.settings
    if job_settings is not None and job_settings.get("checkpoint") == options.repo:
        is_folder = job_settings["commit"].startswith(FILES)
        source["revision"] = source["revision"] if is_folder else job_settings["commit"]
    info = inspect_checkpoint(options.repo, **source)
    command.choose_pool(info.head, job_settings)
    folder, commit = Path(options.repo).expanduser(), info.commit
    dtype_name = info.dtype if options.dtype in (None, "auto") else options.dtype
    # check_embed has rejected all other names; `next` gives the name its Literal type.
    dtype = next(name for name in names if name == dtype_name)
    source_options, limits = command.reader.options, command.limits
    return {
        "version": __version__,
        "source": command.source.identity(),
        "column": source_options.column,
        "subset": source_options.subset,
        "split": source_options.split,
        "any_path": source_options.any_path,
        "fetch_urls": source_options.fetch_urls,
        "checkpoint": str(folder.resolve()) if commit is None else options.repo,
        "subfolder": options.subfolder,
        "revision": options.revision,
        "commit": commit or checkpoint_state(options.repo, options.subfolder),
        "family": options.family,
        "dtype": dtype,
        "precision": options.precision,
        "decode": options.decode,
        "min_pixels": limits.min_pixels,
        "max_pixels": limits.max_pixels,
        "max_tiles": limits.max_tiles,
        "max_soft_tokens": limits.max_soft_tokens,
        "fps": limits.fps,
        "num_frames": limits.num_frames,
        "pool": command.pool,
        "normalize": options.normalize,
        "fields": list(command.fields),
        "sample": options.sample,
        "seed": None if options.sample is None else options.seed or 0,
        "format": options.format,
        "out_dtype": command.out_dtype or dtype,
        "limit": options.limit,
    }


def _load(command: Command, commit: str) -> Encoder | GraphedEncoder:
    """Load the encoder of a job at a commit; capture CUDA graphs on CUDA, or with ``--graph``."""
    from encoders.contract import OUTPUT_FIELDS
    from graphwrap import GraphedEncoder
    from weights import load_encoder

    from ..devices import enough_memory, read_device
    from ..embedding.activations import outputs_of
    from ..embedding.sources.files import FILES, checkpoint_state

    options, is_folder = command.options, commit.startswith(FILES)
    source = read_source(options)
    if not is_folder:
        source["revision"] = commit
    device = command.worker.device_for(read_device(options.device))
    with enough_memory(options.repo, "give --dtype bfloat16 or another --device"):
        encoder = load_encoder(
            options.repo,
            **source,
            dtype=options.dtype,
            device=device,
        )
    if is_folder and checkpoint_state(options.repo, options.subfolder) != commit:
        raise ValueError(f"{options.repo}: has changed while it was loaded; begin again")
    graphs = device.type == "cuda" if options.graph is None else options.graph
    # Class tokens are extras, and their towers have no DeepStack: a graph keeps nothing else.
    fields = ("deepstack_features",) if command.pool == "cls" else command.fields
    outputs = outputs_of(encoder.paths, fields)
    if not graphs:
        encoder = encoder.accelerated(precision="fp8") if options.precision == "fp8" else encoder
        return encoder.with_extras([name for name in outputs if name not in OUTPUT_FIELDS])
    graphed = GraphedEncoder(encoder, outputs=outputs, precision=options.precision)
    return graphed.capture(progress=not options.no_progress)
