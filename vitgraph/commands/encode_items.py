"""Opens the images and videos on a command line, encodes them in a stream, and makes table rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import ExifTags, Image
from torch import Tensor

from encoders import Encoder
from encoders.contract import EncoderOutput, Limits, PartialOutput, VisionInputs
from encoders.inputs import Video, ViewPreprocessor, read_video, to_rgb
from encoders.llama.llama4_pixels import CanvasPreprocessor
from encoders.streams import ItemError, ResultSettings, StreamOptions, pool_items, stream_items
from graphwrap import GraphedEncoder

from ..devices import enough_memory
from ..features import Item
from ..plots import crop_padding

HEADER = ("item", "size", "grid_thw", "tokens", "pooler_output", "ms")
"""The titles of the columns of the table that ``vitgraph encode`` prints."""
NO_LIMITS = Limits()
"""No limits on an image's size besides those of the checkpoint."""
UNPOOLED = ResultSettings()
"""The settings that return the whole output of each image or video instead of one vector."""
ONE_BY_ONE = StreamOptions(batch_tokens=1, progress=False)
"""The stream options that encode each image or video by itself, in a batch of one."""
_SIDEWAYS = (5, 6, 7, 8)
"""The EXIF orientations in which the stored image is rotated by 90 degrees: width and height swap.
"""


class Media(NamedTuple):
    """An image (the path of its file, or its pixels) or an open video."""

    name: str
    item: Path | Tensor | Video
    """The image or video in a form that ``encoder.encode_many`` accepts."""

    @property
    def kind(self) -> Literal["image", "video"]:
        """Whether this is an "image" or a "video"."""
        return "video" if isinstance(self.item, Video) else "image"

    @property
    def frames(self) -> int:
        """The number of frames of the video, 1 for an image."""
        return len(self.item.frames) if isinstance(self.item, Video) else 1

    @property
    def size(self) -> tuple[int, int]:
        """The size in pixels, (width, height); of an image file, only the header is read."""
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
        assert isinstance(middle, Tensor)  # `read_video` makes tensors, as does the demo
        return middle


def _size_of_file(file: Path) -> tuple[int, int]:
    with Image.open(file) as image:
        width, height = image.size
        sideways = image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS
    return (height, width) if sideways else (width, height)


def open_media(images: Sequence[Path], videos: Sequence[Path]) -> Iterator[Media]:
    """Yield a :class:`Media` per image path, then one per video path.

    Images are not opened here; a video is opened just before it is yielded.

    Raises:
        ValueError: a video cannot be opened.
    """
    for path in images:
        yield Media(str(path), path)
    for path in videos:
        yield Media(str(path), read_video(path))


class Encoded(NamedTuple):
    """An encoded image or video: its description, and the encoder's output on the CPU."""

    media: Media
    item: Item
    output: EncoderOutput
    feature_map: Tensor
    """``last_hidden_state`` as [t, h, w, D], without the patches of any padding that preprocessing
    added.
    """
    milliseconds: float
    """The wall-clock milliseconds since the result of the previous image or video."""
    vector: Tensor | None = None
    """The pooled output [D]; None if pooling is "none"."""


def encode_items(
    encoder: Encoder,
    media: Iterable[Media],
    limits: Limits = NO_LIMITS,
    settings: ResultSettings = UNPOOLED,
    options: StreamOptions = ONE_BY_ONE,
    graphed: GraphedEncoder | None = None,
) -> Iterator[Encoded]:
    """Encode images and videos, and yield their results in the same order.

    Args:
        encoder: the encoder.
        media: the images and videos; while one is encoded, the next ones are decoded in threads.
        limits: keywords of ``encoder.preprocess``, such as the largest area of an image.
        settings: pooling of the output, and the most tokens per call of the encoder.
        options: number of tokens per batch, and whether progress is shown.
        graphed: CUDA graphs of ``encoder``; None runs the encoder eagerly.

    Yields:
        The result of each image or video.

    Raises:
        ValueError: an image or video cannot be encoded; the message begins with its name.
    """
    unpooled = ResultSettings(max_tokens_per_call=settings.max_tokens_per_call)
    item_encoder = (encoder if graphed is None else graphed).item_encoder()
    pairs = ((medium, medium.item) for medium in media)
    # With "keep" the stream yields an error as the result of its item, so its name is known here.
    keep_errors = options._replace(on_error="keep")
    start_time = time.perf_counter()
    for result in stream_items(item_encoder, pairs, limits, unpooled, keep_errors):
        medium = result.key
        assert isinstance(medium, Media)  # the keys of `pairs` are media
        if isinstance(result.value, ItemError):
            _raise_for(medium.name, result.value.error)
        milliseconds = (time.perf_counter() - start_time) * 1e3
        assert result.layout is not None
        # With the settings `unpooled` the result is a whole output, never a pooled vector.
        assert isinstance(result.value, EncoderOutput | PartialOutput)
        described = _describe(encoder, medium, result.layout, _to_cpu(result.value), milliseconds)
        if settings.pool == "none":
            yield described
        else:
            how = settings.pool, settings.normalize, encoder.pooling_head
            yield described._replace(vector=pool_items([result.value], *how)[0].cpu())
        start_time = time.perf_counter()


def _raise_for(name: str, error: Exception) -> None:
    """Raise the error of an image or video again as a ValueError whose message begins with a
    name.
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
) -> Encoded:
    """Make the feature map and the description of an encoded image or video."""
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
    return Encoded(media, item, output, feature_map, milliseconds)


def _to_cpu(output: EncoderOutput | PartialOutput) -> EncoderOutput:
    """Copy an output, which must have ``last_hidden_state`` and ``pooler_output``, to the CPU."""
    hidden, pooled, deepstack, _ = output
    assert hidden is not None
    assert pooled is not None
    return EncoderOutput(hidden.cpu(), pooled.cpu(), tuple(x.cpu() for x in deepstack or ()))


def row(encoded: Encoded) -> tuple[str, ...]:
    """Return the table row of an encoded image or video, with a cell per title in :data:`HEADER`.

    The column "pooler_output" holds a shape: of the vector if pooling is on, else of the tokens.
    """
    item, pooled = encoded.item, encoded.output.pooler_output
    assert pooled is not None
    tokens_or_vector = pooled if encoded.vector is None else encoded.vector
    size = "x".join(map(str, item.size)) + (f" x {item.frames}" if item.kind == "video" else "")
    grid = " x ".join(map(str, item.grid_thw))
    shape, milliseconds = str(tuple(tokens_or_vector.shape)), f"{encoded.milliseconds:.0f}"
    return item.name, size, grid, str(len(pooled)), shape, milliseconds
