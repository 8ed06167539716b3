"""vLLM's model classes with the vision towers of this library, made when vLLM asks for them.

``models.Qwen3VLForConditionalGeneration`` is a subclass of the class with that name in vLLM, whose
first base is :class:`.replacing.ReplacesTower` or a class of this module.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import new_class

from torch import Tensor, nn
from vllm.model_executor.models.vision import run_dp_sharded_vision_model

from encoders import MiniCPMVConfig, PathsEncoder, VisionEncoder

from .inputs import (
    CLIP_READERS,
    READERS,
    VIEW_READERS,
    BatchInputs,
    Embeddings,
    Packed,
    read_flags,
    read_slices,
)
from .raw_processor import raw_factories
from .records import MODELS
from .replacing import ReplacesTower


class ReadsInputs(ReplacesTower):
    """Base of model classes that call their tower per image, or have a projector outside of it.

    With this base, one call of the encoder runs tower and projector for the whole batch instead.
    """

    def _process_image_input(self, image_input: BatchInputs) -> Embeddings:
        """Encode images to one tensor [tokens, width of the language model] per image."""
        if not self.vision_tower_ours or image_input.get("type") == "image_embeds":
            return super()._process_image_input(image_input)
        return self._encode(READERS[self.record.reader](image_input, self.our_tower.single))

    def _process_media_input(self, media_input: BatchInputs) -> Embeddings:
        """Encode images and clips of Kimi-K2.5 to one tensor [tokens, width of the language model]
        per image or clip."""
        if not self.vision_tower_ours:
            return super()._process_media_input(media_input)
        return self._encode(READERS[self.record.reader](media_input, self.our_tower.single))

    def _process_video_input(self, video_input: BatchInputs) -> Embeddings:
        """Encode clips (videos) to one tensor [tokens, width of the language model] per clip."""
        if not self.vision_tower_ours:
            return super()._process_video_input(video_input)
        return self._encode(CLIP_READERS[self.record.reader](video_input, self.our_tower.single))

    def _encode(self, packed: Packed) -> list[Tensor]:
        return self.our_tower.encode_items(packed)


class ReadsViews(ReplacesTower):
    """Base of the model classes of Step3, Step3-VL and DeepSeek-OCR-2, whose tower runs on whole
    images and on tiles."""

    def _process_image_input(self, image_input: BatchInputs) -> Embeddings:
        """Encode images to one tensor [tokens, width of the language model] per image."""
        if not self.vision_tower_ours or image_input.get("type") == "image_embeds":
            return super()._process_image_input(image_input)
        encoder = self.our_tower.encoder
        assert isinstance(encoder, PathsEncoder)
        return self.our_tower.encode_views(VIEW_READERS[self.record.reader](image_input, encoder))


class ReadsSlices(ReplacesTower):
    """Base of the model classes of MiniCPM-V, whose requests may ask for the mode "4x" or "16x"."""

    def _process_vision_input(
        self, image_input: BatchInputs, use_vit_merger: object = None
    ) -> Embeddings:
        """Encode whole images or frames, each followed by its slices, to a tensor
        [tokens, width of the language model] each, in the mode that the request asks for."""
        if not self.vision_tower_ours or image_input.get("type") == "image_embeds":
            return super()._process_vision_input(image_input, use_vit_merger)
        packed, encoder = read_slices(image_input, self.our_tower.single), self.our_tower.single
        config = encoder.config
        assert isinstance(config, MiniCPMVConfig)
        modes = read_flags(use_vit_merger, len(packed.counts), config.merges_inside)
        if all(mode == config.merges_inside for mode in modes):
            return self.our_tower.encode_items(packed)
        towers: dict[bool, VisionEncoder] = {}
        for mode in set(modes):
            towers[mode] = copy(encoder)  # the copy shares the modules, and runs without graphs
            towers[mode].config = replace(config, merges_inside=mode)
        return [
            towers[mode](item.pixel_values, item.grids).pooler_output
            for mode, item in zip(modes, packed.items(), strict=True)
        ]


class InternVL(ReplacesTower):
    """Base of the model class of InternVL, whose tower runs on the tiles of all images."""

    def extract_feature(self, pixel_values: Tensor) -> Tensor:
        """Encode tiles [B, 3, side, side] to [B, tokens per tile, width of the language model]."""
        if not self.vision_tower_ours:
            return super().extract_feature(pixel_values)
        tokens: Tensor
        if self.use_data_parallel:
            tokens = run_dp_sharded_vision_model(pixel_values, self.our_tower)
        else:
            tokens = self.our_tower(pixel_values)
        return tokens


class PaliGemma(ReplacesTower):
    """Base of the model classes of PaliGemma and ColPali, whose tower runs on whole images."""

    def _image_pixels_to_features(self, vision_tower: nn.Module, pixel_values: Tensor) -> Tensor:
        """Encode images [B, 3, side, side] to [B, tokens, width of the language model]."""
        if not self.vision_tower_ours:
            return super()._image_pixels_to_features(vision_tower, pixel_values)
        tokens: Tensor = self.our_tower(pixel_values)
        return tokens


@cache  # so that a name always means the same class
def __getattr__(name: str) -> type:
    """Make the model class for an architecture when vLLM first asks for it (PEP 562).

    Raises:
        AttributeError: the name is not in ``MODELS``.
    """
    if name not in MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    record = MODELS[name]
    vllm_class: type = getattr(import_module(record.path), record.name or name)
    mixin = ReadsInputs if record.reader else ReplacesTower
    if record.reader in VIEW_READERS:
        mixin = ReadsViews
    if record.reader == "slices":
        mixin = ReadsSlices
    if record.module == "internvl":
        mixin = InternVL
    if record.family == "paligemma":
        mixin = PaliGemma
    text = f"The class of vLLM with a vision tower of the family {record.family}."
    facts: dict[str, object] = {"record": record, "__module__": __name__, "__doc__": text}
    if record.sends_images:
        facts["_processor_factory"] = raw_factories(vllm_class._processor_factory)  # type: ignore[attr-defined]
    return new_class(name, (mixin, vllm_class), exec_body=lambda body: body.update(facts))
