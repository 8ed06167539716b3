"""``vitgraph encode``: encodes images and videos and writes a file of their features.

Torch and the packages are imported inside the functions, so that ``--help`` and mistakes are
answered at once.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ..embedding.records import OutDtype
from ..terminal import format_table, printable
from .arguments import (
    LIMITS,
    POOLS,
    add_encoder,
    add_sampling,
    add_sizes,
    add_source,
    check_source,
    read_source,
    shows_bars,
)
from .graph_options import GraphOptions, read_graph_options

if TYPE_CHECKING:
    from torch import Tensor

    from encoders import Encoder
    from encoders.contract import EncoderOutput, Limits, PartialOutput
    from encoders.streams import Pool, StreamOptions

    from ..features import Item

MOST_PLOTTED = 16
"""The most images and videos that ``vitgraph encode --plot`` draws, which are all in memory at the
same time.
"""


def add_encode(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command ``encode`` to its parser."""
    parser.usage = "vitgraph encode REPO_OR_FOLDER IMAGE ... --out FILE [options]"
    add_source(parser)
    parser.add_argument("images", nargs="*", type=Path, metavar="IMAGE", help="image files")
    _add_items(parser.add_argument_group("items"))
    _add_output(parser.add_argument_group("output"))
    add_encoder(parser.add_argument_group("encoder"))
    _add_graphs(parser.add_argument_group("graphs"))


def _add_items(group: argparse._ArgumentGroup) -> None:
    """Add ``--video``, the options that sample its frames, and the bounds of an image's size."""
    group.add_argument(
        "--video",
        action="append",
        default=[],
        type=Path,
        metavar="CLIP",
        help="a video; may be repeated",
    )
    add_sampling(group)
    add_sizes(group)


def _add_output(group: argparse._ArgumentGroup) -> None:
    """Add the options for the output: the features file, its pooling and dtype, and the plot."""
    group.add_argument("--out", type=Path, required=True, help="features file (.safetensors)")
    group.add_argument(
        "--pool",
        choices=POOLS,
        default="none",
        help="write one vector per item: the mean or max of its tokens, its class token (cls), or "
        "the vector that the checkpoint was trained to compare (head: CLIP, SigLIP, C-RADIO); by "
        "default none, all features",
    )
    group.add_argument("--normalize", action="store_true", help="scale each vector to length 1")
    group.add_argument(
        "--out-dtype",
        choices=("stored", *get_args(OutDtype)),
        default="stored",
        help="dtype of the file; by default stored, the encoder's own, and float32 for vectors",
    )
    group.add_argument(
        "--plot",
        type=Path,
        metavar="PNG",
        help=f"also draw the feature maps of the first {MOST_PLOTTED} items",
    )


def _add_graphs(group: argparse._ArgumentGroup) -> None:
    """Add ``--graph``, and the options that say which CUDA graphs are captured."""
    group.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="capture CUDA graphs, then replay them; the capture takes seconds, so this pays from "
        "dozens of items on",
    )
    group.add_argument(
        "--budgets", metavar="N,N,...", help="output tokens of each graph; by default chosen"
    )
    group.add_argument("--max-batch-size", type=int, metavar="N", help="most items per replay")
    group.add_argument(
        "--modality",
        metavar="image|video|image+video",
        help="kind of items to capture graphs for; by default that of the files",
    )


def check(options: argparse.Namespace) -> GraphOptions | None:
    """Check the arguments as far as possible before the encoder is loaded.

    Returns:
        The settings of the CUDA graphs to capture, or None without ``--graph``.

    Raises:
        ValueError: a mistake in the arguments, or a file that is not an image or a video.
        CheckpointError: there is no such checkpoint.
    """
    from .encode_checks import check_media, check_options, check_targets

    check_options(options)
    graphs = read_graph_options(
        graph=options.graph,
        budgets=options.budgets,
        max_batch_size=options.max_batch_size,
        modality=options.modality,
        images=options.images,
        videos=options.video,
    )
    check_targets(options.out, options.plot, inputs=(*options.images, *options.video))
    check_source(options)
    check_media(options)
    return graphs


def encode(options: argparse.Namespace) -> None:
    """Run ``vitgraph encode``: encode images and videos, write and draw the features, and print a
    table."""
    graphs = check(options)
    from PIL import Image

    from encoders.streams import ResultSettings

    from ..devices import device_text
    from .encode_graphs import graph_encoder, summary
    from .encode_items import encode_items, open_media, row

    # check_media has already warned about very large images, with the name of the file. The filter
    # is set for the whole process, because images are decoded in threads; ``cli.main`` undoes it.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    limits = _limits(options)
    settings = ResultSettings(options.pool, options.normalize, options.max_tokens_per_call)
    encoder = _load(options)
    encoder.item_encoder().check(settings)
    graphed = None
    if graphs:
        graphed = graph_encoder(encoder, graphs, options.precision, shows_bars(options))
    elif options.precision == "fp8":
        encoder = encoder.accelerated(precision="fp8")
    media = open_media(options.images, options.video)
    stream = _stream_options(options, graphs)
    encoded = encode_items(encoder, media, limits, settings, stream, graphed)
    rows: list[tuple[str, ...]] = []
    plotted: list[tuple[Tensor, Tensor, str]] = []
    with _writing(options, encoder) as write:
        for result in encoded:
            write(result.item, result.output if result.vector is None else result.vector)
            rows.append(row(result))
            if options.plot and len(plotted) < MOST_PLOTTED:
                name = _plot_text(Path(result.item.name).name)
                plotted.append((result.media.still, result.feature_map, name))
    if options.plot:
        _plot(options, *zip(*plotted, strict=True))
    _print_table(rows, settings.pool)
    print(f"encoded on {device_text(encoder.device)}")
    if graphed is not None:
        print(summary(graphed.stats()))
    for path in filter(None, (options.out, options.plot)):
        print(f"wrote {printable(str(path))}")
    if options.plot and len(rows) > len(plotted):
        print(f"the plot shows the first {len(plotted)} of {len(rows)} items")


def _print_table(rows: Sequence[tuple[str, ...]], pool: Pool) -> None:
    """Print a row per item; its features have the column "pooler_output", or "vector" if pooled."""
    from .encode_items import HEADER

    column = "pooler_output" if pool == "none" else "vector"
    print(format_table([column if name == "pooler_output" else name for name in HEADER], rows))


def _load(options: argparse.Namespace) -> Encoder:
    """Load the encoder that the options name, on their device and in their dtype."""
    from weights import load_encoder

    from ..devices import enough_memory, read_device

    device = read_device(options.device)
    source = read_source(options)
    with enough_memory(options.repo, "give --dtype bfloat16 or another --device"):
        return load_encoder(options.repo, **source, dtype=options.dtype, device=device)


def _stream_options(options: argparse.Namespace, graphs: GraphOptions | None) -> StreamOptions:
    """Return how images and videos are batched, and whether a progress bar is shown."""
    from encoders.streams import StreamOptions

    batch_tokens = None if graphs is not None and graphs.items > 1 else 1
    total = len(options.images) + len(options.video)
    progress = shows_bars(options)
    return StreamOptions(batch_tokens, progress=progress, total=total, decode=options.decode)


def _writing(
    options: argparse.Namespace, encoder: Encoder
) -> AbstractContextManager[Callable[[Item, EncoderOutput | PartialOutput | Tensor], None]]:
    from ..devices import DTYPES
    from ..features import FeatureFormat, writing_features

    # The features file records the commit, because the branch may later point to another one.
    commit = encoder.published.commit if encoder.published else None
    file_format = FeatureFormat(options.pool, options.normalize, DTYPES.get(options.out_dtype))
    return writing_features(options.out, options.repo, commit, type(encoder).__name__, file_format)


def _plot(
    options: argparse.Namespace,
    stills: Sequence[Tensor],
    maps: Sequence[Tensor],
    titles: Sequence[str],
) -> None:
    from ..plots import plot_feature_maps, write_figure

    figure = plot_feature_maps(stills, maps, titles=titles, title=_plot_text(options.repo))
    write_figure(figure, options.plot)


def _plot_text(name: str) -> str:
    """Return a name with ``$`` escaped, because matplotlib reads text between two ``$`` as a
    formula.
    """
    return printable(name).replace("$", r"\$")


def _limits(options: argparse.Namespace) -> Limits:
    """Return the options that are keywords of ``preprocess``: bounds of an image's size, and the
    sampling of a video's frames.
    """
    from encoders.contract import Limits

    return Limits(**{name: value for name, value in vars(options).items() if name in LIMITS})
