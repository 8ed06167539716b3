"""Edits of small checkpoints for the tests of loading."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitgraph.seeded import SEEDED

INDEX = "model.safetensors.index.json"

Written = Callable[..., Path]
"""Gives the folder of a small checkpoint by name and depth, written once per process."""


def first_of_each(names: Collection[str], kind: Callable[[str], object]) -> list[Any]:
    """Return names as parameters of a test, all marked slow but the first name of each kind.

    Args:
        names: names of small checkpoints.
        kind: returns the kind of a name.
    """
    firsts = {kind(name): name for name in reversed([*names])}.values()
    return [
        name if name in firsts else pytest.param(name, marks=pytest.mark.slow) for name in names
    ]


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
    placed: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"part-{number}.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def layout_of(name: str) -> tuple[str, str]:
    """Return the family of a small checkpoint, and the layout that names its tensors."""
    return SEEDED[name].family.name, SEEDED[name].layout.name


LAYOUTS = first_of_each(SEEDED, layout_of)
"""The small checkpoints, of which one per layout of a family runs in a plain pytest."""
