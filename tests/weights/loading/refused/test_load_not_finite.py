"""Weights that are not finite, or would not be after a cast, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.hub.checkpoints import edit_tensors
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

NAME = "model.visual.blocks.1.mlp.linear_fc1.weight"
BIAS = "model.visual.blocks.0.attn.qkv.bias"


def put(folder: Path, name: str, value: float, dtype: torch.dtype | None = None) -> None:
    """Set the last but one value of a tensor, which may get another dtype first."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype or tensors[name].dtype).clone()
        tensors[name].view(-1)[-2] = value

    edit_tensors(folder, edit)


@pytest.mark.parametrize(
    "stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, value: float, stored: torch.dtype
) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen3_vl", width=64, dtype=stored)
    put(folder, NAME, value)
    put(folder, BIAS, value)
    listed = rf"not finite \(2\): [^,]*{BIAS}[^,]*{abs(value)}\), {NAME} \(has {abs(value)}\)"
    for dtype in (None, "float32"):
        with pytest.raises(CheckpointError, match=rf"{tmp_path}(?s:.)*{listed}"):
            load_encoder(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("stored", "value", "largest", "cast", "fix"),
    [
        (torch.bfloat16, 81920.0, "81,920", "float16", "'bfloat16' or 'float32' or 'float64'"),
        (torch.bfloat16, -81920.0, "81,920", "float16", "'bfloat16' or 'float32' or 'float64'"),
        (torch.float32, 65520.0, "65,520", "float16", "'bfloat16' or 'float32' or 'float64'"),
        (torch.float32, 3.4e38, "3.4e\\+38", "bfloat16", "'float32' or 'float64'"),
        (torch.float64, -1e39, "1e\\+39", "float32", "'float64'"),
    ],
)
def test_a_cast_that_overflows_names_tensors_and_largest_values(
    tmp_path: Path, stored: torch.dtype, value: float, largest: str, cast: str, fix: str
) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen3_vl", width=64, dtype=stored)
    put(folder, NAME, value)
    assert load_encoder(folder).dtype == stored
    with pytest.raises(CheckpointError, match=rf"{NAME} \(largest {largest}\)\nPass dtype={fix}$"):
        load_encoder(folder, dtype=cast)


@pytest.mark.parametrize("value", [65504.0, -65519.0])
def test_weights_at_the_limit_of_float16_are_loaded(tmp_path: Path, value: float) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen3_vl", width=64, dtype=torch.float32)
    put(folder, NAME, value)
    weight = load_encoder(folder, dtype="float16").state_dict()["blocks.1.mlp.linear_fc1.weight"]
    assert weight.abs().max() == 65504


def test_the_smaller_part_of_a_mixed_tower_may_not_overflow(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen3_vl", width=64, dtype=torch.float16)
    put(folder, BIAS, 70000.0, torch.float32)
    with pytest.raises(CheckpointError, match=rf"{BIAS} \(largest 70,000\)"):
        load_encoder(folder)
    assert load_encoder(folder, dtype="float32").dtype == torch.float32


@pytest.mark.parametrize("place", [0, 1, 300_000, -1])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_one_odd_value_is_found_wherever_it_stands(
    tmp_path: Path, place: int, value: float
) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen3_vl", width=320)

    def edit(tensors: dict[str, Tensor]) -> None:
        assert tensors[NAME].numel() > 300_000  # more than one piece that is checked at a time
        tensors[NAME].view(-1)[place] = value

    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=NAME):
        load_encoder(folder)


def test_infinite_bounds_of_clamped_layers_are_loaded(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "gemma4_e2b", width=64, depth=1)

    def edit(tensors: dict[str, Tensor], value: Callable[[Tensor], Tensor]) -> None:
        for name in tensors:
            if name.endswith("input_max"):
                tensors[name] = value(tensors[name])

    edit_tensors(folder, lambda tensors: edit(tensors, lambda old: old * torch.inf))
    bounds = [b for n, b in load_encoder(folder).state_dict().items() if n.endswith("input_max")]
    assert bounds
    assert all(bound.isinf() for bound in bounds)
    edit_tensors(folder, lambda tensors: edit(tensors, lambda old: old * torch.nan))
    with pytest.raises(CheckpointError, match=r"input_max \(has nan\)"):
        load_encoder(folder)


def test_a_tower_fetched_by_ranges_is_checked_too(
    hub: HubServer, tmp_path: Path, cache: Path
) -> None:
    folder = write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64)
    put(folder, NAME, float("nan"))
    hub.push(REPO, folder)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(CheckpointError, match=r"blocks.1.mlp.linear_fc1.weight \(has nan\)"):
            load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
