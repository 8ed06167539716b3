"""What ``vitgraph encode`` checks before anything is read or fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from encoders.inputs import to_rgb
from encoders.streams import ItemResults

from ..features import is_features_file
from ..video import read_video, require_av


def check_targets(out: Path, plot: Path | None, inputs: Sequence[Path]) -> None:
    """Check before anything is fetched that the targets can be written and replace no other file.

    Args:
        out: the features file.
        plot: the picture, or None.
        inputs: the files that are read.

    Raises:
        ValueError: a target cannot be written, or would replace a file of another kind.
    """
    for path in filter(None, (out, plot)):
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"{path}: must be a file in a folder that exists")
    if out.is_file() and out.stat().st_size and not is_features_file(out):
        raise ValueError(f"--out {out}: exists and is no features file; give another name")
    if out.suffix.lower() != ".safetensors":
        raise ValueError(
            f"--out {out}: the features file is a safetensors file; let its name end in "
            f".safetensors, as {out.with_suffix('.safetensors')}"
        )
    if plot:
        _check_plot(plot, (*inputs, out))


def _check_plot(plot: Path, others: Sequence[Path]) -> None:
    from ..plots import check_plot

    check_plot(plot)
    for path in others:
        if path.resolve() == plot.resolve():
            raise ValueError(f"--plot {plot}: would replace {path}; give another name")


def check_media(images: Sequence[Path], videos: Sequence[Path]) -> None:
    """Look at every file without decoding it, before anything is fetched.

    Args:
        images: image files; the header of each is read.
        videos: video files; each must exist.

    Raises:
        ValueError: there is no file at all, or one is missing, a folder or not an image, or videos
            are given and PyAV is not installed.
    """
    if not images and not videos:
        raise ValueError("nothing to encode: name at least one image, or a --video")
    for path in images:
        if not _has_image_header(path):
            to_rgb(path)  # raises the error that says what is wrong
    if videos:
        require_av()
    for path in videos:
        if not path.is_file():
            read_video(path)  # raises the error that says what is wrong


def _has_image_header(path: Path) -> bool:
    try:
        with Image.open(path):
            return True
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False


def read_results(pool: str, normalize: bool, max_tokens_per_call: int | None) -> ItemResults:
    """Check the options of the command line before anything is read or fetched.

    Raises:
        ValueError: ``--normalize`` without a pool, or a limit that is no positive number.
    """
    if normalize and pool == "none":
        raise ValueError("--normalize: needs one vector per item; add --pool mean, max or cls")
    if max_tokens_per_call is not None and max_tokens_per_call < 1:
        raise ValueError(f"--max-tokens-per-call {max_tokens_per_call}: must be positive")
    return ItemResults(pool, normalize, max_tokens_per_call)
