"""Mutated headers, indexes and configs end in a correct tower or a CheckpointError."""

from __future__ import annotations

import json
import resource
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file

from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

FAMILIES = {
    "qwen3_vl": "model.visual.",
    "qwen2_vl": "visual.",
    "qwen2_5_omni": None,
    "intern_vit_300m": None,
    "intern_vit_hf": None,
    "intern_vit_timm": None,
    "step3_vl": None,
    "step3": None,
    "deepseek_vl": None,
    "deepseek_vl_hybrid": None,
    "deepseek_vl_hybrid_hf": None,
    "deepseek_vl2": None,
    "deepseek_ocr": None,
}
"""What is written, and the prefix where the published names are ours but for it."""
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    16,
    1024,
    1 << 20,
    10**9,
    10**30,
    -(10**30),
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "2",
    "../x",
    "BF16",
    "F32",
    "F8_E4M3",
    "\ud800",
    "é" * 50,
    [],
    [1],
    [14, 14],
    [0, 0],
    [1] * 2000,
    {},
    {"a": 1},
    [[[]]],
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fuzz")
    return {
        family: write_seeded_checkpoint(
            root / family, family, width=32, depth=1, shards=1 if "timm" in family else 2
        )
        for family in FAMILIES
    }


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside ``value``."""
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, part in inner:
        yield (*path, key)
        yield from nodes(part, (*path, key))


ways = st.sampled_from(["replace"] * 4 + ["delete", "rename", "copy"])
mutations = st.lists(st.tuples(st.integers(0, 9999), ways, st.sampled_from(ODD)), max_size=3)
blows = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=3)


def mutated(value: Any, changes: list[tuple[int, str, Any]]) -> Any:
    for number, way, odd in changes:
        paths = list(nodes(value))
        if not paths:
            break
        *outer, last = paths[number % len(paths)]
        inside = value
        for key in outer:
            inside = inside[key]
        if way == "delete":
            del inside[last]
        elif way == "rename" and isinstance(inside, dict):
            inside[str(odd)] = inside.pop(last)
        elif way == "copy" and isinstance(inside, dict):
            inside[last] = deepcopy(inside[list(inside)[number % len(inside)]])
        else:
            inside[last] = deepcopy(odd)
    return value


def forge(raw: bytes, json_file: bool, changes: Any, hits: list[tuple[int, int]]) -> bytes:
    """The file with its JSON part changed, and then bytes of that."""
    length = 0 if json_file else int.from_bytes(raw[:8], "little")
    part = raw if json_file else raw[8 : 8 + length]
    text = json.dumps(mutated(json.loads(part), changes)).encode()
    head = b"" if json_file else len(text).to_bytes(8, "little")
    forged = bytearray(head + text)
    for place, byte in hits:
        forged[place % len(forged)] = byte
    return bytes(forged) + (b"" if json_file else raw[8 + length :])


def check(folder: Path, family: str, name: str) -> None:
    """Load, and if that succeeds, compare with another reader of the format."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of defaults, where a processor file lost its values
            tower = load_encoder(folder).state_dict()
    except CheckpointError:
        return
    prefix = FAMILIES[family]
    if prefix is None:
        return
    stored: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        try:
            stored |= load_file(path)
        except SafetensorError:  # it is stricter about what is none of the tower's
            assert path.name == name
            return
    for ours, tensor in tower.items():
        assert torch.equal(tensor, stored[prefix + ours].to(tensor.dtype)), ours


def fuzz(folders: dict[str, Path], examples: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(st.sampled_from(sorted(FAMILIES)), st.integers(0, 7), mutations, blows)
    def once(family: str, number: int, changes: Any, hits: list[tuple[int, int]]) -> None:
        files = sorted(folders[family].iterdir())
        path = files[number % len(files)]
        raw = path.read_bytes()
        path.write_bytes(forge(raw, path.suffix == ".json", changes, hits if number % 2 else []))
        try:
            check(folders[family], family, path.name)
        finally:
            path.write_bytes(raw)

    once()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 500e6


def test_mutated_checkpoints_give_a_tower_or_an_error(folders: dict[str, Path]) -> None:
    fuzz(folders, 120)


@pytest.mark.slow
def test_many_mutated_checkpoints_give_a_tower_or_an_error(folders: dict[str, Path]) -> None:
    fuzz(folders, 400)
