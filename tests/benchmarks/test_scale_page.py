"""The figures of ``docs/scale.md`` are those that were measured, and what measures them runs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import soak
from benchmarks.data_parallel import table
from benchmarks.scale import __main__ as scale
from benchmarks.scale import measure
from graphwrap import GraphedEncoder
from tests.support.towers.streams import tower

EXTRAS = {"flash-attn-4": "4.0.0"}
ABOUT = {"gpu": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-22", "extras": EXTRAS}


def gpu_results(rate: float = 600.0) -> dict[str, Any]:
    """Rates in the form of ``--gpu``."""
    sizes = {"640x480": {"tokens": 300, "images per second": rate}}
    return {"about": ABOUT, "workers": 16, "towers": {"Qwen3-VL-8B": sizes}}


def host_results() -> dict[str, Any]:
    """Rates in the form of ``--host``."""
    return {
        "cpu": "a CPU",
        "torch": "2.15.0",
        "date": "2026-11-22",
        "decoding": {"640x480": {"kilobytes": 70.0, "Qwen": 100.0, "InternViT": 50.0}},
        "per second": {"files of a folder": 100_000},
        "bytes per listed file": 250,
        "listed on": "a CPU",
    }


def test_cores_are_computed_from_rates() -> None:
    assert "| Qwen3-VL-8B | 6.0 |" in scale.cores(gpu_results(), host_results())
    said = scale.decoding(host_results())
    assert "10,000,000 files of a folder in 100 s (at 100,000 per second)" in said
    assert "takes 2.5 GB of its memory (250 bytes per file of a folder)" in said


def test_parts_that_are_not_measured_say_what_measures_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "benchmarks" / "results"
    for name in ("HOST", "GPU", "SMALL", "PARALLEL", "SOAK"):
        monkeypatch.setattr(scale, name, root / getattr(scale, name).name)
    monkeypatch.setattr(scale, "ROOT", tmp_path)
    parts = scale.generated_parts()
    assert "benchmarks.scale --gpu --json benchmarks/results/scale_h200.json" in parts["rates"]
    assert "benchmarks.soak --json" in parts["soak"]
    root.mkdir(parents=True)
    (root / scale.GPU.name).write_text(json.dumps(gpu_results()))
    rates = scale.generated_parts()["rates"]
    assert "torch 2.11.0, flash-attn-4 4.0.0" in rates
    assert "600 (300)" in rates
    assert "scale --small --json" in scale.generated_parts()["small rates"]
    (root / scale.SMALL.name).write_text(json.dumps(gpu_results()))
    other = {**gpu_results(700.0), "about": {**ABOUT, "gpu": "NVIDIA H100"}}
    (root / "scale_small_gpu.json").write_text(json.dumps(other))
    small = scale.generated_parts()["small rates"]
    for rate, gpu in ((600, "H200"), (700, "H100")):
        assert f"| Qwen3-VL-8B | 300 | {rate} |" in small
        assert f"one NVIDIA {gpu}" in small
    assert "--host" in scale.generated_parts()["cores"]


@pytest.mark.slow
def test_one_core_is_measured_and_towers_are_told_apart() -> None:
    found = measure.measure_decoding((96, 64), 2)
    assert found["Qwen"] > 0
    assert found["InternViT"] > 0
    lists = measure.measure_lists(50)
    assert min(lists.values()) > 0
    committed = json.loads(scale.GPU.read_text())["encoders"]
    found = {name: measure.identity(repo) for name, repo in measure.TOWERS.items()}
    assert found == committed


def test_a_rate_of_a_gpu_is_measured_as_on_the_cpu() -> None:
    encoder = tower("qwen3_vl")
    graphed = GraphedEncoder(encoder)
    items = [torch.zeros(3, 64, 96, dtype=torch.uint8).permute(1, 2, 0).numpy()] * 4
    found = measure.rate_of(graphed, encoder, items, workers=1, repeats=1)
    assert (
        found["tokens"] == encoder.item_specs(encoder.preprocess(items).grid_thw)[0].output_tokens
    )
    assert found["images per second"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # no processor file beside the weights
def test_a_rate_of_a_small_tower_is_measured_as_on_the_cpu() -> None:
    found = measure.rate_of_small("SigLIP2-B/16", 2, 1, 1, tiny=True)
    assert found["tokens"] > 0
    assert found["images per second"] > 0


def test_a_soak_compares_every_result_and_finds_one_wrong_bit() -> None:
    encoder = tower("qwen3_vl")
    graphed = GraphedEncoder(encoder, [64], outputs=soak.FIELDS, backend="static")
    calls = soak.draw_calls(encoder, 5, 64, seed=0)
    assert {call.name for call in calls} >= {"image", "clip", "large image"}
    run = soak.Soak(graphed, calls, 0.0)
    run.warm = 0.0
    for number in [*range(5)] * 2:
        run._call(number)
    assert run.wrong == []
    first = run.first[1]
    assert first is not None
    assert first.pooler_output is not None
    first.pooler_output[0, 0] += 1e-3
    run._call(1)
    sizes = (100, 100, 100, 104)
    samples = [{"reserved": 0, "allocated": 5, "resident": size} for size in sizes]
    options = {"tower": "small", "seconds": 1.0, "threads": 1}
    body = soak.report(run, samples, options)
    assert body["wrong calls"] == 1
    assert "call 1 (images)" in body["wrong"][0]
    assert body["growth"] == {"reserved": 0.0, "allocated": 0.0, "resident": 0.04}
    assert body["passed"] is False
    said = soak.sentence({**body, "about": ABOUT})
    assert "11 calls of mixed sizes in 1 s from 1 threads, 1 results that differ" in said
    grown = {"memory": {"reserved": [8.1e9, 8.4e9], "resident": [2e9, 2e9]}, "about": ABOUT}
    said = soak.sentence({**body, **grown})
    assert "GPU memory went from 8.10 to 8.40 GB and host memory from 2.00 to 2.00 GB" in said
    assert "over the last quarter are 0.00% and 4.00% above those over the first" in said


def test_threads_of_a_soak_end_and_raise_their_error() -> None:
    encoder = tower("qwen3_vl")
    graphed = GraphedEncoder(encoder, [64], outputs=soak.FIELDS, backend="static")
    calls = soak.draw_calls(encoder, 5, 64, seed=0)
    run = soak.Soak(graphed, calls, 0.3)
    assert run.run(3)
    assert run.milliseconds
    assert run.wrong == []
    bad = calls[0]._replace(pixels=calls[0].pixels[:-1])
    with pytest.raises(ValueError, match="rows"):
        soak.Soak(graphed, [bad], 5.0).run(2)


def test_images_of_a_soak_fit_the_tokens_given() -> None:
    chance = random.Random(0)
    for _ in range(500):
        tokens = chance.randint(1, 300)
        t, h, w = soak.image(chance, tokens)
        assert t == 1
        assert h * w // 4 <= tokens


def test_figures_of_several_gpus_are_a_table() -> None:
    one = {"median": 20.0, "min": 19.0, "max": 21.0}
    body = {"ranks": 2, "images": 64, "tokens": 28000, "ms": {"one": one, "all": one}}
    assert (
        table({**body, "speed-up": 1.0}).splitlines()[-1]
        == "| 2 | 64 | 28,000 | 20.0 | 20.0 | 1.00 |"
    )
