"""Image features in the form that vLLM takes instead of images (``enable_mm_embeds=True``).

vLLM is not imported: the result is plain tensors, which may be made in another process or on
another machine. :class:`FeatureStore` keeps features in a folder that vLLM reads
(``docs/engines.md``).

Source: vLLM 0.33.0, ``model_executor/models``: ``Qwen2VLMultiModalDataParser`` of ``qwen2_vl.py``,
``Qwen3VLMultiModalDataParser`` and ``Qwen3_VisionTransformer.forward`` of ``qwen3_vl.py``,
``InternVLImageEmbeddingInputs`` of ``internvl.py``; ``multimodal/parse.py``.

Shapes, for n items of N tokens together, L DeepStack layers, and the width D of the language model:

====================  ============================================  ===============================
family                ``"image"``                                   ``"video"``
====================  ============================================  ===============================
Qwen2-VL, Qwen2.5-VL  ``image_embeds`` [N, D],                      ``video_embeds`` [N, D],
                      ``image_grid_thw`` [n, 3]                     ``video_grid_thw`` [n, 3]
Qwen3-VL              ``image_embeds`` [N, (1 + L) * D],            ``video_embeds``
                      ``image_grid_thw`` [n, 3]                     [N, (1 + L) * D],
                                                                    ``video_grid_thw`` [n, 3],
                                                                    ``timestamps``, n lists
Qwen3.5               as Qwen3-VL with L = 0                        as Qwen3-VL with L = 0
InternVL              n tensors [tokens of the image, D]            not taken
====================  ============================================  ===============================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from encoders import (
    EncoderOutput,
    InternViT,
    PartialOutput,
    Qwen2_5VLEncoder,
    Qwen2VLEncoder,
    Qwen3VLEncoder,
    VisionEncoder,
)
from encoders.contract import Limits
from encoders.streams import ImagesLike, VideosLike
from graphwrap import GraphedEncoder

from ..embedding.feature_store import FeatureStore, language_rows
from ..embedding.sources.reading import content_key

__all__ = ["FeatureStore", "content_key", "multi_modal_data"]

ItemFeatures: TypeAlias = "list[Tensor] | dict[str, Tensor | list[list[float]]]"
"""The features of all images or of all videos of a prompt: for InternVL a tensor per image, else a
dict with tensors of all items together, and timestamps, under vLLM's names."""
TOWERS = (Qwen2VLEncoder, Qwen2_5VLEncoder, Qwen3VLEncoder, InternViT)
"""The encoders whose features :func:`multi_modal_data` returns in the form that vLLM takes."""


def multi_modal_data(
    encoder: VisionEncoder | GraphedEncoder,
    images: ImagesLike = (),
    videos: VideosLike = (),
    *,
    timestamps: Sequence[Sequence[float]] | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_tiles: int | None = None,
    max_soft_tokens: int | None = None,
    fps: float | None = None,
    num_frames: int | None = None,
) -> dict[str, ItemFeatures]:
    """Encode the images and videos of one prompt for vLLM's ``multi_modal_data``.

    Args:
        encoder: an encoder of the model that vLLM serves, or a :class:`GraphedEncoder` around one.
        images: images in the order of their placeholders in the prompt.
        videos: videos in the order of their placeholders; for InternVL there must be none, because
            vLLM cannot tell from features how many frames a video has.
        timestamps: for each video the time in seconds of each pair of frames, which Qwen3-VL and
            Qwen3.5 write into the prompt; None for other families.
        min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames: as
            for ``encoder.preprocess``.

    Returns:
        A dict with the keys ``"image"`` and ``"video"``, if there are such items; the tensors are
        on the CPU, in the shapes that the docstring of this module lists.

    Raises:
        ValueError: an encoder that is not in ``TOWERS``, items that ``preprocess`` rejects, videos
            for InternVL, timestamps that are missing or too many, or a :class:`GraphedEncoder`
            without ``pooler_output`` or ``deepstack_features`` among its outputs.
    """
    inner = encoder.encoder if isinstance(encoder, GraphedEncoder) else encoder
    if not isinstance(inner, TOWERS):
        raise ValueError(
            "multi_modal_data makes what vLLM takes for the Qwen families and InternVL, not for "
            f"{type(inner).__name__}: pass the images themselves to vLLM, or call "
            "encoder.encode(images) for the features of each"
        )
    limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
    data: dict[str, ItemFeatures] = {}
    for kind, items in (("image", images), ("video", videos)):
        if isinstance(items, Sequence) and len(items) == 0:
            continue
        if kind == "video" and isinstance(inner, InternViT):
            raise ValueError(
                "vLLM takes no features of videos for InternVL: pass the frames as images"
            )
        inputs = inner.preprocess(
            images=images if kind == "image" else (),
            videos=videos if kind == "video" else (),
            **limits._asdict(),
        )
        if isinstance(inner, InternViT):
            data[kind] = [_on_cpu(output) for output in encoder(inputs)]
            continue
        output = encoder(inputs.pixel_values, inputs.grid_thw)
        features: dict[str, Tensor | list[list[float]]] = {
            f"{kind}_embeds": _on_cpu(output),
            f"{kind}_grid_thw": inputs.grid_thw,
        }
        if kind == "video" and isinstance(inner, Qwen3VLEncoder):
            frames = inputs.grid_thw[:, 0].tolist()
            features["timestamps"] = _read_timestamps(timestamps, frames)
        data[kind] = features
    return data


def _on_cpu(output: EncoderOutput | PartialOutput) -> Tensor:
    return language_rows(output).detach().cpu()


def _read_timestamps(
    timestamps: Sequence[Sequence[float]] | None, frames: list[int]
) -> list[list[float]]:
    seconds = [list(map(float, times)) for times in timestamps or ()]
    if [len(times) for times in seconds] != frames:
        raise ValueError(
            f"timestamps are for {[len(times) for times in seconds]} frame pairs per video, these "
            f"videos have {frames}: pass one list per video with the seconds of each frame pair"
        )
    return seconds
