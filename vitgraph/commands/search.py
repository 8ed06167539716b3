"""``vitgraph search``: finds items of a ``vitgraph embed`` job by an image, a clip or words.

Torch and the library's packages are imported inside the functions, so that ``--help`` and errors
about arguments are printed without the seconds that these imports take.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ..terminal import counted, format_table, printable
from .arguments import DEVICE_HELP, add_download, add_sampling, is_video, shows_bars
from .search_checks import check_search, is_text
from .search_report import print_facts, reader_of

if TYPE_CHECKING:
    from torch import Tensor

    from encoders.contract import Limits

    from ..embedding.records import JobSettings


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command ``search`` to its parser."""
    parser.add_argument("vectors", metavar="VECTORS", help="folder that `vitgraph embed` wrote")
    parser.add_argument(
        "query",
        nargs="?",
        metavar="QUERY",
        help="an image or a clip, or words such as 'a red car' if a CLIP, MetaCLIP, SigLIP or "
        "SigLIP2 repo made the vectors with --pool head",
    )
    parser.add_argument(
        "--top", type=int, default=20, metavar="N", help="how many to show; by default 20"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="PAGE",
        help="also write a page with pictures, keys and cosines",
    )
    group = parser.add_argument_group("near-duplicates, in place of a query")
    group.add_argument(
        "--pairs",
        type=float,
        metavar="COSINE",
        help="all pairs of images with this cosine or a larger one, such as 0.95",
    )
    group.add_argument("--csv", type=Path, metavar="FILE", help="write all of them to a CSV file")
    group.add_argument(
        "--max-pairs",
        type=int,
        default=1_000_000,
        metavar="N",
        help="list groups of images instead if there are more pairs; by default 1,000,000",
    )
    group = parser.add_argument_group("encoder")
    add_sampling(group, ", if the query is a clip; by default as the job did")
    group.add_argument("--device", help=DEVICE_HELP)
    add_download(group)
    group.add_argument("--no-progress", action="store_true", help="show no progress bars")


def search(options: argparse.Namespace) -> None:
    """Run ``vitgraph search``: print the items of an embedding job most similar to a query, or its
    near-duplicates.

    The query, an image or a clip, is encoded with the checkpoint, the dtype, the bounds of image
    size and the sampling of the job; a query of words by the text half of the checkpoint. With
    ``--html``, an HTML page of the pictures is written, too.

    Raises:
        ValueError: an option has an invalid value, the folder holds no finished job that wrote
            vectors, the query cannot be read, the vectors cannot be compared with words, or the
            checkpoint has changed since the job began.
        OSError: the HTML page or the table cannot be written.
    """
    check_search(options)
    from ..search.vectors import Vectors

    bars = shows_bars(options)
    vectors = Vectors(options.vectors, bars)
    if not vectors.manifest.items:
        raise ValueError(f"{options.vectors}: holds no vectors")
    if options.pairs is not None:
        from .search_pairs import print_pairs

        print_pairs(options, vectors)
        return
    words = is_text(options.query)
    if words:
        query, about = _embed_text(options, vectors.settings), ""
    else:
        query, about = _embed_file(options, vectors.settings)
    hits = vectors.nearest(query.cpu().float().numpy(), options.top, centred=not words)
    rows = [(str(n), f"{hit.cosine:.4f}", hit.key) for n, hit in enumerate(hits, 1)]
    print(format_table(("rank", "cosine", "key"), rows))
    over = f"over {counted(vectors.count, 'vector')}"
    score = f"plain cosine with the text, {over}"
    if not words:
        score = f"cosine after subtracting the mean vector of the folder, {over}"
    facts = print_facts(options, vectors, about, score, query.device)
    if options.html:
        from ..search.page import write_page

        shown = options.query if words else Path(options.query)
        write_page(options.html, shown, hits, facts, reader_of(vectors.settings))
        print(f"wrote {printable(str(options.html))}")


def _embed_text(options: argparse.Namespace, settings: JobSettings) -> Tensor:
    """Return the vector of a query of words, [D].

    Raises:
        ValueError: the vectors of the job cannot be compared with a text's.
    """
    from weights import WITH_TEXT

    from ..devices import enough_memory, read_device
    from ..search.texts import embed_texts

    if settings["pool"] != "head":
        raise ValueError(
            f"{options.vectors}: its vectors were pooled by --pool {settings['pool']}, and words "
            f"can be compared only with those that --pool head makes of {WITH_TEXT}"
        )
    source = _source(options, settings)
    device = read_device(options.device)
    with enough_memory(settings["checkpoint"], "give another --device"):
        vectors = embed_texts(settings["checkpoint"], [options.query], device=device, **source)
    return vectors[0]


def _embed_file(options: argparse.Namespace, settings: JobSettings) -> tuple[Tensor, str]:
    """Return the vector [D] of an image or clip, and a text about the limits of its size."""
    from weights import load_encoder

    from ..devices import enough_memory, read_device

    path = Path(options.query)
    images, videos = ([], [path]) if is_video(path) else ([path], [])
    limits = _limits(options, settings)
    source = _source(options, settings)
    with enough_memory(settings["checkpoint"], "give another --device"):
        encoder = load_encoder(
            settings["checkpoint"],
            **source,
            family=settings["family"],
            dtype=settings["dtype"],
            device=read_device(options.device),
        )
    pool = settings["pool"]
    assert pool != "none"  # `Vectors` rejects a job that wrote all tokens instead of vectors
    with_length_1 = settings["normalize"]
    query = encoder.embed(images, videos, pool=pool, normalize=with_length_1, **limits._asdict())
    given_limits = ((name, value) for name, value in limits._asdict().items() if value is not None)
    return query[0].detach(), ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in given_limits
    )


def _limits(options: argparse.Namespace, settings: JobSettings) -> Limits:
    """Return the job's keywords of ``preprocess``, with the sampling that the options name.

    Raises:
        ValueError: the query is a clip, and neither the job nor an option says which frames to
            take.
    """
    from encoders.contract import Limits

    fps, num_frames = options.fps, options.num_frames
    if fps is None and num_frames is None:
        fps, num_frames = settings.get("fps"), settings.get("num_frames")
    if is_video(Path(options.query)) and fps is None and num_frames is None:
        raise ValueError(
            f"{options.query}: is a clip, and the job in {options.vectors} encoded only images: "
            "say which frames to take with --fps or --num-frames"
        )
    return Limits(
        settings.get("min_pixels"),
        settings.get("max_pixels"),
        settings.get("max_tiles"),
        settings.get("max_soft_tokens"),
        fps,
        num_frames,
    )


class _Source(TypedDict):
    """The keywords with which the checkpoint of a job is read again."""

    revision: str | None
    subfolder: str | None
    cache_dir: Path | None
    token: str | None
    local_files_only: bool
    progress: bool


def _source(options: argparse.Namespace, settings: JobSettings) -> _Source:
    """Return the keywords that read the checkpoint of a job at the same commit.

    Raises:
        ValueError: the checkpoint is a folder that has changed, or is not there any more.
    """
    from ..embedding.sources.files import FILES, checkpoint_state

    checkpoint, commit = settings["checkpoint"], settings["commit"]
    is_folder = commit.startswith(FILES)
    if is_folder and not Path(checkpoint).exists():
        raise ValueError(f"{checkpoint}: the checkpoint of the job is not there any more")
    if is_folder and checkpoint_state(checkpoint, settings["subfolder"]) != commit:
        raise ValueError(
            f"{checkpoint}: has changed since the job was begun, and vectors of other weights "
            "cannot be compared; embed the images again"
        )
    return {
        "revision": None if is_folder else commit,
        "subfolder": settings["subfolder"],
        "cache_dir": options.cache_dir,
        "token": options.token,
        "local_files_only": options.local_files_only,
        "progress": not options.no_progress,
    }
