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
from typing import Any

from . import __version__
from .commands.arguments import (
    EXAMPLES,
    Parser,
    add_source,
    before_dashes,
    check_source,
    list_commands,
    parse,
    read_source,
)
from .terminal import make_streams_safe, one_line, show_warning


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code: 0 for success, 1 if ``embed`` finds a job that is not done or not whole, 2
        for an error that the user can mend, 3 if ``embed`` could not encode some images, 130 for an
        interrupt.
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
    except BrokenPipeError:  # `vitgraph list | head`: the reader has had enough
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
    """Build the parser of the whole command line."""
    parser = Parser(
        prog="vitgraph",
        usage="vitgraph [-h] [--version] COMMAND ...",
        description="Vision encoders from a repo id or a folder.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vitgraph {__version__}")
    # The epilog lists the commands, since argparse cannot show them in groups.
    commands = parser.add_subparsers(
        prog="vitgraph", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    _add_encode(commands)
    _add_embed(commands)
    _add_search(commands)
    _add_list(commands)
    _add_inspect(commands)
    _add_extract(commands)
    _add_cache(commands)
    _add_bench(commands)
    _add_demo(commands)
    parser.epilog = list_commands(
        {name: command.description for name, command in commands.choices.items()}
    )
    return parser


def _add_parser(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        description=summary,
        epilog=f"example:\n  {EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_command(
    commands: object, name: str, command: Callable[[argparse.Namespace], int | None], summary: str
) -> argparse.ArgumentParser:
    parser = _add_parser(commands, name, summary)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command=command, parser=parser)
    return parser


def _add_encode(commands: object) -> None:
    from .commands.encode import add_encode, encode

    summary = "Encode images and videos into a file."
    add_encode(_add_command(commands, "encode", encode, summary))


def _add_embed(commands: object) -> None:
    from .commands.embed import add_embed, embed

    summary = "Encode a folder of images into shards of vectors; goes on where it was stopped."
    add_embed(_add_command(commands, "embed", embed, summary))


def _add_search(commands: object) -> None:
    from .commands.search import add_search, search

    summary = "Find the images of an embedding job that are nearest to a photograph."
    add_search(_add_command(commands, "search", search, summary))


def _add_list(commands: object) -> None:
    from .commands.towers import add_list, list_towers

    summary = "List the published towers, with every repo id that has each."
    add_list(_add_command(commands, "list", list_towers, summary))


def _add_inspect(commands: object) -> None:
    summary = "Say what a checkpoint holds and loading would fetch, without downloading a tensor."
    parser = _add_command(commands, "inspect", inspect, summary)
    add_source(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def _add_extract(commands: object) -> None:
    summary = "Write the tower alone: configs and model.safetensors."
    parser = _add_command(commands, "extract", extract, summary)
    add_source(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--force", action="store_true", help="replace OUT if it holds a tower")


def _add_cache(commands: object) -> None:
    from .commands.cache import add_cache

    summary = "List, verify or remove the towers that were fetched and kept."
    add_cache(_add_parser(commands, "cache", summary))


def _add_bench(commands: object) -> None:
    from .commands.benching.bench import add_bench, print_list

    summary = "Print or measure figures; without a name, list the measured ones."
    add_bench(_add_command(commands, "bench", print_list, summary))


def _add_demo(commands: object) -> None:
    from .commands.demo import add_demo, demo

    summary = "Encode sample photographs with a small seeded checkpoint of every family."
    add_demo(_add_command(commands, "demo", demo, summary))


_FETCHED = {"ranges": "the byte ranges", "shards": "the whole files", "nothing": "nothing"}


def inspect(options: argparse.Namespace) -> None:
    """Print what a checkpoint holds, for ``vitgraph inspect``."""
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
        "files": ", ".join(info.shards),
        "transfer": f"{info.bytes_as_ranges / 1e6:,.1f} MB as byte ranges, "
        f"{info.bytes_as_shards / 1e6:,.1f} MB as whole files; cached: {info.cached}; "
        f"to fetch: {_FETCHED[info.fetch]}"
        + (", where an earlier fetch was cut off" if info.unfinished else ""),
        "config": ", ".join(f"{name}={value}" for name, value in asdict(info.config).items()),
    }
    for name, value in lines.items():
        print(f"{name:12}{value}")


def extract(options: argparse.Namespace) -> None:
    """Write a folder with the files of the vision tower alone, for ``vitgraph extract``."""
    # Without --force, an existing folder is an error before anything is fetched.
    if options.force or not options.out.exists():
        check_source(options)
    from weights import extract_encoder

    extract_encoder(options.repo, options.out, overwrite=options.force, **read_source(options))
    print(f"wrote {options.out}")
