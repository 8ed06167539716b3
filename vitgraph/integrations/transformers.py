"""Encoders inside the vision-language models of transformers.

There are two ways. :func:`as_vision_tower` replaces the vision tower of a model, and everything
else of the model works as before; ``model_towers`` lists the models. :func:`mm_encoder_outputs`
encodes images beforehand, perhaps in another process, and its result is passed to ``generate``.

Source: ``generation/utils.py`` and the models of transformers 5.23.0.

Shapes: P patches, N output tokens, D tower width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from encoders import (
    Encoder,
    EncoderOutput,
    InternViT,
    PartialOutput,
    PatchEncoder,
    PathsEncoder,
    VisionEncoder,
)
from encoders.contract import Grid, Limits, PathInputs, VisionInputs
from encoders.layers.torch_internals import share_modules
from encoders.streams import ImagesLike, VideosLike
from graphwrap import GraphedEncoder
from weights import FAMILIES

from .model_towers.calls import Passing
from .model_towers.records import CALLS, NO_MODEL, REFUSED, Call

if TYPE_CHECKING:
    from transformers import PreTrainedModel

try:
    from transformers.modeling_outputs import BaseModelOutputWithPooling
except ImportError as error:
    raise ImportError(
        "vitgraph.integrations.transformers needs transformers: pip install 'transformers>=5.18'"
    ) from error

__all__ = ["VisionTower", "as_vision_tower", "mm_encoder_outputs"]


class VisionTower(nn.Module):
    """An encoder as a module that replaces the vision tower of a model of transformers.

    The module shares all layers with the encoder: training, moving or changing one changes both.

    Args:
        encoder: an encoder of a family that ``model_towers.records`` lists, or a
            :class:`GraphedEncoder` around one.

    Attributes:
        encoder: the argument ``encoder``.
        config: the encoder's own config.
        projector: a module that replaces the model's projector, if that lies outside the tower, and
            returns its input.

    Raises:
        ValueError: an encoder of an unlisted family, or a :class:`GraphedEncoder` whose ``outputs``
            lack ``pooler_output`` or ``deepstack_features``.
    """

    encoder: Encoder | GraphedEncoder
    projector: Passing

    def __init__(self, encoder: Encoder | GraphedEncoder) -> None:
        super().__init__()
        inner = _unwrap(encoder)
        self._call = _call_of(inner)
        share_modules(self, inner, tensors=True)
        # nn.Module must not register encoder and projector as children of this module, because
        # share_modules registers the encoder's layers, and the projector becomes a model's child.
        self.__dict__["encoder"] = encoder
        path = self._path()
        self.config = path.config
        merge = path.config.spatial_merge_size if isinstance(path, PatchEncoder) else 1
        self.spatial_merge_size: int = merge
        self.__dict__["projector"] = Passing(merge)
        self.training = inner.training
        if self._call.run is not None:  # transformers could not load tensors with these names
            before_saving = self.register_state_dict_pre_hook
            before_saving(_refuse_saving)  # type: ignore[no-untyped-call]  # torch has no types here

    @property
    def patch_size(self) -> int:
        """The side of a patch in pixels."""
        return self.config.patch_size

    @property
    def merge_kernel_size(self) -> tuple[int, int]:
        """The rows and columns of patches that are merged to one output token."""
        return self.spatial_merge_size, self.spatial_merge_size

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
        """Whether the encoder computes its blocks again in the backward pass, to save memory."""
        return self._path().gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        self._path().gradient_checkpointing = enabled

    def put_into(self, model: PreTrainedModel) -> None:
        """Replace a model's vision tower by this module.

        If the model has a projector outside its tower, a module that returns its input replaces it.

        Args:
            model: a model of the encoder's own checkpoint.

        Raises:
            ValueError: the model has a tower of another kind, or a language model of another width
                than the encoder's output.
        """
        kind, name = model.config.model_type, type(_unwrap(self.encoder)).__name__
        if kind not in self._call.models:
            raise ValueError(
                f"{name} is not the tower of a model of type {kind!r}, but of "
                f"{', '.join(self._call.models)}: load the encoder of the model's own checkpoint"
            )
        attributes, base_model = self._call.models[kind], model.base_model
        if attributes.projector:
            token_width = _unwrap(self.encoder).out_features
            width = model.config.get_text_config().hidden_size
            if token_width != width:
                raise ValueError(
                    f"{name} makes tokens of width {token_width}, and this model's are {width} "
                    "wide: load the encoder of the model's own checkpoint"
                )
            setattr(base_model, attributes.projector, self.projector)
        setattr(base_model, attributes.tower, self)

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: Tensor | None = None,
        return_dict: bool = True,
        **batch: object,
    ) -> BaseModelOutputWithPooling | tuple[Tensor, ...]:
        """Encode a batch, with the arguments and the result of the tower that this module replaces.

        Args:
            pixel_values: the ``pixel_values`` of the processor: [P, patch_dim] for Qwen and GLM.
            grid_thw: [items, 3], (t, h, w) in patches, for models with packed patches; None for
                other models.
            return_dict: if False, return the fields that are not None as a tuple.
            batch: other keywords with which the model calls its tower. Precomputed metadata are
                ignored, and ``output_hidden_states`` and ``output_attentions`` add nothing.

        Returns:
            For Qwen and GLM ``last_hidden_state`` [P, D], ``pooler_output`` [N, out] and, for
            Qwen3-VL, ``deepstack_features``, a list of [N, out]. ``last_hidden_state`` is the
            output of the last block in the order of the patches, while transformers keeps the order
            of windows (Qwen2.5-VL) or downsamples (GLM); it is None from a :class:`GraphedEncoder`
            that leaves it out. For the other models, all fields have the projected tokens, except
            that ``pooler_output`` of SigLIP has the vector of its head per image.

        Raises:
            ValueError: the module is called without ``grid_thw`` for Qwen or GLM.
        """
        if self._call.run is None:
            if grid_thw is None:
                raise ValueError(
                    "grid_thw is None: this tower takes the patches of all images in one tensor, "
                    "so pass grid_thw [items, 3], (t, h, w) of each image in patches"
                )
            output = self.encoder(pixel_values, grid_thw)
            deepstack = list(output.deepstack_features or ())
            model_output = _model_output(output.last_hidden_state, output.pooler_output, deepstack)
        else:
            model_inputs = {"pixel_values": pixel_values, "grid_thw": grid_thw, **batch}
            tokens = self._call.run(self._encode, self._path(), model_inputs)
            head = _unwrap(self.encoder).pooling_head
            pooled = tokens if head is None else head.apply(list(tokens))
            model_output = BaseModelOutputWithPooling(tokens, pooled, hidden_states=(tokens,))
        return model_output if return_dict else model_output.to_tuple()

    def _encode(self, pixels: Tensor, grids: list[Grid]) -> Tensor:
        """Encode packed pixels with their grids to tokens [N, out].

        If the encoder has several input paths, all pixels go to its path "image".
        """
        if not isinstance(_unwrap(self.encoder), PathsEncoder):
            return _tokens(self.encoder(pixels, grids))
        none = PathInputs(pixels[:0], torch.empty(0, 3, dtype=torch.int64), ())
        inputs = VisionInputs(pixels, torch.tensor(grids), other_paths={"tiles": none})
        return torch.cat([_tokens(output) for output in self.encoder(inputs)])

    def _path(self) -> VisionEncoder:
        """Return the encoder's tower for whole images: itself, or its input path "image"."""
        return _unwrap(self.encoder).paths["image"]


def as_vision_tower(encoder: Encoder | GraphedEncoder) -> VisionTower:
    """Return a module that can replace a model's vision tower; ``.put_into(model)`` replaces it.

    The model's logits and generated tokens do not change. For Qwen2-VL to Qwen3.5 and the GLM
    families the module may also be assigned, ``model.model.visual = as_vision_tower(encoder)``, and
    the keys of ``state_dict`` do not change either: ``model.save_pretrained`` writes a checkpoint
    that transformers loads with its own tower. In other models the module replaces tower and
    projector, and the model cannot be saved with it.

    Args:
        encoder: an encoder of the model's own checkpoint, or a :class:`GraphedEncoder` around one.
            ``load_encoder`` turns gradients off; turn them on to train the tower.

    Returns:
        The module. It shares all layers with the encoder.

    Raises:
        ValueError: an encoder that :class:`VisionTower` rejects.
    """
    return VisionTower(encoder)


def _call_of(encoder: Encoder) -> Call:
    """Return how models of transformers call the tower that ``encoder`` can replace.

    Raises:
        ValueError: no model of transformers has this tower, or no such model can run the encoder.
    """
    kind = type(encoder)
    if kind in CALLS:
        return CALLS[kind]
    is_whole = any(kind is family.encoder for family in FAMILIES.values())
    reason = REFUSED.get(kind, NO_MODEL if is_whole else "it is one path of an encoder")
    raise ValueError(
        f"as_vision_tower does not take {kind.__name__}, since {reason}: call "
        "encoder.encode(images) for the features of each image"
    )


def _refuse_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse to save a model: torch calls this hook before it makes a state dict.

    The encoder's tensors have other names than transformers loads.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"{prefix or 'the tower '}is an encoder of vitgraph whose tensors have other names than "
        "transformers loads: save the model before its tower is replaced, and the tower with "
        "encoder.save_pretrained"
    )


def mm_encoder_outputs(
    encoder: VisionEncoder | GraphedEncoder,
    images: ImagesLike = (),
    videos: VideosLike = (),
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_tiles: int | None = None,
    max_soft_tokens: int | None = None,
    fps: float | None = None,
    num_frames: int | None = None,
) -> dict[str, BaseModelOutputWithPooling]:
    """Encode images and videos for ``model.generate(mm_encoder_outputs=...)`` (transformers 5.18).

    The prompt needs one placeholder token per output token: make the prompt with the model's
    processor from the same images and limits, and drop the pixels that the processor returns.
    ``generate`` modifies these outputs if it returns several sequences, so pass new ones each time.

    Args:
        encoder: an encoder of the model's own checkpoint, or a :class:`GraphedEncoder` around one.
        images: images in the order of their placeholders in the prompts.
        videos: videos in the order of their placeholders. InternVL has one placeholder for both, so
            in its prompts all images have to come before all videos.
        min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames: as
            for ``encoder.preprocess``.

    Returns:
        A dict with the keys ``"image"`` and ``"video"``, if there are such items. Qwen families:
        ``pooler_output`` is a tuple of [tokens, out], one per item, and Qwen3-VL's
        ``deepstack_features`` a list of such tuples, one per layer. InternVL: images and videos
        are both under ``"image"``, with ``pooler_output`` [tiles, tokens per tile, out].

    Raises:
        ValueError: ``encode`` would raise it, or a :class:`GraphedEncoder` has ``outputs`` without
            ``pooler_output`` or ``deepstack_features``.
    """
    limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
    inner = _unwrap(encoder)
    outputs = {
        kind: encoder.encode(
            images=images if kind == "image" else (),
            videos=videos if kind == "video" else (),
            **limits._asdict(),
        )
        for kind, items in (("image", images), ("video", videos))
        if not (isinstance(items, Sequence) and len(items) == 0)
    }
    if outputs and isinstance(inner, InternViT):
        tokens = torch.cat([_tokens(item) for items in outputs.values() for item in items])
        # InternViT encodes at least one tile, so its smallest budget is the tokens of one tile.
        tiles = tokens.unflatten(0, (-1, inner.budget_range[0]))
        return {"image": _model_output(None, tiles, [])}
    return {kind: _listed(items) for kind, items in outputs.items()}


def _listed(items: Sequence[EncoderOutput | PartialOutput]) -> BaseModelOutputWithPooling:
    """Return the outputs of images or videos of Qwen in the form for ``generate``.

    ``pooler_output`` is a tuple of [tokens, out], one per item; ``deepstack_features`` is a list of
    such tuples, one per layer.
    """
    pooled = tuple(map(_tokens, items))
    layers = zip(*(item.deepstack_features or () for item in items), strict=True)
    return _model_output(None, pooled, list(layers))


def _model_output(
    hidden: Tensor | None, pooled: object, deepstack: Sequence[object]
) -> BaseModelOutputWithPooling:
    """Return an output of transformers, of a class that also holds DeepStack features if there are
    any.
    """
    if not deepstack:
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)
    # Importing this module takes seconds, and only models with DeepStack need it.
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    return modeling_qwen3_vl.BaseModelOutputWithDeepstackFeatures(
        last_hidden_state=hidden, pooler_output=pooled, deepstack_features=deepstack
    )


def _tokens(output: EncoderOutput | PartialOutput) -> Tensor:
    """Return the tokens for the language model, ``pooler_output`` [N, out], which is not None."""
    tokens = output.pooler_output
    assert tokens is not None  # `_unwrap` has rejected a GraphedEncoder that leaves it out
    return tokens


def _unwrap(encoder: Encoder | GraphedEncoder) -> Encoder:
    """Return the encoder inside a :class:`GraphedEncoder`, or the encoder itself.

    Raises:
        ValueError: the :class:`GraphedEncoder` does not return a field that language models read,
            or it wraps an encoder that is not one of this library.
    """
    if not isinstance(encoder, GraphedEncoder):
        return encoder
    for field in ("pooler_output", "deepstack_features"):
        if field not in encoder.outputs:
            raise ValueError(
                f"the GraphedEncoder returns no {field}, which language models read: leave its "
                "outputs at ('pooler_output', 'deepstack_features')"
            )
    if not isinstance(encoder.encoder, Encoder):
        raise ValueError(
            f"the GraphedEncoder is one of a {type(encoder.encoder).__name__}, which is no encoder "
            "of vitgraph: make it of the encoder that load_encoder returns"
        )
    return encoder.encoder
