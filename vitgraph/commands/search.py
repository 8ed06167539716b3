"""``vitgraph search``: finds the items of a ``vitgraph embed`` job nearest to an image or a clip.

Torch and the library's packages are imported inside the functions, so that ``--help`` and errors
about arguments are printed without the seconds that these imports take.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..terminal import counted, format_table, printable
from .arguments import DEVICE_HELP, add_download, add_sampling, check_names, is_video

if TYPE_CHECKING:
    from encoders import Encoder
    from encoders.contract import Limits

    from ..embedding.records import JobSettings
    from ..search.vectors import Hit, Vectors


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command ``search`` to its parser."""
    parser.add_argument("vectors", metavar="VECTORS", help="folder that `vitgraph embed` wrote")
    parser.add_argument("query", type=Path, metavar="QUERY", help="image or clip to search for")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="by default 20")
    parser.add_argument(
        "--html", type=Path, metavar="PAGE", help="also write a page of pictures, keys and cosines"
    )
    group = parser.add_argument_group("encoder")
    add_sampling(group, ", if the query is a clip; by default as the job did")
    group.add_argument("--device", help=DEVICE_HELP)
    add_download(group)
    group.add_argument("--no-progress", action="store_true", help="no progress bars")


def search(options: argparse.Namespace) -> None:
    """Run ``vitgraph search``: print the items of an embedding job most similar to a query.

    The query, an image or a clip, is encoded with the checkpoint, the dtype, the bounds of image
    size and the sampling of the job. With ``--html``, an HTML page of the pictures is written, too.

    Raises:
        ValueError: an option has an invalid value, the folder holds no finished job that wrote
            vectors, the query cannot be read, or the checkpoint has changed since the job
            began.
        OSError: the HTML page cannot be written.
    """
    _check(options)
    from ..devices import device_text
    from ..search.vectors import Vectors

    bars = not options.no_progress and sys.stderr is not None and sys.stderr.isatty()
    vectors = Vectors(options.vectors, bars)
    if not vectors.manifest.items:
        raise ValueError(f"{options.vectors}: holds no vectors")
    settings = vectors.settings
    limits = _limits(options, settings)
    pool = settings["pool"]
    assert pool != "none"  # `Vectors` rejects a job that wrote all tokens instead of vectors
    encoder = _load(options, settings)
    images, videos = ([], [options.query]) if is_video(options.query) else ([options.query], [])
    with_length_1 = settings["normalize"]
    query = encoder.embed(images, videos, pool=pool, normalize=with_length_1, **limits._asdict())
    hits = vectors.nearest(query[0].detach().cpu().float().numpy(), options.top)
    rows = [(str(n), f"{hit.cosine:.4f}", hit.key) for n, hit in enumerate(hits, 1)]
    print(format_table(("rank", "cosine", "key"), rows))
    facts = {**_facts(options, vectors, limits), "device": device_text(encoder.device)}
    summary = "; ".join(f"{name} {value}" for name, value in facts.items() if name != "folder")
    print(f"\n{printable(summary)}")
    if options.html:
        _write_page(options, vectors, hits, facts)


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
    if is_video(options.query) and fps is None and num_frames is None:
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


def _check(options: argparse.Namespace) -> None:
    """Check the options and the query; the folder of vectors is not needed.

    Raises:
        ValueError: an option has an invalid value, or the query is neither an image nor a clip.
    """
    from .encode_checks import check_media

    if options.top < 1:
        raise ValueError(f"--top {options.top}: must be at least 1")
    check_names(None, options.device)
    if options.html:
        _check_page(options.html)
    images, videos = ([], [options.query]) if is_video(options.query) else ([options.query], [])
    if images:
        for name in ("fps", "num_frames"):
            if (value := vars(options)[name]) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} {value}: samples a clip, and {options.query} is "
                    "an image; leave it out"
                )
    names = {"images": images, "video": videos, "repo": "REPO_OR_FOLDER", "out": "OUT"}
    check_media(argparse.Namespace(**names))


def _check_page(page: Path) -> None:
    if page.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--html {page}: the page is HTML; let its name end in .html")
    if page.is_dir() or not page.parent.is_dir():
        raise ValueError(f"--html {page}: must be a file in a folder that exists")
    if page.exists() and page.stat().st_size:
        from ..search.page import is_page

        if not is_page(page):
            raise ValueError(f"--html {page}: exists and is not a search page; give another name")


def _load(options: argparse.Namespace, settings: JobSettings) -> Encoder:
    """Load the encoder that an embedding job used, at the same commit."""
    from weights import load_encoder

    from ..devices import enough_memory, read_device
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
    device = read_device(options.device)
    with enough_memory(checkpoint, "give another --device"):
        return load_encoder(
            checkpoint,
            revision=None if is_folder else commit,
            subfolder=settings["subfolder"],
            family=settings["family"],
            dtype=settings["dtype"],
            device=device,
            cache_dir=options.cache_dir,
            token=options.token,
            local_files_only=options.local_files_only,
            progress=not options.no_progress,
        )


def _facts(options: argparse.Namespace, vectors: Vectors, limits: Limits) -> dict[str, str]:
    """Return facts about the search, by their labels, to print and to write into the HTML page."""
    settings = vectors.settings
    pool = f"{settings['pool']}{', length 1' if settings['normalize'] else ''}"
    fp8 = "; the job ran products in fp8, the query none"
    given_limits = ((name, value) for name, value in limits._asdict().items() if value is not None)
    sizes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given_limits)
    return {
        "folder": options.vectors,
        "checkpoint": settings["checkpoint"],
        "commit": settings["commit"],
        "encoder": f"{settings['dtype']}, pool {pool}"
        + f", {sizes}" * bool(sizes)
        + fp8 * (settings.get("precision") == "fp8"),
        "numbers": f"cosines with {counted(vectors.count, 'vector')}; the mean of the folder was "
        "subtracted from each of them and from the query's"
        + f"; {counted(vectors.left_out, 'vector')} left out, with values that are not finite"
        * bool(vectors.left_out),
    }


def _write_page(
    options: argparse.Namespace, vectors: Vectors, hits: list[Hit], facts: dict[str, str]
) -> None:
    from ..embedding.sources.reading import ImageReader, SourceOptions
    from ..search.page import write_page

    settings, default = vectors.settings, SourceOptions()
    source = SourceOptions(
        settings.get("column", default.column),
        settings.get("subset", default.subset),
        settings.get("split", default.split),
        settings.get("any_path", default.any_path),
        fetch_urls=False,
    )
    reader = ImageReader(source)
    write_page(options.html, options.query, hits, facts, reader)
    print(f"wrote {printable(str(options.html))}")
