"""The checks of ``vitgraph encode`` before any download; torch is imported only where needed."""

from __future__ import annotations

import argparse
import re
import shlex
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path

from PIL import Image
from safetensors import SafetensorError, safe_open

from ..packages import require_matplotlib
from .arguments import LIMITS, check_checkpoint, check_names, is_video


def check_options(options: argparse.Namespace) -> None:
    """Check only the values of the options of ``vitgraph encode``; no image is opened.

    Raises:
        ValueError: a number that is not positive, an unknown dtype or device, an option without
            another option that it needs, or an image or a folder of images as the first argument,
            where a checkpoint is expected.
    """
    check_names(options.dtype, options.device)
    for name in (*LIMITS, "max_tokens_per_call"):
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and not value > 0:
            raise ValueError(f"{option} {value}: must be positive")
        if value is not None and name in ("fps", "num_frames") and not options.video:
            raise ValueError(f"{option} samples videos: pass one with --video")
    if options.normalize and options.pool == "none":
        raise ValueError(
            "--normalize: needs one vector per item; add --pool mean, max, cls or head"
        )
    first = Path(options.repo)
    check_checkpoint(options.repo, _command(options, "REPO_OR_FOLDER", first))
    if first.is_dir() and not (options.images or options.video or any(first.glob("*.json"))):
        raise ValueError(
            f"{first}: is a folder without a checkpoint, and nothing else is named; its images are "
            f"encoded by `{shlex.join(['vitgraph', 'embed', 'REPO_OR_FOLDER', str(first)])} --out "
            "DIR`"
        )


def _command(options: argparse.Namespace, repo: str, file: Path) -> str:
    """Return the command line that encodes a file as an image or as a video, for error messages."""
    item = ["--video"] * is_video(file) + [str(file)]
    return shlex.join(["vitgraph", "encode", repo, *item, "--out", str(options.out)])


def check_targets(out: Path, plot: Path | None, inputs: Sequence[Path]) -> None:
    """Check, before any download, that the output files can be written and replace no other file.

    Args:
        out: the features file to write; an older features file may be replaced.
        plot: the picture to write; None without ``--plot``.
        inputs: the images and videos to encode.

    Raises:
        ValueError: an output file cannot be written, has a wrong suffix, or would replace a file of
            another kind.
    """
    for path in filter(None, (out, plot)):
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"{path}: must be a file in a folder that exists")
    if out.is_file() and out.stat().st_size and not _is_features_file(out):
        raise ValueError(f"--out {out}: exists and is not a features file; give another name")
    if out.suffix.lower() != ".safetensors":
        raise ValueError(
            f"--out {out}: the features file is a safetensors file; let its name end in "
            f".safetensors, as {out.with_suffix('.safetensors')}"
        )
    if plot:
        _check_plot(plot, (*inputs, out))


def _is_features_file(path: Path) -> bool:
    """Return whether a file is a safetensors file that ``vitgraph encode`` wrote (by metadata)."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            return "vitgraph" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _check_plot(plot: Path, other_files: Sequence[Path]) -> None:
    """Check that matplotlib can write the picture of ``--plot``, without replacing another file."""
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if plot.suffix[1:].lower() not in formats:
        raise ValueError(f"{plot}: the suffix must name a picture format: {', '.join(formats)}")
    for path in other_files:
        if path.resolve() == plot.resolve():
            raise ValueError(f"--plot {plot}: would replace {path}; give another name")


def check_media(options: argparse.Namespace) -> None:
    """Check the images and videos without decoding them.

    Of an image the header is read; of a video only the existence of the file is checked.

    Raises:
        ValueError: no file is named; a path is a folder, a URL, not an image or does not exist; or
            there are videos and PyAV is not installed.
    """
    if not options.images and not options.video:
        raise ValueError("nothing to encode: name at least one image, or a --video")
    for path in options.images:
        _check_image(path, options)
    for path in options.video:
        _check_file(path, "", "name the clips in it")
    if options.video:
        from encoders.inputs import require_av  # last: it imports torch, which takes seconds

        require_av()


def _check_image(file: Path, options: argparse.Namespace) -> None:
    folder = shlex.join(["vitgraph", "embed", options.repo, str(file), "--out", "DIR"])
    _check_file(
        file,
        "; in Python, encoder.encode(images=[vitgraph.load_image(URL)]) reads it",
        f"pass the paths of the images in it, or encode all of them: `{folder}`",
    )
    if is_video(file):
        raise ValueError(f"{file}: is a video: `{_command(options, options.repo, file)}`")
    if _may_be_heif(file):
        from encoders.inputs import learn_heif, prefix_errors

        with prefix_errors(str(file)):
            learn_heif(file)
    try:
        size = _read_size(file)
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"{file}: is larger than PIL opens ({error}): make it smaller beforehand; if you trust "
            "it, set PIL.Image.MAX_IMAGE_PIXELS = None in Python, and call encoder.encode there"
        ) from error
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(
            f"{file}: cannot be read as an image ({error}); it is damaged, truncated or of a "
            "format that PIL does not know: replace it or convert it"
        ) from error
    if prod(size) > (Image.MAX_IMAGE_PIXELS or prod(size)):
        warnings.warn(f"{file}: is very large, {size[0]} x {size[1]} pixels", stacklevel=2)


def _read_size(file: Path) -> tuple[int, int]:
    with warnings.catch_warnings():
        # PIL's warning does not name the file; `_check_image` issues one that does.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = Image.open(file)
        with image:
            return image.size


def _may_be_heif(path: Path) -> bool:
    """Return whether a file may be HEIF (phone photographs), AVIF or MP4, by its first 8 bytes."""
    with path.open("rb") as file:
        return file.read(8)[4:] == b"ftyp"


def _check_file(file: Path, of_url: str, of_folder: str) -> None:
    """Check that a path is a file."""
    # str(Path("https://...")) has one slash after the colon, because Path joins repeated slashes.
    if match := re.fullmatch(r"(\w{2,}):/+(.+)", str(file)):
        raise ValueError(
            f"{match[1]}://{match[2]}: is a URL, and files are encoded here: download it and give "
            f"the path{of_url}"
        )
    if file.is_dir():
        raise ValueError(f"{file}: is a folder; {of_folder}")
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file; check the path")
