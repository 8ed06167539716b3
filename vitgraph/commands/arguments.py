"""Command-line arguments that several commands have in common: parsing, checks, and help texts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib.metadata import entry_points
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypedDict

from ..embedding.sources.suffixes import is_clip
from ..terminal import is_terminal

if TYPE_CHECKING:
    from encoders.contract import Precision
    from encoders.streams import Pool
    from weights import Fetch

_GROUPS = {
    "features": ("encode", "embed", "search", "maps"),
    "checkpoints": ("list", "inspect", "extract", "cache"),
    "trying and measuring": ("demo", "bench"),
}
"""The names of the commands by the title of their group, in the order of ``vitgraph --help``."""


class CommandHelp(NamedTuple):
    """The summary of a command and an example call, which ``vitgraph --help`` prints."""

    summary: str
    example: str


COMMANDS = {
    "encode": CommandHelp(
        "Encode images and videos into a file.",
        "vitgraph encode Qwen/Qwen3-VL-2B-Instruct street.jpg --out street.safetensors",
    ),
    "embed": CommandHelp(
        "Encode a folder of images and clips into shards of vectors; resumes where it stopped.",
        "vitgraph embed Qwen/Qwen3-VL-2B-Instruct photos --out vectors",
    ),
    "search": CommandHelp(
        "Find the images and clips of an embedding job that are most similar to a query.",
        "vitgraph search vectors street.jpg --html street.html",
    ),
    "maps": CommandHelp(
        "Write a page that shows the attention and the nearest patches of the patch you click.",
        "vitgraph maps Qwen/Qwen3-VL-2B-Instruct street.jpg --html maps.html",
    ),
    "list": CommandHelp(
        "List the published towers, with every repo id that has each.",
        "vitgraph list 'qwen3*'",
    ),
    "inspect": CommandHelp(
        "Show what a checkpoint holds and what loading would download; downloads no tensor.",
        "vitgraph inspect Qwen/Qwen3-VL-2B-Instruct",
    ),
    "extract": CommandHelp(
        "Write only the tower: configs and model.safetensors.",
        "vitgraph extract Qwen/Qwen3-VL-2B-Instruct tower",
    ),
    "cache": CommandHelp(
        "List, verify or remove downloaded towers and measured times of graphs.",
        "vitgraph cache list",
    ),
    "demo": CommandHelp(
        "Draw feature maps of sample photographs, by small checkpoints with random weights.",
        "vitgraph demo --out demo",
    ),
    "bench": CommandHelp(
        "Measure the speed, the rounding error or the features of a checkpoint on this machine.",
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
    """An argument parser that raises a one-line error where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError with ``message`` that also names the ``--help`` of the command."""
        raise ValueError(f"{message} (see `{self.prog} --help`)")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments of a command line.

    Unlike argparse, this function also accepts images, a folder or a query that follow options and,
    after ``--``, image paths that begin with a dash.

    Args:
        parser: the parser of the whole command line.
        arguments: the arguments of the process without the program name, such as ``sys.argv[1:]``.

    Returns:
        The parsed arguments; their attribute ``command`` is the function that runs the command.

    Raises:
        ValueError: an unknown command or option, a missing argument, or a superfluous one.
    """
    head = before_dashes(arguments)
    # argparse would parse "-a.jpg" as an option; "./-a.jpg" names the same file.
    tail = [f"./{name}" if name.startswith("-") else name for name in arguments[len(head) + 1 :]]
    dashes = ["--"] * (len(head) < len(arguments))
    options, positional = parser.parse_known_args([*head, *dashes, *tail])
    positional = [argument for argument in positional if argument != "--"]
    # A dash alone is standard input.
    unknown_options = [name for name in positional if name.startswith("-") and name != "-"]
    if not unknown_options:
        positional = _take_late(options, positional)
    if unknown_options or positional:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown_options or positional)}")
    return options


def _take_late(options: argparse.Namespace, late: list[str]) -> list[str]:
    """Put arguments that follow options into their places, and return those that have none.

    argparse gives an optional argument no value if the options precede it, as in
    ``vitgraph embed REPO --out DIR FOLDER``.
    """
    values = vars(options)
    if "images" in values:
        options.images += map(Path, late)
        return []
    empty = [name for name in ("repo", "files", "query") if values.get(name, "") is None]
    values.update(zip(empty, late, strict=False))
    return late[len(empty) :]


def before_dashes(arguments: Sequence[str]) -> list[str]:
    """Return the arguments before the first ``--``; arguments after it are never options."""
    return list(takewhile(lambda argument: argument != "--", arguments))


def add_source(
    parser: argparse.ArgumentParser, optional: bool = False, several: bool = False
) -> None:
    """Add the arguments that name a checkpoint and say how to download it (repo, revision, ...).

    Args:
        parser: the parser of the command.
        optional: whether the user may leave out the checkpoint.
        several: whether there may be several, as ``options.repos`` in place of ``options.repo``.
    """
    parser.add_argument(
        "repos" if several else "repo",
        nargs="+" if several else "?" if optional else None,
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
        help="download the tower's byte ranges or the whole files that hold it; by default auto, "
        "the smaller of the two",
    )
    group.add_argument("--force-download", action="store_true", help="download cached files again")
    group.add_argument("--max-workers", type=int, default=8, metavar="N", help="downloads at once")
    group.add_argument("--no-progress", action="store_true", help="show no progress bars")
    group.add_argument(
        "--family",
        metavar="NAME",
        help="load a checkpoint of unknown model type as one of this family (qwen3_vl, ...)",
    )


def add_download(group: argparse._ActionsContainer) -> None:
    """Add the options ``--cache-dir`` (where downloads are kept), ``--token`` (the access token of
    the Hub) and ``--local-files-only`` (download nothing)."""
    group.add_argument("--cache-dir", type=Path, help="where downloads are kept")
    group.add_argument("--token", help="access token; by default the one you are logged in with")
    group.add_argument("--local-files-only", action="store_true", help="never touch the network")


SIZES = ("min_pixels", "max_pixels", "max_tiles", "max_soft_tokens")
"""The keywords of ``preprocess`` that bound the size of an image."""
LIMITS = (*SIZES, "fps", "num_frames")
"""The keywords of ``preprocess`` that ``vitgraph encode`` has options for: the bounds of an image's
size, and the sampling of a video's frames."""


def add_sizes(group: argparse._ActionsContainer) -> None:
    """Add the options that bound the size of an image or video, one per name in :data:`SIZES`."""
    group.add_argument("--min-pixels", type=int, help="smallest area of an image in pixels")
    group.add_argument("--max-pixels", type=int, help="largest area of an image in pixels")
    group.add_argument("--max-tiles", type=int, help="most tiles per image, besides a thumbnail")
    group.add_argument(
        "--max-soft-tokens",
        type=int,
        help="most tokens per image: 70, 140, 280, 560 or 1120 (Gemma 4); the limits that each "
        "family takes are in docs/families.md",
    )


DTYPE_HELP = "dtype of the encoder: float32, bfloat16, ...; by default auto, as stored"
"""The help text of ``--dtype``."""
DEVICE_HELP = "cpu, cuda, cuda:1, mps, ...; by default auto, the GPU if there is one, else the CPU"
"""The help text of ``--device``."""


def add_encoder(group: argparse._ActionsContainer) -> None:
    """Add the options for the encoder's dtype, device, precision and tokens per call."""
    group.add_argument("--dtype", help=DTYPE_HELP)
    group.add_argument("--device", help=DEVICE_HELP)
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bf16",
        help="fp8: matrix products in e4m3 where that is faster, on an H100 or newer; bf16 (the "
        "default): in the dtype of the encoder",
    )
    group.add_argument(
        "--decode",
        choices=("cpu", "gpu"),
        default="cpu",
        help="gpu: decode JPEG files with nvImageCodec, whose pixels differ from PIL's by "
        "rounding; by default cpu",
    )
    group.add_argument(
        "--max-tokens-per-call",
        type=int,
        metavar="N",
        help="encode an item of more than N tokens in parts, cut between its frames or tiles",
    )


DTYPE_NAMES = ("float32", "float16", "bfloat16", "float64")
"""The values that ``--dtype`` accepts besides "auto"."""
_DEVICES = frozenset(
    (
        *("auto", "cpu", "cuda", "fpga", "hip", "hpu", "ideep", "ipu", "lazy", "maia", "meta"),
        *("mkldnn", "mps", "mtia", "opencl", "opengl", "privateuseone", "ve", "vulkan", "xla"),
        "xpu",
    )
)
"""The device types that torch knows without further packages, and "auto"."""


def add_sampling(group: argparse._ActionsContainer, note: str = "") -> None:
    """Add ``--fps`` and ``--num-frames``, which sample the frames of videos.

    Args:
        group: the parser or group to add them to.
        note: text that follows in both help texts.
    """
    help = "sample videos to this many frames"
    group.add_argument("--fps", type=float, help=f"{help} per second{note}")
    group.add_argument("--num-frames", type=int, metavar="N", help=f"{help}{note}")


def is_video(file: Path) -> bool:
    """Return whether a file is a video, judged only by its suffix."""
    return is_clip(file.name)


def read_blocks(text: str | None) -> list[int] | None:
    """Read the value of ``--blocks``, such as "0,6,-1"; None without the option.

    Raises:
        ValueError: it is no list of whole numbers.
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--blocks {text}: must be numbers of blocks with commas between them, as 0,6,-1"
        ) from None


def check_names(dtype: str | None, device: str | None) -> None:
    """Check the values of ``--dtype`` and ``--device`` without importing torch.

    Args:
        dtype: name of a dtype, or "auto"; None if the option was not given.
        device: name of a device such as "cuda:0", or "auto"; None if the option was not given.

    Raises:
        ValueError: there is no such dtype, or torch knows no such type of device.
    """
    if dtype not in (None, "auto", *DTYPE_NAMES):
        raise ValueError(f"--dtype {dtype}: must be one of auto, {', '.join(DTYPE_NAMES)}")
    device_match = re.fullmatch(r"(\w+)(:\d+)?", device or "cpu")
    # An installed package may add a device type to torch (entry point "torch.backends").
    kind = device_match and device_match[1]
    if kind is None or not (kind in _DEVICES or entry_points(group="torch.backends")):
        raise ValueError(f"--device {device}: must be auto, cpu, cuda, cuda:0, mps, ...")


def check_source(options: argparse.Namespace) -> None:
    """Call :func:`check_repo` for ``options.repo``, the checkpoint on the command line, if any."""
    if options.repo is not None:
        check_repo(options.repo, read_hub(options), options.family)


def check_repo(repo: str, hub: HubKeywords, family: str | None = None) -> None:
    """Check that a checkpoint exists, before the seconds that the import of torch takes.

    For the main branch of a repo in ``PUBLISHED``, the list of supported checkpoints, no request is
    sent to the Hub.

    Args:
        repo: a Hugging Face repo id, or the path of a local folder or file.
        hub: keywords of ``vitgraph.load_encoder``, such as revision and token.
        family: value of ``--family``, the encoder family to load the checkpoint as if the model
            type in its config is not known; None without the option.

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
    if checkpoint.commit is None:  # a local folder; the contents of a repo would be downloaded here
        read_contents(checkpoint)


def check_checkpoint(repo: str, right: str) -> None:
    """Check that the first argument of a command is not an image, given instead of a checkpoint.

    Args:
        repo: the first argument: a repo id, or a path.
        right: the correct command line, with a checkpoint first, for the error message.

    Raises:
        ValueError: the argument is a file, and not a safetensors file.
    """
    path = Path(repo)
    if path.is_file() and path.suffix.lower() != ".safetensors":
        raise ValueError(
            f"{repo}: is not a checkpoint; the first argument is a repo id or the folder of a "
            f"checkpoint: {right}"
        )


class HubKeywords(TypedDict, total=False):
    """The keywords of ``vitgraph.load_encoder`` for reading a repo of the Hub."""

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
    """The keywords of ``vitgraph.load_encoder`` that choose a checkpoint: the keywords for reading
    a repo of the Hub, and the encoder family."""

    family: str | None


def read_source(options: argparse.Namespace) -> SourceKeywords:
    """Return the options that :func:`add_source` added, as keywords of ``load_encoder``."""
    return {**read_hub(options), "family": options.family}


def shows_bars(options: argparse.Namespace) -> bool:
    """Return whether to show progress bars: on a terminal, unless ``--no-progress`` was given."""
    return not options.no_progress and is_terminal()


def read_hub(options: argparse.Namespace) -> HubKeywords:
    """Return the options for reading a repo of the Hub, as keywords of ``load_encoder``."""
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
