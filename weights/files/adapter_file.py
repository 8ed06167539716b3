"""An adapter of peft beside the weights of a checkpoint: its config, and the header of its file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import CheckpointError
from ..strict_json import JsonObject
from .checkpoint import Checkpoint
from .tensor_file import TensorEntry

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
KEPT = "adapter/"
"""The prefix of the names that the adapter's tensors have in the file of a kept tower."""
_LORA_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True)
class AdapterFile:
    """The config of an adapter, and the tensors of its file by peft's names."""

    config: JsonObject
    tensors: Mapping[str, TensorEntry]
    file: str
    """The name of the file that holds the tensors."""
    file_bytes: int


def read_adapter_file(checkpoint: Checkpoint) -> AdapterFile | None:
    """Read the config and the header of the adapter beside a checkpoint's weights, None without.

    The file of a tower in the cache has the tensors of the adapter that change the tower.

    Raises:
        CheckpointError: there is a config, and no safetensors file of weights.
    """
    config = checkpoint.read_json(ADAPTER_CONFIG)
    if config is None:
        return None
    kept = checkpoint.published is not None and checkpoint.weights
    if not kept and not checkpoint.has(ADAPTER_FILE):
        raise CheckpointError(
            f"{checkpoint.label}: has {ADAPTER_CONFIG} and no {ADAPTER_FILE} (pickle files are "
            "never opened): save the adapter's weights as safetensors, or remove the config if "
            "the adapter is merged into the weights already"
        )
    name, prefix = (kept, KEPT) if kept else (ADAPTER_FILE, "")
    header = checkpoint.headers({name: 0})[name]
    tensors = {
        tensor.removeprefix(prefix): entry
        for tensor, entry in header.tensors.items()
        if tensor.startswith(prefix)
    }
    return AdapterFile(config, tensors, name, header.file_bytes)


def adapter_names(names: Iterable[str]) -> list[str]:
    """Return the tensors among ``names`` that belong to a LoRA adapter."""
    return [name for name in names if any(part in _LORA_PARTS for part in name.split("."))]


def adapter_error(label: str, base: object = None) -> CheckpointError:
    """Return the error for a repo that holds a LoRA adapter instead of a tower.

    Args:
        label: name of the checkpoint in messages.
        base: the base model that the adapter's config names, None if it names none.
    """
    source = f" ({base})" if base else ""
    return CheckpointError(
        f"{label}: holds a LoRA adapter, not the weights of a tower: load the base model it was "
        f"trained on{source}, or merge the adapter into it and save that"
    )
