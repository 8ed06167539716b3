"""A base class that replaces the vision tower of a model class of vLLM, the next base class.

vLLM builds its own tower first, which shows whether the tower is quantised, offloaded or left out.
Then the memory of its weights is freed, and our tower replaces it. CUDA graphs are captured in
vLLM's profiling run, while no KV cache exists: before its first images or its first forward pass.

Source: vLLM 0.26.0 and 0.33.0: ``profile_run`` of ``v1/worker/gpu_model_runner.py`` and
``v1/worker/gpu/model_runner.py``, ``model_executor/models/utils.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

import torch
import vllm
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.models.utils import StageMissingLayer

from weights import FAMILIES

from . import LOGGER, versions
from .engine_config import EngineConfig
from .inputs import BatchInputs, Embeddings
from .options import read_options, require_writable
from .raw_images import check_resizing, with_patches
from .raw_switch import is_raw
from .records import Record
from .tower import TOWERS, Tower, build_encoder

if TYPE_CHECKING:

    class ModelClass(nn.Module):
        """For type checkers: the methods of vLLM's model classes that the base classes extend."""

        use_data_parallel: bool
        patch_size: int
        video_temporal_patch_size: int

        def embed_multimodal(self, **inputs: object) -> Embeddings: ...

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None: ...

        def _process_image_input(self, image_input: BatchInputs) -> Embeddings: ...

        def _process_media_input(self, media_input: BatchInputs) -> Embeddings: ...

        def _process_video_input(self, video_input: BatchInputs) -> Embeddings: ...

        def _process_vision_input(
            self, image_input: BatchInputs, use_vit_merger: object = None
        ) -> Embeddings: ...

        def _image_pixels_to_features(
            self, vision_tower: nn.Module, pixel_values: Tensor
        ) -> Tensor: ...

        def extract_feature(self, pixel_values: Tensor) -> Tensor: ...

        def extract_feature_dynamic(
            self, pixel_values: Tensor, imgs_sizes: Sequence[tuple[int, int]]
        ) -> Tensor: ...

        def _build_image_span(self, image_embeds: Tensor, types: Tensor) -> Tensor: ...

else:
    ModelClass = nn.Module


class ReplacesTower(ModelClass):
    """Mixin that replaces the vision tower of vLLM's model class, the next base, by an encoder.

    If the tower cannot be replaced, a warning is logged and vLLM's own tower runs.

    Attributes:
        record: the family of the encoder, and the attributes in which the model class holds its
            tower and projectors.
    """

    record: ClassVar[Record]

    def __init__(self, *, vllm_config: EngineConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.vision_tower_ours = False
        self._model_dtype = vllm_config.model_config.dtype
        if is_raw(vllm_config.model_config):
            # vLLM's graphs take patches, and would get the bytes of images.
            vllm_config.compilation_config.cudagraph_mm_encoder = False
            check_resizing(torch.get_default_device())
            LOGGER.info("vitgraph resizes images in this process, which gets them as uint8")
        if reason := self._find_obstacle(vllm_config) or self._replace(vllm_config):
            LOGGER.warning("vitgraph: vLLM keeps its own vision tower: %s", reason)
            return
        self.vision_tower_ours = True
        LOGGER.info(
            "vitgraph replaces the vision tower of %s by its %s",
            type(self).__name__,
            type(self.our_tower.encoder).__name__,
        )
        # The encoder captures its own CUDA graphs, so vLLM must not capture it once more.
        vllm_config.compilation_config.cudagraph_mm_encoder = False
        self._forward_calls = 0
        self._hook = self.register_forward_pre_hook(ReplacesTower._before_forward)

    def _find_obstacle(self, vllm_config: EngineConfig) -> str:
        """Return why vLLM's tower or projector cannot be replaced; empty if both can be."""
        names = (self.record.tower, *self.record.projectors)
        obstacles = (find_obstacle(attrgetter(name)(self), vllm_config) for name in names)
        return next(filter(None, obstacles), "")

    def _replace(self, vllm_config: EngineConfig) -> str:
        """Replace vLLM's tower by the encoder; return why this is impossible, or an empty text."""
        model, family = vllm_config.model_config, FAMILIES[self.record.family]
        options = read_options(vllm_config.additional_config, os.environ)
        require_writable(options.table)
        vllm_tower = self.get_submodule(self.record.tower)
        weight = next(vllm_tower.parameters())
        try:
            meta_encoder = build_encoder(family, model.hf_config.to_dict(), model.model)
        except ValueError as error:
            return str(error)
        if self.record.block_norm_eps is not None:
            set_block_norm_eps(meta_encoder, self.record.block_norm_eps)
        norms = (
            module for name, module in vllm_tower.named_modules() if name.endswith("input_norm")
        )
        norm = next(norms, None)  # vLLM before 0.32 has no such module
        dtype, device = weight.dtype, weight.device
        self._put(self.record.tower, nn.Identity())
        for name in self.record.projectors:
            self._put(name, nn.Identity())
        del vllm_tower, weight  # frees the weights of vLLM's tower before ours are made
        encoder = meta_encoder.to(dtype).to_empty(device=device)
        eager = bool(model.enforce_eager)
        tower = TOWERS[self.record.takes](
            encoder, family, options, enforce_eager=eager, input_norm=norm
        )
        self._put(self.record.tower, tower)
        for name in self.record.projectors:
            self._put(name, PassesWeights(tower, name))
        for name in self.record.parameters:
            self.register_parameter(name, encoder.get_parameter(name))
        return ""

    def _put(self, path: str, module: nn.Module) -> None:
        """Replace the submodule at a dotted path, such as "model.vision_model", by ``module``."""
        holder, _, name = path.rpartition(".")
        setattr(self.get_submodule(holder), name, module)

    @property
    def our_tower(self) -> Tower:
        """The tower of this library, which exists only if ``vision_tower_ours`` is true."""
        tower = self.get_submodule(self.record.tower)
        assert isinstance(tower, Tower)
        return tower

    def capture_tower(self) -> None:
        """Capture the encoder's CUDA graphs unless that is done; tensor-parallel ranks wait for one
        another here."""
        tower, ranks = self.our_tower, get_tp_group()
        if tower.captured:
            return
        first = ranks.rank_in_group == 0
        tower.capture(first=first, wait=ranks.barrier)
        if not versions.counts_pools(vllm.__version__) and tower.device.type == "cuda":
            tower.reserve()
        if first:
            LOGGER.info("vitgraph runs the vision tower: %s", tower.describe())

    def _before_forward(self, arguments: tuple[object, ...]) -> None:
        """Capture the graphs before the first forward pass, in which vLLM profiles the memory.

        The second forward pass comes after the profile, so the memory that was allocated to be seen
        by the profile is freed before it.
        """
        self._forward_calls += 1
        if self._forward_calls == 1:
            self.capture_tower()
        else:
            self.our_tower.free_reserve()
            self._hook.remove()

    def embed_multimodal(self, **inputs: object) -> Embeddings:
        """Encode images and videos by vLLM's method of this name, after the graphs are captured and
        images that were sent as bytes became patches."""
        if self.vision_tower_ours:
            self.capture_tower()
        return super().embed_multimodal(**with_patches(inputs, self._model_dtype))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        """Load the weights of the whole model by vLLM's method; check that the encoder got all of
        its tensors.

        Returns:
            Names of the loaded parameters; None if vLLM's method returns none (Nemotron).

        Raises:
            ValueError: a tensor of the encoder is missing or does not fit.
        """
        if self.vision_tower_ours and self.record.published_names:
            weights = self.our_tower.take(weights)
        loaded = super().load_weights(weights)
        if self.vision_tower_ours:
            self.our_tower.check_filled()
        if self.vision_tower_ours and loaded is not None:
            filled = dict(self.our_tower.named_parameters())
            loaded |= {f"{self.record.tower}.{name}" for name in filled}
            loaded |= {*self.record.parameters}
        return loaded


class PassesWeights(nn.Module):
    """Replaces vLLM's projector: passes its tensors to the encoder, and tokens on as they are.

    Args:
        tower: the tower with the encoder.
        path: dotted path of vLLM's projector in the model.
    """

    def __init__(self, tower: Tower, path: str) -> None:
        super().__init__()
        self._fill = tower.load_weights  # storing the tower would register it as a child module
        self._name = path.rpartition(".")[2]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load ``weights``, the projector's tensors by published name, into the encoder."""
        self._fill((f"{self._name}.{name}", tensor) for name, tensor in weights)
        return set()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens of a :class:`.tower.TileTower`, which has projected them."""
        return tokens


def set_block_norm_eps(encoder: nn.Module, eps: float) -> None:
    """Set ``eps`` of the layers ``norm1`` and ``norm2`` in every block of an encoder, in place."""
    for name, layer in encoder.named_modules():
        if isinstance(layer, nn.RMSNorm | nn.LayerNorm) and name.endswith((".norm1", ".norm2")):
            layer.eps = eps


def find_obstacle(vllm_module: nn.Module | None, vllm_config: EngineConfig) -> str:
    """Return why a module that vLLM has built cannot be replaced; empty if it can be.

    Args:
        vllm_module: vLLM's tower or projector; None if its class did not make it.
        vllm_config: the config of the engine.
    """
    if vllm_module is None or isinstance(vllm_module, StageMissingLayer):
        return "limit_mm_per_prompt or the pipeline leaves the tower out"
    lora = vllm_config.lora_config
    if lora is not None and lora.enable_tower_connector_lora:
        return "enable_tower_connector_lora adapts vLLM's own layers"
    for name, layer in vllm_module.named_modules():
        if isinstance(layer, LinearBase):
            method = layer.quant_method
            if not isinstance(method, UnquantizedLinearMethod):
                return f"it is quantised ({name} has {type(method).__name__})"
    devices = {weight.device.type for weight in vllm_module.parameters()}
    current = torch.get_default_device().type
    if devices != {current}:
        return f"it is offloaded (weights on {', '.join(sorted(devices))}, not on {current})"
    return ""
