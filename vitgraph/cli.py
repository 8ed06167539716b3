"""The command line: its grammar, and one short function per command.

Torch and the packages are imported inside the commands, so that ``--help`` and mistyped commands
answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from . import __version__
from .commands import bench, cache, demo, embed, encode, maps, search, towers
from .commands.arguments import (
    COMMANDS,
    Parser,
    add_source,
    before_dashes,
    check_source,
    list_commands,
    parse,
    read_source,
)
from .terminal import make_streams_safe, one_line, show_warning

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[Parser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``vitgraph``.

    Args:
        argv: the arguments without the name of the program; None takes those of the process.

    Returns:
        The exit code: 0 for success, 1 if ``embed --status`` or ``--verify`` finds shards that are
        missing or damaged, 2 for an error that the user can fix, 3 if ``embed`` could not encode
        some images, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    make_streams_safe()
    try:
        options = parse(build_parser(), arguments)
        command: Callable[[argparse.Namespace], int | None] = options.command
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            code = command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has closed it, as in `vitgraph list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        if "--debug" in before_dashes(arguments):
            traceback.print_exc()
        print(f"vitgraph: error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vitgraph: interrupted", file=sys.stderr)
        return 130
    else:
        return code or 0
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of ``vitgraph``; the subparser of a command sets the function to call."""
    parser = Parser(
        prog="vitgraph",
        usage="vitgraph [-h] [--version] COMMAND ...",
        description="Vision encoders from a repo id or a folder.",
        # The epilog lists the commands, since argparse cannot show them in groups.
        epilog=list_commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vitgraph {__version__}")
    commands = parser.add_subparsers(
        prog="vitgraph", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for name, add, command in (
        ("encode", encode.add_encode, encode.encode),
        ("embed", embed.add_embed, embed.embed),
        ("search", search.add_search, search.search),
        ("maps", maps.add_maps, maps.maps),
        ("list", towers.add_list, towers.list_towers),
        ("inspect", _add_inspect, inspect),
        ("extract", _add_extract, extract),
        ("demo", demo.add_demo, demo.demo),
    ):
        subparser = _add_parser(commands, name)
        add(subparser)
        subparser.add_argument(
            "--debug", action="store_true", help="show the traceback of an error"
        )
        subparser.set_defaults(command=command, parser=subparser)
    cache.add_cache(_add_parser(commands, "cache"))
    bench.add_bench(_add_parser(commands, "bench"))
    return parser


def _add_parser(commands: Commands, name: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        description=COMMANDS[name].summary,
        epilog=f"example:\n  {COMMANDS[name].example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def _add_extract(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--force", action="store_true", help="replace OUT if it holds a tower")


_DOWNLOADED = {"ranges": "the byte ranges", "shards": "the whole files", "nothing": "nothing"}


def inspect(options: argparse.Namespace) -> None:
    """Run ``vitgraph inspect``: print family, layout, size and config of a checkpoint's tower."""
    check_source(options)
    from weights import inspect_checkpoint

    info = inspect_checkpoint(options.repo, **read_source(options))
    if options.json:
        print(json.dumps(info.to_dict(), indent=2))
        return
    lines = {
        "checkpoint": info.name,
        "commit": info.commit or "(a folder)",
        "family": f"{info.family}, {info.encoder}",
        "layout": f"{info.layout}, names begin with {info.prefix or 'no prefix'}",
        "tower": f"{info.parameters:,} parameters in {info.tensors} of "
        f"{info.checkpoint_tensors} tensors, {info.bytes / 1e6:,.1f} MB",
        "dtype": ", ".join(
            f"{dtype} {n / 1e6:,.1f} MB" for dtype, n in info.bytes_by_dtype.items()
        ),
        **({"fp8": info.quantisation} if info.quantisation else {}),
        **({"adapter": info.adapter} if info.adapter else {}),
        **({"not loaded": f"an unknown connector, {info.unread[0]}"} if info.unread else {}),
        "files": ", ".join(info.shards),
        "transfer": f"{info.bytes_as_ranges / 1e6:,.1f} MB as byte ranges, "
        f"{info.bytes_as_shards / 1e6:,.1f} MB as whole files; cached: {info.cached}; "
        f"to download: {_DOWNLOADED[info.fetch]}"
        + (", where an earlier download was cut off" if info.unfinished else ""),
        "config": ", ".join(f"{name}={value}" for name, value in asdict(info.config).items()),
    }
    for name, value in lines.items():
        print(f"{name:12}{value}")


def extract(options: argparse.Namespace) -> None:
    """Write a folder with the config and the weights of a vision tower: ``vitgraph extract``."""
    # An existing folder without --force is an error, found later without a request to the Hub.
    if options.force or not options.out.exists():
        check_source(options)
    from weights import extract_encoder

    extract_encoder(options.repo, options.out, overwrite=options.force, **read_source(options))
    print(f"wrote {options.out}")
