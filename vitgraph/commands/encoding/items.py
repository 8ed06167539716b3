"""The images and videos that a command names, encoded as a stream, and the table of results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import ExifTags, Image
from torch import Tensor

from encoders import Encoder
from encoders.contract import EncoderOutput, Limits, PartialOutput, VisionInputs
from encoders.inputs import CanvasPreprocessor, Video, ViewPreprocessor, read_video, to_rgb
from encoders.streams import ItemError, ResultSettings, StreamOptions, pool, stream_items
from graphwrap import GraphedEncoder

from ...devices import enough_memory
from ...features import Item
from ...plots import crop_padding

HEADER = ("item", "size", "grid_thw", "tokens", "pooler_output", "ms")
"""The titles of the columns of the table that ``vitgraph encode`` prints."""
NO_LIMITS = Limits()
"""The limits that bound nothing, so that ``preprocess`` takes those of the checkpoint."""
UNPOOLED = ResultSettings()
"""The settings that return the whole output of each item instead of one vector."""
ONE_BY_ONE = StreamOptions(batch_tokens=1, progress=False)
"""The stream options with which each item is a call of its own."""
_SIDEWAYS = (5, 6, 7, 8)
"""The values of the EXIF orientation at which width and height of the stored image are exchanged.
"""


class Media(NamedTuple):
    """An image file that is not decoded yet, or an open video."""

    name: str
    item: Path | Tensor | Video
    """The image or video in a form that ``encoder.encode_many`` takes."""

    @property
    def kind(self) -> Literal["image", "video"]:
        """The kind of the medium: "image" or "video"."""
        return "video" if isinstance(self.item, Video) else "image"

    @property
    def frames(self) -> int:
        """The number of frames of the video, 1 for an image."""
        return len(self.item.frames) if isinstance(self.item, Video) else 1

    @property
    def size(self) -> tuple[int, int]:
        """The size in pixels, (width, height); of an image file only the header is read."""
        if isinstance(self.item, Path):
            return _size_of_file(self.item)
        height, width = self.still.shape[1:]
        return width, height

    @property
    def still(self) -> Tensor:
        """The image, or the middle frame of the video, as uint8 [3, H, W] for plots."""
        if not isinstance(self.item, Video):
            return to_rgb(self.item)
        middle = self.item.frames[len(self.item.frames) // 2]
        assert isinstance(middle, Tensor)  # a frame of a file, or what `to_rgb` made of an image
        return middle


def _size_of_file(file: Path) -> tuple[int, int]:
    with Image.open(file) as image:
        width, height = image.size
        sideways = image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS
    return (height, width) if sideways else (width, height)


def open_media(images: Sequence[Path], videos: Sequence[Path]) -> Iterator[Media]:
    """Yield a :class:`Media` per image path, then one per video path.

    Images are not opened here; a video is opened when it is its turn.

    Raises:
        ValueError: a video that cannot be opened.
    """
    for path in images:
        yield Media(str(path), path)
    for path in videos:
        yield Media(str(path), read_video(path))


class Encoded(NamedTuple):
    """An encoded image or video with its output on the CPU, and what the table prints of it."""

    media: Media
    item: Item
    output: EncoderOutput
    feature_map: Tensor
    """``last_hidden_state`` as [t, h, w, D], without the patches of padding that a preprocessor
    added.
    """
    milliseconds: float
    """The wall-clock milliseconds since the result of the item before."""
    vector: Tensor | None = None
    """The pooled output [D]; None if no pooling was asked for."""


def encode_items(
    encoder: Encoder,
    media: Iterable[Media],
    limits: Limits = NO_LIMITS,
    settings: ResultSettings = UNPOOLED,
    options: StreamOptions = ONE_BY_ONE,
    graphed: GraphedEncoder | None = None,
) -> Iterator[Encoded]:
    """Encode items in order, as ``encode_many`` does.

    Args:
        encoder: the encoder.
        media: the items; while one is encoded, the next ones are decoded.
        limits: keywords of ``encoder.preprocess``.
        settings: pooling of the output, and the most tokens per call of the encoder.
        options: number of tokens that run together, and whether progress is shown.
        graphed: CUDA graphs of ``encoder``; None runs the encoder eagerly.

    Yields:
        The result of each item.

    Raises:
        ValueError: an item that cannot be encoded; the message begins with the item's name.
    """
    unpooled = ResultSettings(max_tokens_per_call=settings.max_tokens_per_call)
    item_encoder = (encoder if graphed is None else graphed).item_encoder()
    pairs = ((medium, medium.item) for medium in media)
    # An error that is yielded names its item of the batch.
    keep_errors = options._replace(on_error="keep")
    start_time = time.perf_counter()
    for result in stream_items(item_encoder, pairs, limits, unpooled, keep_errors):
        medium = result.key
        assert isinstance(medium, Media)  # of the pairs above
        if isinstance(result.value, ItemError):
            _raise_for(medium.name, result.value.error)
        milliseconds = (time.perf_counter() - start_time) * 1e3
        assert result.layout is not None
        # `unpooled` asks for no vector.
        assert isinstance(result.value, EncoderOutput | PartialOutput)
        output = _to_cpu(result.value)
        yield _describe(encoder, medium, result.layout, output, milliseconds, settings)
        start_time = time.perf_counter()


def _raise_for(name: str, error: Exception) -> None:
    """Raise the error of an item again as a ValueError whose message begins with the item's name.

    Args:
        name: name of the item.
        error: the error; one that is neither a ValueError nor a lack of memory is raised as it is.
    """
    fix = (
        "make the item smaller (--max-pixels, --max-tiles, --num-frames), the calls "
        "(--max-tokens-per-call) or the numbers (--dtype bfloat16)"
    )
    with enough_memory(name, fix):
        if not isinstance(error, ValueError):
            raise error
        message = str(error).removeprefix(f"{name}: ")
        raise ValueError(f"{name}: {message}") from error


def _describe(
    encoder: Encoder,
    media: Media,
    layout: VisionInputs,
    output: EncoderOutput,
    milliseconds: float,
    settings: ResultSettings,
) -> Encoded:
    """Join an item's output with its feature map, its vector and its description.

    Args:
        encoder: the encoder that made the output.
        media: the image or video.
        layout: the preprocessed item without pixels: its grid and its tiles.
        output: the output of the item, on the CPU.
        milliseconds: wall-clock milliseconds that the item took.
        settings: kind of vector to pool; "none" leaves ``vector`` at None.
    """
    hidden = output.last_hidden_state
    assert hidden is not None
    feature_map = encoder.feature_maps([hidden], layout)[0]["image"]
    t, h, w = layout.grid_thw[0].tolist()
    tiles = layout.tiles[0] if layout.tiles else None
    item = Item(media.name, media.kind, media.size, media.frames, (t, h, w), tiles)
    preprocessor = encoder.preprocessor
    if isinstance(preprocessor, ViewPreprocessor) and preprocessor.pads:
        feature_map = crop_padding(feature_map, item.size)
    if isinstance(preprocessor, CanvasPreprocessor) and tiles is not None:
        sides = preprocessor.covered_size(*item.size[::-1], tiles[1], tiles[0])
        rows, columns = (-(-side // preprocessor.patch_size) for side in sides)
        feature_map = feature_map[:, :rows, :columns]
    vector = None
    if settings.pool != "none":
        vector = pool(output, settings.pool, item.grid_thw, settings.normalize)
    return Encoded(media, item, output, feature_map, milliseconds, vector)


def _to_cpu(output: EncoderOutput | PartialOutput) -> EncoderOutput:
    """Return a copy of an output on the CPU, which must have ``last_hidden_state`` and
    ``pooler_output``."""
    hidden, pooled, deepstack = output
    assert hidden is not None
    assert pooled is not None
    return EncoderOutput(hidden.cpu(), pooled.cpu(), tuple(x.cpu() for x in deepstack or ()))


def row(encoded: Encoded) -> tuple[str, ...]:
    """Return the cells of one item's row in a table with the titles :data:`HEADER`.

    The column "pooler_output" holds a shape: that of the vector if one was pooled.
    """
    item, pooled = encoded.item, encoded.output.pooler_output
    assert pooled is not None
    tokens_or_vector = pooled if encoded.vector is None else encoded.vector
    size = "x".join(map(str, item.size)) + (f" x {item.frames}" if item.kind == "video" else "")
    grid = " x ".join(map(str, item.grid_thw))
    shape, milliseconds = str(tuple(tokens_or_vector.shape)), f"{encoded.milliseconds:.0f}"
    return item.name, size, grid, str(len(pooled)), shape, milliseconds
