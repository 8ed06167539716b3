"""``vitgraph encode``: reads images and videos, encodes them and describes the results.

Files are decoded when their turn comes, so that memory holds one item, or one batch with graphs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from encoders.contract import EncoderOutput, VisionInputs
from encoders.inputs import Video, to_rgb
from encoders.paths import PathsEncoder
from encoders.pooling import pool
from encoders.streams import ItemResults
from encoders.vision_encoder import Encoder, VisionEncoder
from weights.load import accelerator

from .features import Item, is_features_file
from .video import read_video, require_av

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
HEADER = ("item", "size", "grid_thw", "tokens", "pooler_output", "ms")
WHOLE = ItemResults()
"""What is made of each item unless vectors are asked for."""


class Media(NamedTuple):
    """One decoded image or one open video."""

    name: str
    video: Video
    """The frames, uint8 [3, H, W] each, and their rate; an image is one frame without a rate."""
    kind: str
    """"image" or "video"."""

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        height, width = self.still.shape[1:]
        return width, height

    @property
    def still(self) -> Tensor:
        """The image, or the middle frame of the clip, for plots; uint8 [3, H, W]."""
        middle: Tensor = self.video.frames[len(self.video.frames) // 2]
        return middle


def image_medium(name: str, image: Any) -> Media:
    """Decode an image, given in any form that ``encoder.encode`` takes."""
    return Media(name, Video(to_rgb(image)[None]), "image")


class Encoded(NamedTuple):
    """The results for one item, on the CPU."""

    item: Item
    output: EncoderOutput
    feature_map: Tensor
    """``last_hidden_state`` laid out in space, [t, h, w, D]."""
    still: Tensor
    """The picture that a plot shows beside the map, uint8 [3, H, W]."""
    milliseconds: float
    """Wall-clock time of preprocessing and encoding."""
    vector: Tensor | None = None
    """The pooled output [D] if there is a pool."""


def check_checkpoint(repo: str) -> None:
    """Raise if the first argument is a file to encode, because the checkpoint was forgotten.

    Raises:
        ValueError: a file that cannot be a checkpoint.
    """
    path = Path(repo)
    if path.is_file() and path.suffix.lower() != ".safetensors":
        raise ValueError(
            f"{repo}: is no checkpoint; the first argument is a repo id or the folder of a "
            "checkpoint, and the images come after it"
        )


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
    from .plots import check_plot

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


def open_media(images: Sequence[Path], videos: Sequence[Path]) -> Iterator[Media]:
    """Open the files one after another, images first, each when it is asked for.

    Raises:
        ValueError: a file that cannot be decoded or is not there.
    """
    for path in images:
        yield image_medium(str(path), path)
    for path in videos:
        yield Media(str(path), read_video(path), "video")


def read_dtype(name: str | None) -> torch.dtype | None:
    """Return the torch dtype of a name, None for None and "auto".

    Raises:
        ValueError: the name is unknown.
    """
    if name is None or name == "auto":
        return None
    if name not in DTYPES:
        raise ValueError(f"--dtype {name}: must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def read_device(name: str | None) -> torch.device:
    """Return the torch device of a name, the CPU for None, the accelerator for "auto".

    Raises:
        ValueError: the name is no device, or this machine does not have the device.
    """
    try:
        device = accelerator() if name == "auto" else torch.device(name or "cpu")
    except RuntimeError:
        raise ValueError(f"--device {name}: must be auto, cpu, cuda, cuda:0, mps, ...") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(
            f"--device {name}: torch {torch.__version__} sees {count} CUDA devices here; "
            + (f"use cuda:0 to cuda:{count - 1}" if count else "use --device cpu")
        )
    if not _can_compute(device):
        raise ValueError(
            f"--device {name}: torch {torch.__version__} cannot compute on it here; "
            "use --device cpu"
        )
    return device


def _can_compute(device: torch.device) -> bool:
    """Return whether tensors can be made on the device; torch's own error would fill a page."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError):
        return False
    return device.type != "meta"


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


def encode_media(
    encoder: Encoder,
    media: Iterable[Media],
    limits: Mapping[str, Any],
    wanted: ItemResults = WHOLE,
) -> Iterator[Encoded]:
    """Encode one item at a time, each when it is asked for.

    Args:
        encoder: the encoder to use.
        media: the items to encode; with :func:`open_media` only one is in memory at a time.
        limits: keywords of ``encoder.preprocess``.
        wanted: whether vectors are made, and the most tokens per call of the encoder.

    Yields:
        The results for each item, in order.

    Raises:
        ValueError: an item that cannot be encoded; the message begins with the item's name.
    """
    return (_encode_one(encoder, medium, limits, wanted) for medium in media)


@torch.inference_mode()
def _encode_one(
    encoder: Encoder, medium: Media, limits: Mapping[str, Any], wanted: ItemResults
) -> Encoded:
    start = time.perf_counter()
    with named(medium):
        inputs = prepare(encoder, medium, limits)
        (output,) = encoder.encoding().run(inputs, whole(wanted))
        output = to_cpu(output)
    milliseconds = (time.perf_counter() - start) * 1000
    return describe(encoder, medium, inputs, output, milliseconds, wanted)


def whole(wanted: ItemResults) -> ItemResults:
    """Return the same calls with whole outputs, of which vectors and maps are made here."""
    return ItemResults(max_tokens_per_call=wanted.max_tokens_per_call)


@contextmanager
def named(*media: Media) -> Iterator[None]:
    """Prefix errors raised in the block with the items' file names.

    Raises:
        ValueError: for a ValueError in the block, and if memory ran out.
    """
    names = ", ".join(medium.name for medium in media)
    fix = (
        "make the item smaller (--max-pixels, --max-tiles, --num-frames), the calls "
        "(--max-tokens-per-call) or the numbers (--dtype bfloat16)"
    )
    with enough_memory(names, fix):
        try:
            yield
        except ValueError as error:
            said = str(error).removeprefix("image 0: ").removeprefix("video 0: ")
            raise ValueError(f"{names}: {said}") from error


@contextmanager
def enough_memory(what: str, fix: str) -> Iterator[None]:
    """Turn running out of memory in the block into an error that names ``what`` and the ``fix``.

    Raises:
        ValueError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            place = "the device"
        elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            place = "this machine"  # torch has no class of its own for the CPU's
        else:
            raise
        raise ValueError(f"{what}: {place} ran out of memory; {fix}") from error


def prepare(encoder: Encoder, medium: Media, limits: Mapping[str, Any]) -> VisionInputs:
    """Preprocess one item; an image is not given the keywords for videos."""
    if medium.kind == "video":
        return encoder.preprocess(videos=[medium.video], **limits)
    still = {name: limits[name] for name in limits if name not in ("fps", "num_frames")}
    return encoder.preprocess(images=[medium.still], **still)


def describe(
    encoder: Encoder,
    medium: Media,
    inputs: VisionInputs,
    output: EncoderOutput,
    milliseconds: float,
    wanted: ItemResults = WHOLE,
) -> Encoded:
    """Return one item's output, which lies on the CPU, with its feature map and its description."""
    feature_map = map_of(encoder, inputs, output)
    t, h, w = inputs.grid_thw[0].tolist()
    tiles = inputs.tiles[0] if inputs.tiles else None
    frames = len(medium.video.frames)
    item = Item(medium.name, medium.kind, medium.size, frames, (t, h, w), tiles)
    vector = None
    if wanted.pool != "none":
        vector = pool(output, wanted.pool, item.grid_thw, wanted.normalize)
    return Encoded(item, output, feature_map, medium.still, milliseconds, vector)


def map_of(encoder: Encoder, inputs: VisionInputs, output: EncoderOutput) -> Tensor:
    """Return ``last_hidden_state`` of one item laid out in space; of several paths, of "image"."""
    hidden = output.last_hidden_state
    assert hidden is not None
    if isinstance(encoder, PathsEncoder):
        return encoder.feature_maps(hidden, inputs)[0]["image"]
    assert isinstance(encoder, VisionEncoder)
    return encoder.feature_maps(hidden, inputs.grid_thw, inputs.tiles)[0]


def to_cpu(output: EncoderOutput) -> EncoderOutput:
    """Return a copy of ``output`` on the CPU; it must have every field."""
    hidden, pooled, deepstack = output
    assert hidden is not None
    assert pooled is not None
    return EncoderOutput(hidden.cpu(), pooled.cpu(), tuple(x.cpu() for x in deepstack or ()))


def row(encoded: Encoded) -> tuple[str, ...]:
    """Return the cells of one item's row in a table with the titles :data:`HEADER`.

    The shape is that of the vector if there is one.
    """
    item, pooled = encoded.item, encoded.output.pooler_output
    assert pooled is not None
    written = pooled if encoded.vector is None else encoded.vector
    size = "x".join(map(str, item.size)) + (f" x {item.frames}" if item.kind == "video" else "")
    grid = " x ".join(map(str, item.grid_thw))
    return (
        item.name,
        size,
        grid,
        str(len(pooled)),
        str(tuple(written.shape)),
        f"{encoded.milliseconds:.0f}",
    )
