"""Our tower inside vLLM, without vLLM: its options, its call, and how strictly it is filled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from tests.oracles import draw_pixels
from vitgraph.integrations.vllm_plugin.options import VARIABLE, PluginOptions, read_options
from vitgraph.integrations.vllm_plugin.tower import PackedTower, TileTower, Tower, build_encoder
from vitgraph.integrations.vllm_plugin.versions import counts_pools, refusal
from vitgraph.seeded import write_seeded_checkpoint
from weights import FAMILIES, load_encoder

GRIDS = [[1, 4, 6], [2, 4, 4]]
Named = dict[str, Tensor]


def checkpoint(folder: Path, kind: str) -> tuple[dict[str, Any], Named]:
    """Config and tower tensors of a small checkpoint, named as vLLM passes them on."""
    write_seeded_checkpoint(folder, kind, width=64, dtype=torch.float32, shards=1)
    tensors: Named = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            for prefix in ("model.visual.", "visual.", "vision_model."):
                if name.startswith(prefix):
                    tensors[name.removeprefix(prefix)] = file.get_tensor(name)
            if name.startswith("mlp1."):
                tensors[name] = file.get_tensor(name)
    return json.loads((folder / "config.json").read_text()), tensors


def make(
    folder: Path, kind: str, options: PluginOptions | None = None, **more: Any
) -> tuple[Tower, Named]:
    """A tower that is not filled yet, and the tensors that fill it."""
    config, tensors = checkpoint(folder, kind)
    family = FAMILIES[kind.removesuffix("_300m")]
    encoder = build_encoder(family, config, kind).to_empty(device="cpu").float()
    made = TileTower if kind == "intern_vit_300m" else PackedTower
    return made(encoder, family, options or PluginOptions(), **more), tensors


@pytest.mark.parametrize("backend", ["eager", "static"])
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_tower_returns_what_the_loaded_encoder_returns(
    tmp_path: Path, kind: str, backend: str
) -> None:
    tower, tensors = make(tmp_path, kind, PluginOptions(backend=backend, budgets=[32]))
    assert tower.load_weights(tensors.items()) == {name for name, _ in tower.named_parameters()}
    tower.check_filled()
    encoder = load_encoder(tmp_path)
    pixels = draw_pixels(encoder, GRIDS)
    wanted = encoder(pixels, GRIDS)
    with torch.inference_mode():
        found = tower(pixels, torch.tensor(GRIDS))
    assert found.shape[1] == tower.out_hidden_size
    joined = torch.cat((wanted.pooler_output, *wanted.deepstack_features), dim=1)
    torch.testing.assert_close(found, joined, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "static"])
def test_tiles_become_tokens_per_tile(tmp_path: Path, backend: str) -> None:
    tower, tensors = make(
        tmp_path, "intern_vit_300m", PluginOptions(backend=backend, budgets=[512])
    )
    tower.load_weights(tensors.items())
    tower.check_filled()
    encoder = load_encoder(tmp_path)
    tiles = torch.randn(3, *encoder.row_shape)
    wanted = encoder(tiles, [[3, *encoder.grid_for(1)[1:]]]).pooler_output
    torch.testing.assert_close(tower(tiles).flatten(0, 1), wanted, rtol=1e-4, atol=1e-5)


def test_results_stay_the_callers_own(tmp_path: Path) -> None:
    tower, tensors = make(tmp_path, "qwen2_vl", PluginOptions(backend="static", budgets=[32]))
    tower.load_weights(tensors.items())
    pixels = draw_pixels(tower.encoder, GRIDS)
    first = tower(pixels, GRIDS)
    kept = first.clone()
    tower(pixels.flip(0), GRIDS)
    assert torch.equal(first, kept)


def test_weights_loaded_anew_are_seen_by_captured_graphs(tmp_path: Path) -> None:
    tower, tensors = make(tmp_path, "qwen3_vl", PluginOptions(backend="static", budgets=[32]))
    tower.load_weights(tensors.items())
    pixels = draw_pixels(tower.encoder, GRIDS)
    before = tower(pixels, GRIDS)
    tower.load_weights([("merger.linear_fc2.bias", tensors["merger.linear_fc2.bias"] + 1)])
    width = tower.encoder.out_features
    torch.testing.assert_close(tower(pixels, GRIDS)[:, :width], before[:, :width] + 1)


def test_a_table_of_times_is_measured_by_the_first_rank_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    class Graphed:
        backend = "cudagraph"

        def __init__(self, encoder: object, **settings: Any) -> None:
            self.table = settings["table"]

        def capture(self, progress: bool) -> Graphed:
            done.append(self.table)
            return self

    monkeypatch.setattr(f"{Tower.__module__}.GraphedEncoder", Graphed)
    for table in (PluginOptions().table, "times.json", None):
        for first in (True, False):
            folder = tmp_path / f"{table}-{first}"
            tower, _ = make(folder, "qwen3_vl", PluginOptions(table=table))
            tower.capture(first=first, wait=lambda: done.append("wait"))
    kept = ["auto", "wait", "wait", "auto", "times.json", "wait", "wait", "times.json"]
    assert done == [*kept, None, None]


def test_pixels_of_type_uint8_pass_through_vllms_normalisation(tmp_path: Path) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
            return x.to(dtype) / 255

    tower, tensors = make(tmp_path, "qwen3_vl", input_norm=Norm())
    tower.load_weights(tensors.items())
    raw = torch.randint(0, 256, draw_pixels(tower.encoder, GRIDS).shape, dtype=torch.uint8)
    found = tower(raw, GRIDS)
    tower.input_norm = None
    assert torch.equal(found, tower(raw.float() / 255, GRIDS))


def test_queries_keys_and_values_apart_are_joined(tmp_path: Path) -> None:
    tower, tensors = make(tmp_path, "qwen2_5_vl")
    apart: Named = {}
    for name, tensor in tensors.items():
        if ".attn.qkv." in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                apart[name.replace("qkv", part)] = rows
        else:
            apart[name] = tensor
    tower.load_weights(apart.items())
    tower.check_filled()
    state = tower.encoder.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_tensors_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    tower, tensors = make(tmp_path, "qwen3_vl")
    tensors["blocks.0.attn.proj.weight"] = torch.zeros(3, 4)
    tensors["blocks.9.norm1.weight"] = torch.zeros(64)
    tensors["merger.norm.bias"] = tensors["merger.norm.bias"].to(torch.int8)
    with pytest.raises(ValueError, match="tensors that do not fit") as caught:
        tower.load_weights(tensors.items())
    text = str(caught.value)
    assert "blocks.0.attn.proj.weight: is [3, 4], the config makes [64, 64]" in text
    assert "blocks.9.norm1.weight: the tower has no such tensor" in text
    assert "merger.norm.bias: is of torch.int8" in text


def test_missing_tensors_are_named_as_published_after_the_last_part(tmp_path: Path) -> None:
    tower, tensors = make(tmp_path, "intern_vit_300m")
    names = list(tensors)
    del tensors["encoder.layers.1.ls1"]
    tower.load_weights((name, tensors[name]) for name in names[:5] if name in tensors)
    tower.load_weights((name, tensors[name]) for name in names[5:] if name in tensors)
    with pytest.raises(ValueError, match=r"no tensors for \(1\):\n  encoder\.layers\.1\.ls1\n"):
        tower.check_filled()


def test_sizes_that_no_tower_has_are_refused_before_weights(tmp_path: Path) -> None:
    config, _ = checkpoint(tmp_path, "qwen3_vl")
    config["vision_config"]["num_heads"] = 5
    with pytest.raises(ValueError, match="num_heads"):
        build_encoder(FAMILIES["qwen3_vl"], config, "x")


def test_options_come_from_the_environment_or_from_vllm() -> None:
    wanted = PluginOptions(kernels="torch", budgets=[64, 128])
    given = {"kernels": "torch", "budgets": [64, 128]}
    assert read_options({}, {VARIABLE: json.dumps(given)}) == wanted
    assert read_options({"vitgraph": given, "other": 1}, {}) == wanted
    assert read_options(object(), {}) == PluginOptions()


@pytest.mark.parametrize(
    ("config", "text", "match"),
    [
        ({}, '{"kernel": "torch"}', "unknown key 'kernel'; known are kernels, precision"),
        ({}, '{"max_budget": "many"}', "max_budget='many' must be of type int"),
        ({}, '{"budgets": [1, true]}', "budgets"),
        ({}, '{"kernels": "fast"}', "kernels='fast' must be one of auto, "),
        ({}, '{"backend": "graphs"}', "backend='graphs' must be one of auto, cudagraph"),
        ({}, '{"min_budget": 0}', "min_budget=0 must be 1 or more"),
        ({}, '{"budgets": []}', r"budgets=\[\] must be 1 or more"),
        ({}, "[1]", "must be a JSON object"),
        ({}, "{", "is not JSON"),
        ({"vitgraph": {}}, "{}", "both given"),
        ({"vitgraph": 3}, "", "additional_config"),
    ],
)
def test_wrong_options_are_refused_with_the_known_ones(config: Any, text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_options(config, {VARIABLE: text})


def test_enforce_eager_rules_graphs_out() -> None:
    assert PluginOptions().backend_for(enforce_eager=True) == "eager"
    assert PluginOptions(backend="cudagraph").backend_for(enforce_eager=True) == "eager"
    assert PluginOptions(backend="static").backend_for(enforce_eager=True) == "static"
    assert PluginOptions().backend_for(enforce_eager=False) == "auto"


def test_only_versions_that_were_read_are_taken() -> None:
    taken = ["0.26.0", "0.29.1", "0.32.0+cpu", "0.33.0"]
    assert [refusal(version) for version in taken] == [""] * 4
    for version in ("0.25.1", "0.34.0", "1.0.0", "dev"):
        assert f"vLLM {version}, and vitgraph knows 0.26 to 0.33" in refusal(version)
    assert [counts_pools(version) for version in taken] == [False, True, True, True]
