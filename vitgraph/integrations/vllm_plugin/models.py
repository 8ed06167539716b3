"""vLLM's model classes with the vision towers of this library, made when vLLM asks for them.

``models.Qwen3VLForConditionalGeneration`` is a subclass of the class with that name in vLLM, whose
first base is :class:`.replacing.ReplacesTower` or a class of this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import new_class

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from vllm.model_executor.models.vision import run_dp_sharded_vision_model

from encoders import MiniCPMVConfig, PatchEncoder, PathsEncoder, VisionEncoder
from encoders.contract import Grid

from .inputs import (
    CLIP_READERS,
    READERS,
    VIEW_READERS,
    BatchInputs,
    Embeddings,
    Packed,
    read_flags,
    read_slices,
    read_tensor,
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


class Nemotron(ReplacesTower):
    """Base of the model class of Nemotron, whose tower runs on images of any size, on tiles, and on
    frames or pairs of frames."""

    def extract_feature(self, pixel_values: Tensor, num_frames: int | None = None) -> Tensor:
        """Encode tiles, or frames of a clip, [B, 3, H, W], to [segments, tokens, width of the
        language model]; a segment is a tile, a frame or, if ``num_frames`` is given, several."""
        if not self.vision_tower_ours:
            return super().extract_feature(pixel_values, num_frames)  # type: ignore[call-arg]
        patch, joined = self.patch_size, self.video_temporal_patch_size
        height, width = (side // patch for side in pixel_values.shape[2:])
        rows = rearrange(pixel_values, "b c (h p) (w q) -> b (h w) (c p q)", p=patch, q=patch)
        clip = num_frames is not None and joined > 1
        if clip:
            rows = torch.cat((rows, rows[-1:].expand(-len(rows) % joined, -1, -1)))
            rows = rearrange(rows, "(b t) n c -> b n (t c)", t=joined)
        tokens = self._encode_rows(rows.flatten(0, 1), [(1, height, width)] * len(rows), clip)
        return torch.unflatten(tokens, 0, (len(rows), -1))

    def extract_feature_dynamic(
        self, pixel_values: Tensor, imgs_sizes: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Encode images of any size, packed patches [1, P, 3*p*p], to tokens [N, width of the
        language model]."""
        if not self.vision_tower_ours:
            return super().extract_feature_dynamic(pixel_values, imgs_sizes)
        patch = self.patch_size
        grids = [(1, height // patch, width // patch) for height, width in imgs_sizes]
        return self._encode_rows(pixel_values[0], grids)

    def _encode_rows(self, rows: Tensor, grids: list[Grid], clip: bool = False) -> Tensor:
        """Encode patches, whose columns are those of images or, behind them, those of clips."""
        encoder = self.our_tower.single
        assert isinstance(encoder, PatchEncoder)
        free = encoder.config.patch_dim - rows.shape[1]
        tokens: Tensor = self.our_tower(F.pad(rows, (free, 0) if clip else (0, free)), grids)
        return tokens


class DeepseekV4(ReadsInputs):
    """Base of the model classes of DeepSeek-V4 and V4.1, which put tokens into an order of their
    own, or between delimiters."""

    def embed_multimodal(self, **inputs: object) -> Embeddings:
        """Encode images to one tensor [rows, width of the language model] per image."""
        if not self.vision_tower_ours or inputs.get("patches") is None:
            return super().embed_multimodal(**inputs)
        self.capture_tower()
        packed = READERS[self.record.reader](inputs, self.our_tower.single)
        images, sizes = self._encode(packed), read_tensor(inputs, "llm_grid").tolist()
        if "types" in inputs:  # V4.1
            types = read_tensor(inputs, "types").split([h * (w + 1) + 2 for h, w in sizes])
            spans = zip(images, types, strict=True)
            return [self._build_image_span(tokens, kinds) for tokens, kinds in spans]
        orders = read_tensor(inputs, "perm").split([h * w for h, w in sizes])
        pairs = zip(images, orders, strict=True)
        return [tokens[order.to(tokens.device)] for tokens, order in pairs]


class PaliGemma(ReplacesTower):
    """Base of the model classes of PaliGemma and ColPali, whose tower runs on whole images."""

    def _image_pixels_to_features(self, vision_tower: nn.Module, pixel_values: Tensor) -> Tensor:
        """Encode images [B, 3, side, side] to [B, tokens, width of the language model]."""
        if not self.vision_tower_ours:
            return super()._image_pixels_to_features(vision_tower, pixel_values)
        tokens: Tensor = self.our_tower(pixel_values)
        return tokens


_BASES: Mapping[str, type[ReplacesTower]] = {
    "intern_vit": InternVL,
    "paligemma": PaliGemma,
    "nemotron": Nemotron,
    "deepseek_v4": DeepseekV4,
}
"""Family -> the base of its model classes, if none of the others fits."""


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
    mixin = _BASES.get(record.family, mixin)
    text = f"The class of vLLM with a vision tower of the family {record.family}."
    facts: dict[str, object] = {"record": record, "__module__": __name__, "__doc__": text}
    if record.sends_images:
        facts["_processor_factory"] = raw_factories(vllm_class._processor_factory)  # type: ignore[attr-defined]
    return new_class(name, (mixin, vllm_class), exec_body=lambda body: body.update(facts))
