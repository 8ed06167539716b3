"""``vitgraph maps``: writes a page on which one clicks a patch and sees what it attends to.

Torch and the packages are imported inside the functions, so that ``--help`` and mistakes are
answered at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..terminal import printable, readable
from .arguments import (
    DEVICE_HELP,
    DTYPE_HELP,
    SIZES,
    add_sizes,
    add_source,
    check_checkpoint,
    check_names,
    check_source,
    read_blocks,
    read_source,
    shows_bars,
)


def add_maps(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command ``maps`` to its parser."""
    parser.usage = "vitgraph maps REPO_OR_FOLDER IMAGE ... --html PAGE [options]"
    add_source(parser)
    parser.add_argument("images", nargs="*", type=Path, metavar="IMAGE", help="image files")
    parser.add_argument(
        "--html", type=Path, required=True, metavar="PAGE", help="the page to write, one file"
    )
    parser.add_argument(
        "--blocks",
        metavar="N,N,...",
        help="blocks to show, negative ones from the end; by default four, evenly spread",
    )
    parser.add_argument(
        "--path", default="image", help="the views to show, image (the default), tiles, ..."
    )
    group = parser.add_argument_group("encoder")
    add_sizes(group)
    group.add_argument("--dtype", help=DTYPE_HELP)
    group.add_argument("--device", help=DEVICE_HELP)
    parser.set_defaults(video=[], out=Path("FILE"))


def maps(options: argparse.Namespace) -> None:
    """Run ``vitgraph maps``: write the page.

    Raises:
        ValueError: an option has an invalid value, an image cannot be read, or a checkpoint cannot
            be loaded.
        OSError: the page cannot be written.
    """
    blocks = read_blocks(options.blocks)
    _check(options)
    from weights import load_encoder

    from ..devices import enough_memory, read_device
    from ..plots.explorer import write_explorer

    with enough_memory(options.repo, "give another --device or fewer --blocks"):
        encoder = load_encoder(
            options.repo,
            **read_source(options),
            dtype=options.dtype or "auto",
            device=read_device(options.device),
        )
        write_explorer(
            options.html,
            encoder,
            options.images,
            blocks=blocks,
            path=options.path,
            title=f"Attention and nearest patches: {options.repo}",
            min_pixels=options.min_pixels,
            max_pixels=options.max_pixels,
            max_tiles=options.max_tiles,
            max_soft_tokens=options.max_soft_tokens,
            progress=shows_bars(options),
        )
    size = readable(options.html.stat().st_size)
    print(f"wrote {printable(str(options.html))}, {size}")


def _check(options: argparse.Namespace) -> None:
    """Check the options, the images and the checkpoint before torch is imported.

    Raises:
        ValueError: an option has an invalid value, an image cannot be read, or there is no such
            checkpoint.
    """
    from ..pages import check_page
    from .encode_checks import check_media

    check_names(options.dtype, options.device)
    for name in SIZES:
        value = vars(options)[name]
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be positive")
    check_page(options.html, "maps")
    check_checkpoint(options.repo, "vitgraph maps REPO_OR_FOLDER IMAGE --html PAGE")
    check_media(options)
    check_source(options)
