"""The measurements inside vLLM, run against a fake engine: rows, files, verdicts and tables."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from benchmarks.engines import __main__ as command
from benchmarks.engines import check, load, measure, processor, table, vllm_towers
from benchmarks.engines.models import IDS, MODELS, write_model
from benchmarks.towers import TOWERS, Tower

ABOUT = {"vllm": "0.26.0", "gpu": "a GPU", "torch": "2.11.0", "runs": 2, "date": "2026-11-23"}


class FakeEngine:
    """An engine that answers at once."""

    def __init__(self, folder: Path, mode: str, *, compiled: bool, **more: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.mode, self.asked = mode, 0
        self.layers = config["text_config"]["num_hidden_layers"]
        blocks = 900 if mode == "ours" else 1000
        cache = SimpleNamespace(num_gpu_blocks=blocks, block_size=16)
        tower = {"pool_bytes": 1 << 20, "arena_bytes": 1 << 20}
        self.llm = SimpleNamespace(
            llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache)),
            apply_model=lambda function: [tower if mode == "ours" else {}],
        )

    def answer(self, requests: Any, tokens: int, logprobs: int | None = None) -> list[Any]:
        made = []
        for request in requests:
            self.asked += 1
            images = len(request.get("multi_modal_data", {}).get("image", []))
            assert request["prompt"].count(measure.IMAGE) == images
            odd = self.mode == "stock" and self.asked == 1
            ids = [images + odd] * tokens
            values = {one: SimpleNamespace(logprob=-0.25 * one) for one in range(logprobs or 0)}
            best = [values] * tokens
            made.append(
                SimpleNamespace(
                    outputs=[SimpleNamespace(token_ids=ids, logprobs=best)],
                    metrics=SimpleNamespace(first_token_latency=0.002 * self.asked),
                )
            )
        return made

    def stages(self) -> dict[str, float]:
        return {"encoder": 0.001, "preprocess": 0.0005}


class FakeApart:
    """An engine that would have a process of its own; the one with encoder graphs ends early."""

    start_seconds = 1.5
    asked: ClassVar[list[tuple[str, str, int]]] = []

    def __init__(self, folder: Path, mode: str, *, compiled: bool, share: float, **_: Any) -> None:
        self.mode, self.share = mode, share
        self.engine = FakeEngine(folder, mode, compiled=compiled)

    def ask(self, cell: str, number: int) -> dict[str, float]:
        if self.mode == "graphs" and cell == "8x448":
            raise EOFError
        self.asked.append((self.mode, cell, number))
        return measure.time_request(self.engine, cell, number)

    def end(self) -> None:
        self.asked.append((self.mode, "end", 0))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM", 1)
    monkeypatch.setattr(measure, "RUNS", 3)
    monkeypatch.setattr(check, "SIDES", (16, 32))
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VITGRAPH_VLLM_OPTIONS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "")


def test_every_cell_is_written_when_it_is_measured(tmp_path: Path) -> None:
    file, seen = tmp_path / "rows.json", []
    write = measure.recorder(file, lambda: ABOUT)

    def record(row: dict[str, Any]) -> None:
        write(row)
        seen.append(len(json.loads(file.read_text())["rows"]))

    for modes in (["ours"], ["ours", "stock"]):
        measure.measure(
            "Qwen3-VL-8B", modes, ["1x224", "8x448"], 4, record, compiled=True, start=FakeApart
        )
    # A row that is measured again takes the place of the old one.
    assert seen == [1, 2, 2, 3, 3, 4]
    row = json.loads(file.read_text())["rows"][0]
    assert (row["mode"], row["cell"], row["layers"]) == ("ours", "1x224", 4)
    assert row["encoder_ms"] == 1.0
    assert row["first_token_ms"] == 6.0  # the median of 4, 6 and 8; the first one warms up
    assert row["preprocess_iqr_ms"] == 0.0
    assert row["first_token_to_stock"] == 1.0


def test_engines_get_the_same_requests_in_turn() -> None:
    rows: list[dict[str, Any]] = []
    FakeApart.asked.clear()
    modes, cells = list(measure.MODES), ["1x224", "8x448"]
    measure.measure("Qwen3-VL-8B", modes, cells, 4, rows.append, compiled=True, start=FakeApart)
    asked = [one for one in FakeApart.asked if one[1] == "1x224"]
    turns = [asked[start : start + 4] for start in range(0, len(asked), 4)]
    assert [sorted(turn) for turn in turns] == [
        sorted((mode, "1x224", number) for mode in modes) for number in range(4)
    ]
    assert len({tuple(mode for mode, _, _ in turn) for turn in turns}) > 1  # in varying orders
    # The engine that ends in the second cell is missing there, and the others go on.
    assert [(row["cell"], row["mode"]) for row in rows] == [
        *((cells[0], mode) for mode in modes),
        *((cells[1], mode) for mode in modes if mode != "graphs"),
    ]
    assert sum(cell == "end" for _, cell, _ in FakeApart.asked) == 4


@pytest.mark.slow
def test_an_engine_of_its_own_process_answers_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in measure.ALLOCATOR:
        monkeypatch.setenv(name, "1")
    write_model(tmp_path, "Qwen3-VL-8B", 2)
    engine = measure.Apart(tmp_path, "ours", compiled=True, share=0.3, start=FakeEngine)
    assert engine.start_seconds >= 0
    found = engine.ask("1x224", 0)
    assert found["first_token"] == 0.002
    assert os.environ.keys() >= measure.ALLOCATOR.keys()
    assert found["page_faults"] >= 0
    with pytest.raises(EOFError):
        engine.ask("no such cell", 0)
    engine.end()


def test_the_processor_alone_is_measured_in_two_processes_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"
    monkeypatch.setattr(processor, "Apart", FakeApart)
    monkeypatch.setattr(processor, "describe", lambda: ABOUT)
    given = ["--json", str(file), "--models", "Qwen2.5-VL-7B", "--cells", "1x448", "--runs", "2"]
    monkeypatch.setattr(sys, "argv", ["engine_processor", *given])
    processor.main()
    rows = json.loads(file.read_text())["rows"]
    assert [row["mode"] for row in rows] == list(processor.KINDS) * 2
    parts = [row["part"] for row in rows]
    assert parts == ["allocator: keeps memory"] * 5 + ["allocator: default"] * 5
    assert all(row["preprocess_ms"] == 0.5 for row in rows)
    assert all(row["preprocess_to_stock"] == 1.0 for row in rows)


@pytest.mark.parametrize(("kind", "wanted"), [("stock again", "0"), ("ours", "1"), ("raw", "1")])
def test_the_processor_of_a_kind_has_the_plug_in_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, wanted: str
) -> None:
    loaded: list[str | None] = []
    applied: list[Any] = []
    info = SimpleNamespace(
        get_tokenizer=lambda: SimpleNamespace(encode=list),
        parse_mm_data=lambda data: len(data["image"]),
    )
    fake = SimpleNamespace(info=info, apply=lambda inputs, timing: applied.append(inputs))
    marks = SimpleNamespace()
    model = SimpleNamespace(hf_config=marks)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"ModelConfig": lambda folder, **settings: model},
        "vllm.multimodal": {
            "MULTIMODAL_REGISTRY": SimpleNamespace(create_processor=lambda config: fake)
        },
        "vllm.multimodal.processing": {"TimingContext": lambda: SimpleNamespace(total_secs=0.25)},
        "vllm.multimodal.processing.inputs": {"ProcessorInputs": lambda *given: given},
        "vllm.plugins": {
            "load_general_plugins": lambda: loaded.append(os.environ.get("VITGRAPH_VLLM"))
        },
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"set_default_torch_num_threads": nullcontext},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("VITGRAPH_VLLM", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "")
    made: Any = processor.Processor(tmp_path, kind, compiled=False)
    assert loaded == [wanted]
    assert bool(vars(marks)) == (kind == "raw")
    found = measure.time_request(made, "8x448", 0)
    assert found["preprocess"] == 0.25
    ((prompt, images),) = applied
    assert (len(prompt), images) == (len(measure.IMAGE * 8 + "What is this?"), 8)


def test_the_check_compares_tokens_with_the_reference(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    record = measure.recorder(file, lambda: ABOUT)
    folder = tmp_path / "Qwen3-VL-8B-2"
    write_model(folder, "Qwen3-VL-8B", 2)
    (folder / "model.safetensors").touch()
    for part in check.PARTS:
        check.check(
            "Qwen3-VL-8B", part, 2, "1", record, start=FakeEngine, place=tmp_path, device="cpu"
        )
    (verdict,) = check.verdicts(json.loads(file.read_text())["rows"])
    assert verdict == {
        "model": "Qwen3-VL-8B",
        "layers": 2,
        "runner": "1",
        "requests_equal_to_reference": 24,
        "requests_equal_to_ours_without_graphs": 24,
        "stock_requests_equal_to_reference": 23,
        "reference_requests_equal_in_opposite_order": 24,
        "median_gap": 0.25,
        "gaps_where_ours_differs": [],
        "gaps_where_stock_differs": [0.25],
        "gaps_where_opposite_order_differs": [],
        "requests": 24,
        "kv_blocks": 900,
        "stock_kv_blocks": 1000,
        "tower_mib": 2,
        "mixed_requests_answered": 200,
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_model_folder_needs_no_network(tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig, AutoTokenizer

    write_model(tmp_path, name, 3)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.text_config.num_hidden_layers == 3
    tokens = AutoTokenizer.from_pretrained(tmp_path)(measure.IMAGE + "a").input_ids
    middle = [IDS["vision_start_token_id"], IDS["image_token_id"], IDS["vision_end_token_id"]]
    assert tokens[:3] == middle
    assert len(tokens) == 4


def test_parts_of_a_measurement_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(command, "run_apart", lambda _, module, one: given.append((module, one)))
    command.main(
        ["--models", "Qwen3-VL-8B", "--modes", "ours", "--cells", "1x224", "--layers", "all"]
    )
    command.main(["--check", "--models", "Qwen2.5-VL-7B", "--runners", "1"])
    assert given[0] == (
        "benchmarks.engines",
        {
            "model": "Qwen3-VL-8B",
            "modes": ["ours"],
            "cells": ["1x224"],
            "layers": None,
            "compiled": True,
        },
    )
    assert {module for module, _ in given[1:]} == {check.__name__}
    assert [one["part"] for _, one in given[1:]] == ["reference", "eager", "ours", "stock"]


def test_the_page_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "version_of", lambda *_: None)
    monkeypatch.setattr(table, "RESULTS", tmp_path / "rows.json")
    monkeypatch.setattr(table, "CHECKS", tmp_path / "none.json")
    assert table.drawn() == table.NOT_RUN
    record = measure.recorder(tmp_path / "rows.json", lambda: ABOUT)
    modes = list(measure.MODES)
    measure.measure("Qwen3-VL-8B", modes, ["1x224"], 4, record, compiled=False, start=FakeApart)
    text = table.drawn()
    name = "Qwen3-VL-8B, 4, not compiled, without flash-attn-4"
    assert f"| {name} | 1x224 | 0.5 | 1.0 | 1.0 | 1.0 | 1.0 | 6.0 | 6.0 | 6.0 | 6.0 |" in text


@pytest.mark.parametrize(
    ("mode", "on", "raw"), [("graphs", "0", False), ("ours", "1", False), ("raw", "1", True)]
)
def test_an_engine_of_a_mode_sends_images_raw_or_not(
    monkeypatch: pytest.MonkeyPatch, mode: str, on: str, *, raw: bool
) -> None:
    monkeypatch.setenv("VITGRAPH_VLLM_OPTIONS", '{"backend": "eager"}')
    found = measure.variables(mode)
    assert found["VITGRAPH_VLLM"] == on
    assert json.loads(found["VITGRAPH_VLLM_OPTIONS"]) == {"backend": "eager", "raw_images": raw}


class FakeLoaded:
    """An engine whose first tokens take a known time, which counts requests at once."""

    def __init__(self, folder: Path, mode: str, *, compiled: bool, share: float) -> None:
        assert json.loads((folder / "config.json").read_text())["text_config"]
        self.start_seconds, self.mode = 1.0, mode
        self.at_once: list[int] = []
        self.names: list[str] = []
        self.running = 0

    def ask(self, cell: str, number: int) -> dict[str, Any]:
        return load.time_round(self, cell, number)

    def end(self) -> None:
        self.names.append("end")

    def run(self, work: Any) -> Any:
        return asyncio.run(work)

    async def first_token(self, request: dict[str, Any], name: str) -> float:
        assert request["multi_modal_data"]["image"].size in load.SIZES
        self.running += 1
        self.at_once.append(self.running)
        self.names.append(name)
        await asyncio.sleep(0)
        self.running -= 1
        return 0.001 * len(self.names)


def test_load_is_measured_by_clients_that_wait_for_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeLoaded] = []

    def start(*given: Any, **more: Any) -> FakeLoaded:
        made.append(FakeLoaded(*given, **more))
        return made[-1]

    monkeypatch.setattr(load, "REQUESTS", 10)
    monkeypatch.setattr(load, "SIZES", ((8, 8), (16, 8)))
    monkeypatch.setattr(load, "describe", lambda: ABOUT)
    file = tmp_path / "load.json"
    given = ["--json", str(file), "--modes", "stock,raw", "--clients", "1,4", "--rounds", "2"]
    load.main(given, start)
    rows = json.loads(file.read_text())["rows"]
    names = [(row["mode"], row["cell"]) for row in rows]
    assert names == [(mode, f"{n} clients") for n in (1, 4) for mode in ("stock", "raw")]
    assert [row["requests"] for row in rows] == [20] * 4  # the first round warms up
    assert rows[0]["p50_ms"] == 20.5  # of the first tokens 11 to 30
    assert rows[0]["p99_ms"] == 29.81
    for engine in made:
        assert max(engine.at_once[:30]) == 1
        assert max(engine.at_once[30:]) == 4
        assert len(set(engine.names[:30])) == 30
        assert engine.names[-1] == "end"


class FakeTowerEngine:
    """An engine whose worker runs functions on a model that copies its pixels."""

    def __init__(self, folder: Path, mode: str, *, compiled: bool, **more: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config") or config.get("llm_config") or config
        assert (mode, text["num_hidden_layers"]) == ("graphs", 1)
        self.tiled = "trust_remote_code" in more
        model = SimpleNamespace(embed_multimodal=self.embed)
        manager = SimpleNamespace(execute=lambda inputs: [torch.full((1,), torch.nan)])
        runner = SimpleNamespace(
            device=torch.device("cpu"), get_model=lambda: model, managers={"auto": manager}
        )
        worker = SimpleNamespace(model_runner=runner)
        self.llm = SimpleNamespace(collective_rpc=lambda run, args: [run(worker, *args)])

    def embed(self, **inputs: torch.Tensor) -> list[torch.Tensor]:
        pixels = inputs["pixel_values_flat" if self.tiled else "pixel_values"]
        if self.tiled:
            assert len(pixels) == inputs["image_num_patches"].sum()
        else:
            assert len(pixels) == inputs["image_grid_thw"].prod(1).sum()
        return [pixels[:1]]


@pytest.mark.parametrize("name", ["Qwen2-VL-7B", "InternViT-300M"])
def test_encoders_of_vllm_are_timed_in_its_worker(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = "1x224" if name.startswith("Qwen") else "1 tile"
    grids = {workload: TOWERS[name].workloads[workload]}
    monkeypatch.setattr(Tower, "workloads", grids)
    monkeypatch.setattr(vllm_towers, "managers_of", lambda runner: runner.managers)
    monkeypatch.setattr(vllm_towers, "describe", lambda: {**ABOUT, "commit": "abc"})
    row = vllm_towers.measure(name, 2, FakeTowerEngine)
    assert row["nan"] == {"eager": [], "auto": [workload]}
    assert set(row["ms"]) == {"eager", "auto"}
    file = tmp_path / "vllm.json"
    for _ in range(2):
        vllm_towers.record(file, row)
    body = json.loads(file.read_text())
    assert [tower["tower"] for tower in body["towers"]] == [name]
    assert {"version", "budgets", "date", "method", "commit"} <= set(body["about"])
