"""``vitgraph encode``: files in, features out, and a table of what happened."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from encoders.contract import EncoderOutput, VisionInputs
from encoders.vision_encoder import VisionEncoder
from encoders.inputs import Video, to_rgb

from .features import Item, is_features_file
from .tables import format_table
from .video import read_video

if TYPE_CHECKING:
    from collections.abc import Iterable

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
HEADER = ("item", "size", "grid_thw", "tokens", "pooler_output", "ms")


class Media(NamedTuple):
    """One image, decoded, or one video, open."""

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
        """What a plot shows, uint8 [3, H, W]: the image, or the middle frame of the clip."""
        middle: Tensor = self.video.frames[len(self.video.frames) // 2]
        return middle


def image_medium(name: str, image: Any) -> Media:
    """An image, in any form that ``encoder.encode`` takes."""
    return Media(name, Video(to_rgb(image)[None]), "image")


class Encoded(NamedTuple):
    """What came out for one item, on the CPU."""

    item: Item
    output: EncoderOutput
    feature_map: Tensor
    """[t, h, w, D] of ``last_hidden_state``."""
    milliseconds: float
    """Preprocessing and encoding, wall clock."""


def check_checkpoint(repo: str) -> None:
    """Raise if the first argument is a file to encode, the checkpoint having been forgotten.

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
    """Before anything is fetched: what is asked for can be written, and costs nobody a file.

    Args:
        out: the features file.
        plot: the picture, if one is wanted.
        inputs: files that are read.

    Raises:
        ValueError: a target that cannot be written, or that is not to be written over.
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


def open_media(images: Sequence[Path], videos: Sequence[Path]) -> list[Media]:
    """Open all files, images first.

    Raises:
        ValueError: a file that cannot be decoded or is not there, or no file at all.
    """
    if not images and not videos:
        raise ValueError("nothing to encode: name at least one image, or a --video")
    return [
        *(image_medium(str(path), path) for path in images),
        *(Media(str(path), read_video(path), "video") for path in videos),
    ]


def read_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype of that name.

    Raises:
        ValueError: an unknown name.
    """
    if name is not None and name not in DTYPES:
        raise ValueError(f"--dtype {name}: must be one of {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]


def read_device(name: str | None) -> torch.device:
    """The torch device of that name, if this machine has it.

    Raises:
        ValueError: not a device, or one that is not here.
    """
    try:
        device = torch.device(name or "cpu")
    except RuntimeError:
        raise ValueError(f"--device {name}: must be cpu, cuda, cuda:0, mps, ...") from None
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
    """Whether tensors can be made there; what torch says otherwise runs to a page."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError):
        return False
    return device.type != "meta"


@torch.inference_mode()
def encode_media(
    encoder: VisionEncoder, media: Iterable[Media], limits: Mapping[str, Any]
) -> list[Encoded]:
    """Encode one item at a time, so that memory is bounded by the largest.

    Args:
        encoder: any.
        media: what to encode.
        limits: keywords of ``encoder.preprocess``.

    Raises:
        ValueError: an item that cannot be encoded, by its name.
    """
    return [_encode_one(encoder, medium, limits) for medium in media]


def _encode_one(encoder: VisionEncoder, medium: Media, limits: Mapping[str, Any]) -> Encoded:
    start = time.perf_counter()
    with named(medium):
        inputs = prepare(encoder, medium, limits)
        output = to_cpu(encoder(inputs.pixel_values, inputs.grid_thw))
    return describe(encoder, medium, inputs, output, (time.perf_counter() - start) * 1000)


@contextmanager
def named(*media: Media) -> Iterator[None]:
    """What goes wrong inside is told under the items' own names.

    Raises:
        ValueError: what went wrong, running out of memory too.
    """
    names = ", ".join(medium.name for medium in media)
    fix = (
        "make the item smaller (--max-pixels, --max-tiles, --num-frames) or the numbers "
        "(--dtype bfloat16)"
    )
    with enough_memory(names, fix):
        try:
            yield
        except ValueError as error:
            said = str(error).removeprefix("image 0: ").removeprefix("video 0: ")
            raise ValueError(f"{names}: {said}") from error


@contextmanager
def enough_memory(what: str, fix: str) -> Iterator[None]:
    """Running out of memory inside is told of ``what``, with the ``fix``.

    Raises:
        ValueError: it ran out.
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


def prepare(encoder: VisionEncoder, medium: Media, limits: Mapping[str, Any]) -> VisionInputs:
    """Preprocess one item; keywords that are for videos are kept from images."""
    if medium.kind == "video":
        return encoder.preprocess(videos=[medium.video], **limits)
    still = {name: limits[name] for name in limits if name not in ("fps", "num_frames")}
    return encoder.preprocess(images=[medium.still], **still)


def describe(
    encoder: VisionEncoder,
    medium: Media,
    inputs: VisionInputs,
    output: EncoderOutput,
    milliseconds: float,
) -> Encoded:
    """One item's output, which lies on the CPU, with its map and where it comes from."""
    assert output.last_hidden_state is not None
    (feature_map,) = encoder.feature_maps(output.last_hidden_state, inputs.grid_thw, inputs.tiles)
    t, h, w = inputs.grid_thw[0].tolist()
    tiles = inputs.tiles[0] if inputs.tiles else None
    frames = len(medium.video.frames)
    item = Item(medium.name, medium.kind, medium.size, frames, (t, h, w), tiles)
    return Encoded(item, output, feature_map, milliseconds)


def to_cpu(output: EncoderOutput) -> EncoderOutput:
    """The same output on the CPU; every field is there."""
    hidden, pooled, deepstack = output
    assert hidden is not None
    assert pooled is not None
    return EncoderOutput(hidden.cpu(), pooled.cpu(), tuple(x.cpu() for x in deepstack or ()))


def table(encoded: Sequence[Encoded]) -> str:
    """One line an item: name, size, ``grid_thw``, tokens, output shape, milliseconds."""
    return format_table(HEADER, [row(one) for one in encoded])


def row(encoded: Encoded) -> tuple[str, ...]:
    """The cells of one item under :data:`HEADER`."""
    item, pooled = encoded.item, encoded.output.pooler_output
    assert pooled is not None
    size = "x".join(map(str, item.size)) + (f" x {item.frames}" if item.kind == "video" else "")
    grid = " x ".join(map(str, item.grid_thw))
    return (
        item.name,
        size,
        grid,
        str(len(pooled)),
        str(tuple(pooled.shape)),
        f"{encoded.milliseconds:.0f}",
    )
