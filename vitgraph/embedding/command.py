"""``vitgraph embed``: from the images of a folder or a list to shards of vectors."""

from __future__ import annotations

import argparse
import glob
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import __version__
from ..arguments import add_source, read_source

if TYPE_CHECKING:
    from encoders.streams import Encoding

SUFFIXES = frozenset(
    [
        ".apng",
        ".avif",
        ".bmp",
        ".dib",
        ".gif",
        ".ico",
        ".j2k",
        ".jfif",
        ".jp2",
        ".jpe",
        ".jpeg",
        ".jpg",
        ".pbm",
        ".pgm",
        ".png",
        ".pnm",
        ".ppm",
        ".tga",
        ".tif",
        ".tiff",
        ".webp",
    ]
)
"""Files of a folder that are taken for images; a list or a pattern may name any file."""


class File(NamedTuple):
    """One image file of a job."""

    key: str
    """Path relative to the source, with forward slashes."""
    path: str
    size: int
    """Bytes, -1 if there is no such file."""


def add_embed(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of the command."""
    add_source(parser)
    parser.add_argument(
        "files",
        metavar="FOLDER|GLOB|LIST.txt|-",
        help="images: a folder (with all folders in it), a quoted pattern, a text file with one "
        "path per line (relative to that file), or - for such lines on standard input",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--pool",
        choices=("mean", "max", "cls", "none"),
        default="mean",
        help="one vector per image, over its tokens; none writes all tokens; by default mean",
    )
    parser.add_argument("--normalize", action="store_true", help="vectors of length 1")
    parser.add_argument(
        "--fields",
        metavar="NAME,...",
        help="with --pool none: pooler_output, last_hidden_state, deepstack_features; by default "
        "pooler_output",
    )
    parser.add_argument("--format", choices=("npy", "safetensors", "parquet"), default="npy")
    parser.add_argument("--out-dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument(
        "--shard-items",
        type=int,
        metavar="N",
        help="images per shard; by default 1000, and 64 with --pool none",
    )
    parser.add_argument("--min-pixels", type=int, help="smallest image area (Qwen)")
    parser.add_argument("--max-pixels", type=int, help="largest image area (Qwen)")
    parser.add_argument("--max-tiles", type=int, help="most tiles per image (InternViT)")
    parser.add_argument("--dtype", help="float32, bfloat16, ...; by default auto, the stored one")
    parser.add_argument("--device", help="cpu (the default), cuda, mps, ...; auto: the GPU if any")
    parser.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="replay CUDA graphs; by default on a CUDA device",
    )
    parser.add_argument("--batch-tokens", type=int, metavar="N", help="output tokens per batch")
    parser.add_argument("--workers", type=int, metavar="N", help="threads that decode images")
    parser.add_argument(
        "--max-tokens-per-call",
        type=int,
        metavar="N",
        help="an image above it runs in parts, between its tiles",
    )


def embed(options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code: 0, or 3 if images could not be encoded.

    Raises:
        ValueError: arguments that make no sense, or a folder that holds another job.
    """
    from encoders.streams import ItemResults, StreamOptions

    from .job import Job
    from .shards import Manifest, digest_keys, require_parquet

    if options.format == "parquet":
        require_parquet()
        if options.pool == "none":
            raise ValueError(
                "--format parquet holds one vector per row: give --pool mean, or --format npy"
            )
    if options.shard_items is None:
        options.shard_items = 64 if options.pool == "none" else 1000
    if options.shard_items < 1:
        raise ValueError(f"--shard-items {options.shard_items}: must be at least 1")
    fields = _read_fields(options)
    files = find_files(options.files)
    keys = digest_keys(file.key for file in files)
    manifest = Manifest(_settings(options, fields), len(files), options.shard_items, keys)
    manifest.check(options.out)
    job = Job(options.out, files, manifest)
    if job.todo:
        job.run(
            _load(options, fields),
            _limits(options),
            ItemResults(options.pool, options.normalize, options.max_tokens_per_call),
            StreamOptions(
                options.batch_tokens, options.workers, not options.no_progress, on_error="keep"
            ),
        )
    return job.finish()


def _read_fields(options: argparse.Namespace) -> tuple[str, ...]:
    """The fields of the output that are read."""
    known = ("pooler_output", "last_hidden_state", "deepstack_features")
    if options.pool != "none":
        if options.fields is not None:
            raise ValueError(
                f"--fields {options.fields}: names what --pool none writes; a vector is made of "
                "pooler_output, with --pool cls of last_hidden_state"
            )
        return ("last_hidden_state" if options.pool == "cls" else "pooler_output",)
    fields = tuple(dict.fromkeys((options.fields or "pooler_output").split(",")))
    for name in fields:
        if name not in known:
            raise ValueError(f"--fields: {name!r} is none of {', '.join(known)}")
    return fields


def _limits(options: argparse.Namespace) -> dict[str, int | None]:
    """The keywords of ``preprocess``."""
    return {name: vars(options)[name] for name in ("min_pixels", "max_pixels", "max_tiles")}


def _settings(options: argparse.Namespace, fields: Sequence[str]) -> dict[str, Any]:
    """All that the vectors depend on; no tensor is read or fetched for it."""
    from weights import inspect_checkpoint

    from ..encode import check_checkpoint, read_dtype

    check_checkpoint(options.repo)
    read_dtype(options.dtype)
    info = inspect_checkpoint(options.repo, **read_source(options))
    folder = Path(options.repo)
    is_folder = info.commit is None
    return {
        "version": __version__,
        "checkpoint": str(folder.resolve()) if is_folder else options.repo,
        "subfolder": options.subfolder,
        "commit": _state_of(folder / (options.subfolder or "")) if is_folder else info.commit,
        "dtype": info.dtype if options.dtype in (None, "auto") else options.dtype,
        **_limits(options),
        "pool": options.pool,
        "normalize": options.normalize,
        "fields": list(fields),
        "format": options.format,
        "out_dtype": options.out_dtype,
    }


def _state_of(folder: Path) -> str:
    """What stands for the commit of a checkpoint on disk: names, sizes and times of its files."""
    files = [folder] if folder.is_file() else sorted(folder.iterdir())
    about = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
        if path.suffix in (".json", ".safetensors")
    ]
    return "files " + hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def _load(options: argparse.Namespace, fields: tuple[str, ...]) -> Encoding:
    """Load the encoder, and capture its graphs if that is wanted."""
    from graphwrap import GraphedEncoder
    from weights import load_encoder

    from ..encode import enough_memory, read_device, read_dtype

    device = read_device(options.device)
    with enough_memory(options.repo, "give --dtype bfloat16 or another --device"):
        encoder = load_encoder(
            options.repo,
            **read_source(options),
            dtype=read_dtype(options.dtype),
            device=device if options.device else None,  # None: the log names an idle GPU
        )
    graphs = device.type == "cuda" if options.graph is None else options.graph
    if not graphs:
        return encoder.encoding()
    graphed = GraphedEncoder(encoder, outputs=fields)
    return graphed.capture(progress=not options.no_progress).encoding()


def find_files(source: str) -> list[File]:
    """The files that a source names, sorted by key; a list keeps its order.

    Args:
        source: a folder, a pattern, a text file of paths, or "-" for paths on standard input.

    Raises:
        ValueError: nothing is named.
    """
    path = Path(source)
    if source == "-":
        files = _listed(sys.stdin.read(), Path())
    elif path.is_dir():
        files = sorted(_walk(path))
    elif path.suffix == ".txt" and path.is_file():
        files = _listed(path.read_text(encoding="utf-8", errors="surrogateescape"), path.parent)
    else:
        fixed = path.parts[:-1]
        depth = next((n for n, part in enumerate(fixed) if glob.has_magic(part)), len(fixed))
        root = Path(*fixed[:depth])
        names = sorted(glob.glob(source, recursive=True))
        files = sorted(_file(name, root) for name in names if os.path.isfile(name))
    if not files:
        raise ValueError(
            f"{source}: names no image; give a folder with images, a pattern in quotes, a .txt "
            "file with one path per line, or - for paths on standard input"
        )
    return files


def _walk(root: Path) -> Iterator[File]:
    """Image files below a folder; names that begin with a dot are left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES:
                yield _file(os.path.join(folder, name), root)


def _listed(text: str, root: Path) -> list[File]:
    return [_file(str(root / line), root) for line in text.splitlines() if line.strip()]


def _file(name: str, root: Path) -> File:
    path = Path(name)
    inside = path.is_relative_to(root)
    try:
        size = path.stat().st_size
    except OSError:
        size = -1
    return File((path.relative_to(root) if inside else path).as_posix(), name, size)
