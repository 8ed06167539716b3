"""The arguments of the commands: reading them, help, and where a checkpoint comes from."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib.metadata import entry_points
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypedDict

if TYPE_CHECKING:
    from encoders.contract import Precision
    from encoders.streams import Pool
    from weights import Fetch

_GROUPS = {
    "features": ("encode", "embed", "search"),
    "checkpoints": ("list", "inspect", "extract", "cache"),
    "trying and measuring": ("demo", "bench"),
}
"""The commands in the order of ``vitgraph --help``, by the title of their group."""


class CommandHelp(NamedTuple):
    """The summary of a command, and an example of its command line, for ``vitgraph --help``."""

    summary: str
    example: str


COMMANDS = {
    "encode": CommandHelp(
        "Encode images and videos into a file.",
        "vitgraph encode Qwen/Qwen3-VL-2B-Instruct street.jpg --out street.safetensors",
    ),
    "embed": CommandHelp(
        "Encode a folder of images into shards of vectors; goes on where it was stopped.",
        "vitgraph embed Qwen/Qwen3-VL-2B-Instruct photos --out vectors --device auto",
    ),
    "search": CommandHelp(
        "Find the images of an embedding job that are nearest to a photograph.",
        "vitgraph search vectors street.jpg --html street.html",
    ),
    "list": CommandHelp(
        "List the published towers, with every repo id that has each.",
        "vitgraph list 'qwen3*'",
    ),
    "inspect": CommandHelp(
        "Say what a checkpoint holds and loading would fetch, without downloading a tensor.",
        "vitgraph inspect Qwen/Qwen3-VL-2B-Instruct",
    ),
    "extract": CommandHelp(
        "Write the tower alone: configs and model.safetensors.",
        "vitgraph extract Qwen/Qwen3-VL-2B-Instruct tower",
    ),
    "cache": CommandHelp(
        "List, verify or remove the towers that were fetched and kept.", "vitgraph cache list"
    ),
    "demo": CommandHelp(
        "Encode sample photographs with a small seeded checkpoint of every family.",
        "vitgraph demo --out demo",
    ),
    "bench": CommandHelp(
        "Measure the speed or the error of a checkpoint on this machine.",
        "vitgraph bench speed Qwen/Qwen3-VL-2B-Instruct --device cuda",
    ),
}
# Reading these values from the types Precision, Pool and Fetch would import torch, which takes
# seconds; a test checks that they are the same.
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp8")
POOLS: tuple[Pool, ...] = ("none", "mean", "max", "cls", "head")
FETCHES: tuple[Fetch, ...] = ("auto", "ranges", "shards")


def list_commands() -> str:
    """Return the text of ``vitgraph --help``: commands in groups, with summaries and examples."""
    groups = []
    for title, names in _GROUPS.items():
        commands = [(name, *COMMANDS[name]) for name in names]
        lines = [f"  {name:9} {summary}\n{'':12}{example}" for name, summary, example in commands]
        groups.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(groups)


class Parser(argparse.ArgumentParser):
    """A parser that raises an error of one line where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError with ``message`` and a hint to the ``--help`` of the command."""
        raise ValueError(f"{message} (see `{self.prog} --help`)")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments of a command line.

    Unlike argparse alone, it also takes images that follow options and, after ``--``, images whose
    names begin with a dash.

    Args:
        parser: the parser of the whole command line.
        arguments: the arguments of the process, without its name.

    Returns:
        The options of the command; ``command`` is the function to call.

    Raises:
        ValueError: an unknown command or option, or an argument that is missing or too many.
    """
    head = before_dashes(arguments)
    # argparse would take "-a.jpg" for an option; "./-a.jpg" names the same file.
    tail = [f"./{name}" if name.startswith("-") else name for name in arguments[len(head) + 1 :]]
    dashes = ["--"] * (len(head) < len(arguments))
    options, positional = parser.parse_known_args([*head, *dashes, *tail])
    positional = [argument for argument in positional if argument != "--"]
    unknown_options = [argument for argument in positional if argument.startswith("-")]
    if unknown_options or (positional and "images" not in options):
        options.parser.error(f"unrecognized arguments: {' '.join(unknown_options or positional)}")
    if positional:
        options.images += map(Path, positional)
    return options


def before_dashes(arguments: Sequence[str]) -> list[str]:
    """Return the arguments before the first ``--``; those after it are never options."""
    return list(takewhile(lambda argument: argument != "--", arguments))


def add_source(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Add the arguments that say where a checkpoint comes from to the parser of a command.

    Args:
        parser: the parser of the command.
        optional: whether the command may be called without a checkpoint.
    """
    parser.add_argument(
        "repo",
        nargs="?" if optional else None,
        metavar="REPO_OR_FOLDER",
        help="Hugging Face repo id, or a folder",
    )
    group = parser.add_argument_group("checkpoint")
    group.add_argument("--revision", help="branch, tag or commit")
    group.add_argument("--subfolder", help="folder inside the repo that holds the checkpoint")
    add_download(group)
    group.add_argument(
        "--fetch",
        choices=FETCHES,
        default="auto",
        help="the tower's byte ranges or the whole files that hold it; by default what is less",
    )
    group.add_argument("--force-download", action="store_true", help="fetch what is cached again")
    group.add_argument("--max-workers", type=int, default=8, metavar="N", help="requests at once")
    group.add_argument("--no-progress", action="store_true", help="no progress bars")
    group.add_argument(
        "--family",
        metavar="NAME",
        help="take the tower for one of this family (qwen3_vl, ...) if its type is not known",
    )


def add_download(group: argparse._ActionsContainer) -> None:
    """Add the options that say where downloads are kept, and whether and with which token they are
    made."""
    group.add_argument("--cache-dir", type=Path, help="where downloads are kept")
    group.add_argument("--token", help="access token; by default the one you are logged in with")
    group.add_argument("--local-files-only", action="store_true", help="never touch the network")


SIZES = ("min_pixels", "max_pixels", "max_tiles", "max_soft_tokens")
"""The keywords of ``preprocess`` that bound the size of an image."""
LIMITS = (*SIZES, "fps", "num_frames")
"""The options of ``encode`` that are keywords of ``preprocess``: sizes, and sampling of videos."""


def add_sizes(group: argparse._ActionsContainer) -> None:
    """Add an option per keyword of ``preprocess`` that bounds the size of an image or video."""
    group.add_argument("--min-pixels", type=int, help="smallest area of an image in pixels")
    group.add_argument("--max-pixels", type=int, help="largest area of an image in pixels")
    group.add_argument("--max-tiles", type=int, help="most tiles per image, besides a thumbnail")
    group.add_argument(
        "--max-soft-tokens",
        type=int,
        help="most tokens per image: 70, 140, ...; docs/families.md: which families take which",
    )


def add_encoder(group: argparse._ActionsContainer) -> None:
    """Add the options for the encoder's dtype, device, precision and tokens per call."""
    group.add_argument("--dtype", help="float32, bfloat16, ...; by default auto, the stored one")
    group.add_argument("--device", help="cpu (the default), cuda, mps, ...; auto: the GPU if any")
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bf16",
        help="fp8: products in e4m3 where they are faster, on an H100 or newer (default: bf16)",
    )
    group.add_argument(
        "--max-tokens-per-call",
        type=int,
        metavar="N",
        help="an item above it runs in parts, between its frames or tiles",
    )


DTYPE_NAMES = ("float32", "float16", "bfloat16", "float64")
"""The names that ``--dtype`` takes beside "auto"."""
_DEVICES = frozenset(
    (
        *("auto", "cpu", "cuda", "fpga", "hip", "hpu", "ideep", "ipu", "lazy", "maia", "meta"),
        *("mkldnn", "mps", "mtia", "opencl", "opengl", "privateuseone", "ve", "vulkan", "xla"),
        "xpu",
    )
)
"""The kinds of device that torch knows by name without further packages, and "auto"."""


_VIDEOS = frozenset(
    [
        *(".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg"),
        *(".mts", ".ogv", ".webm", ".wmv"),
    ]
)
"""The suffixes of files that are taken for videos; PIL reads none of these formats."""


def is_video(file: Path) -> bool:
    """Return whether a file is a video, judged by its suffix alone."""
    return file.suffix.lower() in _VIDEOS


def check_names(dtype: str | None, device: str | None) -> None:
    """Check the values of ``--dtype`` and ``--device`` without importing torch.

    Args:
        dtype: name of a dtype, or "auto"; None if the option was not given.
        device: name of a device such as "cuda:0", or "auto"; None if the option was not given.

    Raises:
        ValueError: there is no such dtype, or torch knows no device of such a name.
    """
    if dtype not in (None, "auto", *DTYPE_NAMES):
        raise ValueError(f"--dtype {dtype}: must be one of auto, {', '.join(DTYPE_NAMES)}")
    device_match = re.fullmatch(r"(\w+)(:\d+)?", device or "cpu")
    # An installed package may add a kind of device to torch (entry point "torch.backends").
    kind = device_match and device_match[1]
    if kind is None or not (kind in _DEVICES or entry_points(group="torch.backends")):
        raise ValueError(f"--device {device}: must be auto, cpu, cuda, cuda:0, mps, ...")


def check_source(options: argparse.Namespace) -> None:
    """Check that the checkpoint that ``options.repo`` names exists, as :func:`check_repo` does.

    Nothing is checked if the command was called without a checkpoint.
    """
    if options.repo is not None:
        check_repo(options.repo, read_hub(options), options.family)


def check_repo(repo: str, hub: HubKeywords, family: str | None = None) -> None:
    """Check that a checkpoint exists, before torch is imported, which takes seconds.

    The Hub is not asked about the main branch of a repo in ``PUBLISHED``.

    Args:
        repo: a repo id, or a path.
        hub: keywords of ``vitgraph.load_encoder`` that say where the repo is read from, and how.
        family: name of the family to take if the model type is not known; None if none was named.

    Raises:
        CheckpointError: there is no such repo, the Hub cannot be reached, or a folder holds no
            checkpoint.
        ValueError: keywords that contradict each other, or an unknown family.
    """
    from weights import HubOptions, open_checkpoint
    from weights.files import read_contents
    from weights.published import PUBLISHED, check_family

    check_family(family)
    hub_options = HubOptions(**hub)
    published = any(model.repo_id == repo for model in PUBLISHED)
    if published and not (hub_options.revision or hub_options.subfolder or Path(repo).exists()):
        return
    checkpoint = open_checkpoint(repo, hub_options)
    if checkpoint.commit is None:  # a folder; reading the index of a repo here would download it
        read_contents(checkpoint)


def check_checkpoint(repo: str, right: str) -> None:
    """Check that the first argument of a command is not a file to encode, in place of a checkpoint.

    Args:
        repo: the first argument: a repo id, or a path.
        right: the command line with a checkpoint in front, which the error suggests.

    Raises:
        ValueError: the argument is a file, and not a safetensors file.
    """
    path = Path(repo)
    if path.is_file() and path.suffix.lower() != ".safetensors":
        raise ValueError(
            f"{repo}: is no checkpoint; the first argument is a repo id or the folder of a "
            f"checkpoint: {right}"
        )


class HubKeywords(TypedDict, total=False):
    """The keywords of ``vitgraph.load_encoder`` that say how a repo is read."""

    revision: str | None
    subfolder: str | None
    cache_dir: Path | None
    token: str | None
    local_files_only: bool
    fetch: Fetch
    force_download: bool
    max_workers: int
    progress: bool


class SourceKeywords(HubKeywords, total=False):
    """The keywords of ``vitgraph.load_encoder`` that choose a checkpoint: those of the Hub, and a
    family."""

    family: str | None


def read_source(options: argparse.Namespace) -> SourceKeywords:
    """Return the keywords of ``vitgraph.load_encoder`` for the options of :func:`add_source`."""
    return {**read_hub(options), "family": options.family}


def read_hub(options: argparse.Namespace) -> HubKeywords:
    """Return the keywords of ``vitgraph.load_encoder`` that say where a repo is read, and how."""
    return {
        "revision": options.revision,
        "subfolder": options.subfolder,
        "cache_dir": options.cache_dir,
        "token": options.token,
        "local_files_only": options.local_files_only,
        "fetch": options.fetch,
        "force_download": options.force_download,
        "max_workers": options.max_workers,
        "progress": not options.no_progress,
    }
