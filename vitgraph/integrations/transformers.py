"""Encoders inside the vision-language models of transformers.

There are two ways. :func:`as_vision_tower` replaces the tower of a model, and everything else of
the model works as before. :func:`mm_encoder_outputs` encodes first, perhaps in another process,
and its result goes to ``generate``.

Source: ``generation/utils.py`` and the Qwen, GLM and InternVL models of transformers 5.23.0.

Shapes: P patches, N output tokens, D tower width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from encoders import (
    EncoderOutput,
    Glm4VEncoder,
    GlmOCREncoder,
    InternViT,
    Qwen2_5VLEncoder,
    Qwen2VLEncoder,
    Qwen3VLEncoder,
    VisionEncoder,
)
from graphwrap import GraphedEncoder

try:
    from transformers.modeling_outputs import BaseModelOutputWithPooling
except ImportError as error:
    raise ImportError(
        "vitgraph.integrations.transformers needs transformers: pip install 'transformers>=5.18'"
    ) from error

__all__ = ["VisionTower", "as_vision_tower", "mm_encoder_outputs"]


TOWERS = (Qwen2VLEncoder, Qwen2_5VLEncoder, Qwen3VLEncoder, Glm4VEncoder, GlmOCREncoder)
"""The encoders of packed patches whose tower in transformers is called with ``grid_thw``."""


class VisionTower(nn.Module):
    """An encoder with the call, outputs and ``state_dict`` of a Qwen or GLM tower of transformers.

    It shares all layers with the encoder: training, moving or changing one changes both.

    Args:
        encoder: an encoder of a Qwen or GLM family, or a :class:`GraphedEncoder` around one.

    Attributes:
        encoder: the encoder that was given.
        config: the encoder's own config.
        spatial_merge_size: patches per side of one output token.

    Raises:
        ValueError: the encoder is of neither family, or a :class:`GraphedEncoder` whose
            ``outputs`` lack ``pooler_output`` or ``deepstack_features``.
    """

    encoder: VisionEncoder | GraphedEncoder

    def __init__(self, encoder: VisionEncoder | GraphedEncoder) -> None:
        super().__init__()
        inner = _unwrap(encoder)
        if not isinstance(inner, TOWERS):
            other = "call encoder.encode(images) for the features of each image"
            if isinstance(inner, InternViT):
                other = (
                    "its tower and projector lie apart in transformers; pass mm_encoder_outputs to "
                    "generate"
                )
            raise ValueError(
                "as_vision_tower takes encoders of the Qwen and GLM families, not "
                f"{type(inner).__name__}: {other}"
            )
        # The dictionaries themselves are shared: a layer that peft replaces is replaced in both,
        # and the keys are those of the encoder, which are the published ones. The encoder is not
        # registered, so that no layer is found twice.
        self._modules, self._parameters = inner._modules, inner._parameters
        self._buffers = inner._buffers
        self.__dict__["encoder"] = encoder
        self.config = inner.config
        self.spatial_merge_size: int = inner.config.spatial_merge_size
        self.training = inner.training

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the encoder computes its blocks again in the backward pass."""
        return _unwrap(self.encoder).gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        _unwrap(self.encoder).gradient_checkpointing = enabled

    def forward(
        self,
        hidden_states: Tensor,
        grid_thw: Tensor,
        return_dict: bool = True,
        **unused: object,
    ) -> BaseModelOutputWithPooling | tuple[Tensor, ...]:
        """Encode packed patches, as the tower that this one replaces does.

        Args:
            hidden_states: [P, patch_dim], the ``pixel_values`` of the processor.
            grid_thw: [items, 3].
            return_dict: False returns the fields that are not None as a tuple.
            unused: keywords that models pass on to all of their parts. Metadata made beforehand is
                made anew, and ``output_hidden_states`` and ``output_attentions`` add nothing.

        Returns:
            ``last_hidden_state`` [P, D], ``pooler_output`` [N, out] and, for Qwen3-VL,
            ``deepstack_features``, a list of [N, out]. ``last_hidden_state`` is the output of the
            last block in the order of the patches, while transformers keeps the order of windows
            (Qwen2.5-VL) or downsamples (GLM); it is None from a :class:`GraphedEncoder` without it.
        """
        output = self.encoder(hidden_states, grid_thw)
        deepstack = list(output.deepstack_features or ())
        given = _model_output(output.last_hidden_state, output.pooler_output, deepstack)
        return given if return_dict else given.to_tuple()


def as_vision_tower(encoder: VisionEncoder | GraphedEncoder) -> VisionTower:
    """Return a module for ``model.model.visual`` of Qwen2-VL to Qwen3.5 and of the GLM families.

    Logits and generated tokens stay what they are, and so do the keys of ``state_dict``:
    ``model.save_pretrained`` writes a checkpoint that transformers loads with its own tower.

    Args:
        encoder: an encoder of the model's own checkpoint, or a :class:`GraphedEncoder` around one.
            ``load_encoder`` turns gradients off; turn them on to train the tower.

    Returns:
        The module. It shares all layers with the encoder.

    Raises:
        ValueError: what :class:`VisionTower` raises.
    """
    return VisionTower(encoder)


def mm_encoder_outputs(
    encoder: VisionEncoder | GraphedEncoder,
    images: Sequence[object] = (),
    videos: Sequence[object] = (),
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_tiles: int | None = None,
    max_soft_tokens: int | None = None,
    fps: float | None = None,
    num_frames: int | None = None,
) -> dict[str, BaseModelOutputWithPooling]:
    """Encode images and videos for ``model.generate(mm_encoder_outputs=...)`` (transformers 5.18).

    The prompt needs one placeholder token per feature: make it with the model's processor from
    the same images and limits, and drop the pixels that the processor returns. ``generate`` changes
    the outputs when it returns several sequences, so each call needs outputs of its own.

    Args:
        encoder: an encoder of the model's own checkpoint, or a :class:`GraphedEncoder` around one.
        images: images in the order of their placeholders in the prompts.
        videos: videos in the order of their placeholders. InternVL has one kind of placeholder, so
            the images have to come first.
        min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames: as
            for ``encoder.preprocess``.

    Returns:
        ``"image"`` and ``"video"``, as far as there are any. Qwen families: ``pooler_output`` is a
        tuple of [tokens, out], one per item, and Qwen3-VL's ``deepstack_features`` a list of such
        tuples, one per layer. InternVL: everything under ``"image"``, ``pooler_output`` [tiles,
        tokens per tile, out].

    Raises:
        ValueError: what ``encode`` raises, or a :class:`GraphedEncoder` whose ``outputs`` lack
            ``pooler_output`` or ``deepstack_features``.
    """
    inner = _unwrap(encoder)
    outputs: dict[str, list[Any]] = {
        kind: encoder.encode(
            images=items if kind == "image" else (),
            videos=items if kind == "video" else (),
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            max_tiles=max_tiles,
            max_soft_tokens=max_soft_tokens,
            fps=fps,
            num_frames=num_frames,
        )
        for kind, items in (("image", images), ("video", videos))
        if not (isinstance(items, Sequence) and len(items) == 0)
    }
    if outputs and isinstance(inner, InternViT):
        tokens = torch.cat([item.pooler_output for items in outputs.values() for item in items])
        # The smallest budget is the number of tokens of one tile.
        tiles = tokens.unflatten(0, (-1, inner.budget_range[0]))
        return {"image": _model_output(None, tiles, [])}
    return {kind: _listed(items) for kind, items in outputs.items()}


def _listed(items: Sequence[EncoderOutput]) -> BaseModelOutputWithPooling:
    """Return the outputs of Qwen items as lists, with one tensor per item and layer."""
    pooled = tuple(item.pooler_output for item in items)
    layers = zip(*(item.deepstack_features or () for item in items), strict=True)
    return _model_output(None, pooled, list(layers))


def _model_output(
    hidden: Tensor | None, pooled: object, deepstack: list[Any]
) -> BaseModelOutputWithPooling:
    """The output class of the models of transformers, which depends on whether they have DeepStack.

    ``deepstack`` has one entry per layer.
    """
    if not deepstack:
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)
    # Imported here, because it takes seconds.
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    return modeling_qwen3_vl.BaseModelOutputWithDeepstackFeatures(
        last_hidden_state=hidden, pooler_output=pooled, deepstack_features=deepstack
    )


def _unwrap(encoder: VisionEncoder | GraphedEncoder) -> VisionEncoder:
    """Return the encoder itself.

    Raises:
        ValueError: a :class:`GraphedEncoder` that leaves out what language models read.
    """
    if not isinstance(encoder, GraphedEncoder):
        return encoder
    for field in ("pooler_output", "deepstack_features"):
        if field not in encoder.outputs:
            raise ValueError(
                f"the GraphedEncoder returns no {field}, which language models read: leave its "
                "outputs at ('pooler_output', 'deepstack_features')"
            )
    return cast(VisionEncoder, encoder.encoder)
