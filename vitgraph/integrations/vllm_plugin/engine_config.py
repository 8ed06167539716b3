"""Types for vLLM's config, with the members that the plug-in reads or sets.

vLLM is not imported here. Source: ``config/vllm.py``, ``config/model.py``, ``config/lora.py`` and
``config/compilation.py`` of vLLM 0.26.0 and 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class ModelFile(Protocol):
    """The contents of a model's ``config.json``, in a config object of transformers."""

    def to_dict(self) -> Mapping[str, object]: ...


class ModelSettings(Protocol):
    """The settings of the model that the engine serves."""

    @property
    def model(self) -> str: ...

    @property
    def hf_config(self) -> ModelFile: ...

    @property
    def enforce_eager(self) -> bool: ...

    @property
    def dtype(self) -> torch.dtype: ...


class LoraSettings(Protocol):
    """vLLM's settings of LoRA adapters."""

    @property
    def enable_tower_connector_lora(self) -> bool: ...


class CompilationSettings(Protocol):
    """The settings of the CUDA graphs that vLLM itself captures."""

    cudagraph_mm_encoder: bool
    """Whether vLLM itself captures the vision tower in CUDA graphs."""


class EngineConfig(Protocol):
    """The config of an engine, ``vllm_config`` in vLLM."""

    @property
    def model_config(self) -> ModelSettings: ...

    @property
    def lora_config(self) -> LoraSettings | None: ...

    @property
    def compilation_config(self) -> CompilationSettings: ...

    @property
    def additional_config(self) -> object: ...
