"""Items encoded one after another, and the description of each result."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from encoders.base.encoder import Encoder
from encoders.contract import EncoderOutput, VisionInputs
from encoders.inputs.views import ViewPreprocessor
from encoders.streams.calls import ItemResults
from encoders.streams.pooling import pool

from ..features import Item
from ..plots import crop_padding
from .encode_media import Media, named

HEADER = ("item", "size", "grid_thw", "tokens", "pooler_output", "ms")
WHOLE = ItemResults()
"""What is made of each item unless vectors are asked for."""


class Encoded(NamedTuple):
    """The results for one item, on the CPU."""

    item: Item
    output: EncoderOutput
    feature_map: Tensor
    """``last_hidden_state`` laid out in space, [t, h, w, D], without the border of padded views."""
    still: Tensor
    """The picture that a plot shows beside the map, uint8 [3, H, W]."""
    milliseconds: float
    """Wall-clock time of preprocessing and encoding."""
    vector: Tensor | None = None
    """The pooled output [D] if there is a pool."""


def encode_media(
    encoder: Encoder,
    media: Iterable[Media],
    limits: Mapping[str, object],
    wanted: ItemResults = WHOLE,
) -> Iterator[Encoded]:
    """Encode one item at a time, each when it is asked for.

    Args:
        encoder: the encoder to use.
        media: the items to encode; with ``open_media`` only one is in memory at a time.
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
    encoder: Encoder, medium: Media, limits: Mapping[str, object], wanted: ItemResults
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
    feature_map = _map_of(encoder, medium, inputs, output)
    t, h, w = inputs.grid_thw[0].tolist()
    tiles = inputs.tiles[0] if inputs.tiles else None
    frames = len(medium.video.frames)
    item = Item(medium.name, medium.kind, medium.size, frames, (t, h, w), tiles)
    vector = None
    if wanted.pool != "none":
        vector = pool(output, wanted.pool, item.grid_thw, wanted.normalize)
    return Encoded(item, output, feature_map, medium.still, milliseconds, vector)


def _map_of(encoder: Encoder, medium: Media, inputs: VisionInputs, output: EncoderOutput) -> Tensor:
    """Lay ``last_hidden_state`` of one item out in space; of several paths, that of "image"."""
    hidden = output.last_hidden_state
    assert hidden is not None
    whole = encoder.feature_maps(hidden, inputs)[0]["image"]
    preprocessor = encoder.preprocessor
    if isinstance(preprocessor, ViewPreprocessor) and preprocessor.pads:
        return crop_padding(whole, medium.size)
    return whole


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
