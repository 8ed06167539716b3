"""As much of ai-dynamo 1.6 as ``vitgraph.integrations.dynamo`` imports: the contract of an encoder.

Source: ai-dynamo 1.6.1, ``backend/base.py`` and ``adapter/qwen3_vl.py`` of
``dynamo/vllm/multimodal_utils/custom_encoder``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, TypeVar

import pytest
from torch import Tensor

Raw = TypeVar("Raw")
Item = TypeVar("Item")
Artifact = TypeVar("Artifact")
ROOM = "dynamo.vllm.multimodal_utils.custom_encoder"


@dataclass(frozen=True)
class Preprocessed(Generic[Item]):
    """A stand-in for Dynamo's record of a preprocessed item and of its cost in a batch."""

    item: Item
    cost: int = 1


@dataclass(frozen=True)
class Qwen3VLImageEncoding:
    """A stand-in for Dynamo's record of the features and the grid of an image."""

    embeddings: Tensor
    grid_thw: tuple[int, int, int]


class VisionEncoderBackend(Generic[Raw, Item, Artifact]):
    """A stand-in for Dynamo's base class of encoders."""

    max_batch_cost: int | None = None
    buckets: Any = None
    preprocess_concurrency = 0


def import_integration(patch: pytest.MonkeyPatch) -> Any:
    """Import ``vitgraph.integrations.dynamo`` anew, with these stand-ins for Dynamo's classes."""
    names: dict[str, tuple[type, ...]] = {
        "backend": (Preprocessed, VisionEncoderBackend),
        "adapter.qwen3_vl": (Qwen3VLImageEncoding,),
    }
    for name, classes in names.items():
        module = ModuleType(f"{ROOM}.{name}")
        vars(module).update({one.__name__: one for one in classes})
        patch.setitem(sys.modules, module.__name__, module)
    packages = ("dynamo", "dynamo.vllm", "dynamo.vllm.multimodal_utils", ROOM, f"{ROOM}.adapter")
    for name in packages:
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.delitem(sys.modules, "vitgraph.integrations.dynamo", raising=False)
    module = import_module("vitgraph.integrations.dynamo")
    patch.setitem(sys.modules, "vitgraph.integrations.dynamo", module)
    return module
