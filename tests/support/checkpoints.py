"""Edits of small checkpoints for the tests of loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite config.json after ``edit`` has changed the parsed config in place."""
    config = read_json(folder / "config.json")
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite all tensors as two shards with an index after ``edit`` has changed them in place."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    edit(tensors)
    names = list(tensors)
    placed = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"part-{number}.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
