"""The plug-in beside fakes of vLLM: what it registers and imports, replaces and leaves alone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.fakes.vllm import (
    LinearBase,
    StageMissingLayer,
    UnquantizedLinearMethod,
    fake_vllm,
)
from vitgraph.integrations import vllm_plugin
from vitgraph.integrations.vllm_plugin.records import MODELS, Record

ROOT = Path(__file__).parents[3]
FAKE = """
import os, sys, types
parts = "vllm.model_executor.models.config".split(".")
for end in range(2, 5):
    sys.modules[".".join(parts[:end])] = types.ModuleType(parts[end - 1])
known = {}
vars(sys.modules[".".join(parts)]).update(MODELS_CONFIG_MAP=known, VerifyAndUpdateConfig=object)
__version__ = os.environ["FAKE_VLLM"]
class ModelRegistry:
    @staticmethod
    def get_supported_archs():
        return {SUPPORTED}
    @staticmethod
    def register_model(name, path):
        print(name, path)
"""
REPORT = """
import sys
from vitgraph.integrations.vllm_plugin import register
register()
if "vllm" in sys.modules:
    print("marks", *sys.modules["vllm"].known)
heavy = ("torch", "numpy", "PIL", "encoders", "graphwrap", "weights", "vllm")
print("imported", *[name for name in heavy if name in sys.modules])
print("modules", *sorted(name for name in sys.modules if name.startswith("vitgraph")))
"""


def run_register(
    folder: Path, wanted: str, version: str = "0.32.0", supported: Iterable[str] = MODELS
) -> list[str]:
    """What a process prints that calls ``register`` beside a fake vLLM."""
    (folder / "vllm.py").write_text(FAKE.replace("SUPPORTED", ", ".join(map(repr, supported))))
    environment = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "VITGRAPH_VLLM": wanted,
        "FAKE_VLLM": version,
    }
    done = subprocess.run(
        [sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, check=True
    )
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def test_without_the_variable_nothing_is_imported(tmp_path: Path) -> None:
    lines = run_register(tmp_path, "")
    imported, modules = (set(line.split()[1:]) for line in lines)
    assert imported == set()
    plugin = {"vitgraph", "vitgraph.integrations", "vitgraph.integrations.vllm_plugin"}
    assert modules - plugin == {"vitgraph.shadows"}  # which ``vitgraph`` itself imports


def test_models_are_registered_by_name_and_imported_later(tmp_path: Path) -> None:
    *registered, marks, imported, _ = run_register(tmp_path, "1")
    assert set(marks.split()[1:]) == {*MODELS}
    places = dict(line.split() for line in registered)
    assert imported == "imported vllm"
    assert places == {name: f"{vllm_plugin.__name__}.models:{name}" for name in MODELS}


def test_models_that_a_version_of_vllm_lacks_are_not_registered(tmp_path: Path) -> None:
    known = ["Qwen3VLForConditionalGeneration", "OtherModel"]
    registered, *_ = run_register(tmp_path, "1", supported=known)
    assert registered.split()[0] == "Qwen3VLForConditionalGeneration"


def test_an_unknown_version_keeps_vllms_towers_and_says_so(tmp_path: Path) -> None:
    marks, first, _, warning = run_register(tmp_path, "1", "0.40.1")
    assert marks == "marks"
    assert first == "imported vllm"
    assert "vLLM keeps its own vision towers: this is vLLM 0.40.1, and vitgraph knows" in warning


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITGRAPH_VLLM", "yes")
    with pytest.raises(ValueError, match="VITGRAPH_VLLM=yes: set it to 1"):
        vllm_plugin.register()


def test_wrong_options_are_refused_before_vllm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_vllm("0.32.0").items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VITGRAPH_VLLM", "1")
    monkeypatch.setenv("VITGRAPH_VLLM_OPTIONS", '{"kernel": "torch"}')
    with pytest.raises(ValueError, match="unknown key 'kernel'; known are kernels"):
        vllm_plugin.register()


# --- replacing a tower ---------------------------------------------------------------------------

VISION = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 96,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}


class TheirModel(nn.Module):
    """vLLM's model class: a tower, and a forward pass over nothing."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.visual = vllm_config.tower
        self.order: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.order.append("forward")
        return x

    def embed_multimodal(self, **inputs: Any) -> Tensor:
        return self.visual(inputs["pixels"], inputs["grid"])

    def load_weights(self, weights: Any) -> set[str]:
        return {f"visual.{name}" for name in self.visual.load_weights(weights)}


@pytest.fixture
def replaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The base class, imported beside a fake vLLM 0.26."""
    for name, module in fake_vllm("0.26.0").items():
        monkeypatch.setitem(sys.modules, name, module)
    name = f"{vllm_plugin.__name__}.replacing"
    yield import_module(name)
    del sys.modules[name]  # it has read the fakes


def config_for(tower: nn.Module, vision: dict[str, Any] = VISION, **more: Any) -> Any:
    """A config of vLLM, and the tower that its model class builds."""
    whole = {"model_type": "qwen3_vl", "vision_config": {"model_type": "qwen3_vl", **vision}}
    model = SimpleNamespace(
        model="a-model",
        enforce_eager=False,
        dtype=torch.float32,
        hf_config=SimpleNamespace(to_dict=lambda: whole),
    )
    settings = {
        "tower": tower,
        "model_config": model,
        "additional_config": {},
        "lora_config": None,
        "compilation_config": SimpleNamespace(cudagraph_mm_encoder=True),
    }
    return SimpleNamespace(**{**settings, **more})


def build(replacing: Any, config: Any) -> Any:
    class Model(replacing.ReplacesTower, TheirModel):  # type: ignore[misc,name-defined]
        record = Record("qwen3_vl", "qwen3_vl")

    return Model(vllm_config=config)


def plain_tower(method: object | None = None) -> nn.Module:
    return nn.Sequential(LinearBase(method or UnquantizedLinearMethod()))


def test_a_tower_is_replaced_and_vllms_graphs_are_off(replaces: Any) -> None:
    config = config_for(plain_tower())
    model = build(replaces, config)
    assert model.vision_tower_ours
    assert type(model.visual.encoder).__name__ == "Qwen3VLEncoder"
    assert config.compilation_config.cudagraph_mm_encoder is False
    state = {
        name: torch.randn_like(value) for name, value in model.visual.encoder.state_dict().items()
    }
    assert len(model.load_weights(state.items())) == len(state)
    state.pop("merger.norm.weight")
    model = build(replaces, config_for(plain_tower()))
    with pytest.raises(ValueError, match=r"merger\.norm\.weight"):
        model.load_weights(state.items())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_for(StageMissingLayer()), "limit_mm_per_prompt"),
        (config_for(plain_tower(object())), "it is quantised (0 has object)"),
        (config_for(plain_tower().to("meta")), "it is offloaded (weights on meta, not on cpu)"),
        (config_for(plain_tower(), {**VISION, "num_heads": 5}), "num_heads"),
        (
            config_for(
                plain_tower(), lora_config=SimpleNamespace(enable_tower_connector_lora=True)
            ),
            "enable_tower_connector_lora",
        ),
    ],
)
def test_what_does_not_fit_keeps_vllms_tower_with_a_warning(
    replaces: Any, caplog: pytest.LogCaptureFixture, config: Any, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        model = build(replaces, config)
    assert model.visual is config.tower
    assert config.compilation_config.cudagraph_mm_encoder is True
    (record,) = caplog.records
    assert f"vLLM keeps its own vision tower: {record.args[0]}" in record.getMessage()
    assert reason in record.getMessage()
    assert torch.equal(model(torch.ones(1)), torch.ones(1))


def test_a_table_that_cannot_be_written_is_refused_at_once(replaces: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for table in (tmp_path / "file" / "times.json", tmp_path):
        options = {"vitgraph": {"table": str(table)}}
        with pytest.raises(ValueError, match="option table="):
            build(replaces, config_for(plain_tower(), additional_config=options))
    table = tmp_path / "new" / "times.json"
    build(
        replaces, config_for(plain_tower(), additional_config={"vitgraph": {"table": str(table)}})
    )
    assert table.parent.is_dir()


def test_the_log_names_our_tower_when_the_model_is_built(
    replaces: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model = build(replaces, config_for(plain_tower()))
    (message,) = [record.getMessage() for record in caplog.records]
    encoder = type(model.visual.encoder).__name__
    assert message.startswith(f"vitgraph replaces the vision tower of {type(model).__name__}")
    assert f"by its {encoder}" in message


def test_graphs_are_captured_before_the_first_forward_pass(
    replaces: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(replaces, config_for(plain_tower()))
    done = model.order
    tower = type(model.visual)
    monkeypatch.setattr(tower, "capture", lambda self, **_: done.append("capture"))
    monkeypatch.setattr(tower, "captured", property(lambda self: "capture" in done))
    monkeypatch.setattr(tower, "free_reserve", lambda self: done.append("free"))
    monkeypatch.setattr(tower, "describe", lambda self: "a tower")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            model(torch.ones(1))
    assert done == ["capture", "forward", "free", "forward", "forward"]
    assert [record.getMessage() for record in caplog.records] == [
        "vitgraph runs the vision tower: a tower"
    ]


def test_the_pool_is_held_as_allocated_memory_for_the_profile(replaces: Any) -> None:
    model = build(replaces, config_for(plain_tower()))
    tower = model.visual
    state = {name: torch.randn_like(value) for name, value in tower.encoder.state_dict().items()}
    model.load_weights(state.items())
    pool = SimpleNamespace(stats=lambda: SimpleNamespace(pool_bytes=12345))
    tower._graphed = pool
    tower.reserve()
    assert tower._reserved.nbytes == 12345
    model(torch.ones(1))
    assert tower._reserved is not None
    model(torch.ones(1))
    assert tower._reserved is None


def test_images_before_any_forward_pass_are_encoded(replaces: Any) -> None:
    model = build(replaces, config_for(plain_tower()))
    for weight in model.visual.encoder.parameters():
        nn.init.normal_(weight, std=0.1)
    pixels = torch.randn(16, 3 * 2 * 16 * 16)
    found = model.embed_multimodal(pixels=pixels, grid=[[1, 4, 4]])
    assert tuple(found.shape) == (4, 64)
    assert model.visual.captured
