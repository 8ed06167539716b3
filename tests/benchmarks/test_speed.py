"""The speed benchmark on tiny towers without a GPU, its tables, and ``bench speed``."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.graphs import draw, hf_call
from benchmarks.measuring.machine import read_commit, version_of
from benchmarks.never_slower import forced_replay
from benchmarks.speed import __main__ as speed
from benchmarks.speed.measure import Case, Setup, measure_tower
from benchmarks.table import __main__ as table
from benchmarks.table import charts
from benchmarks.table import results as speed_results
from benchmarks.towers import TOWERS
from benchmarks.traffic.random_workloads import MOST_TILES, MOST_TOKENS, random_workloads
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, build_encoder, build_pair
from tests.support.commands.command_line import Cli
from vitgraph.commands import bench_speed
from vitgraph.timing import milliseconds


def run_of(ms: float) -> dict[str, float]:
    return {"min": 0.9 * ms, "median": ms, "max": 1.2 * ms, "runs": 15}


def made_up(name: str) -> dict[str, Any]:
    """A tower of the tables, or one beside them, with made-up figures."""
    workloads = list(TOWERS[name].workloads) if name in speed.TABLE else speed.BESIDE[name][0]
    rows = [workload(one, 2.0 * place) for place, one in enumerate(workloads, 1)]
    if name in speed.TABLE:
        rows.append(workload("random 300x400", 5.0, drawn=True))
    seconds = {"torch": {"cold": 14.0}, "auto": {"cold": 30.0, "warm": 9.0, "saved": 8.0}}
    memory = {"arena_mib": 100.0, "pool_mib": 2000.0, "derived_mib": 810.0}
    return {
        "tower": name,
        "tower_mib": 1290.4,
        "about": {"seed": 7, "gpu": "NVIDIA H200"},
        "captures": {
            kernels: {"capture_seconds": value, "budgets": 48, **memory}
            for kernels, value in seconds.items()
        },
        "workloads": rows,
    }


def workload(name: str, ms: float, drawn: bool = False) -> dict[str, Any]:
    step = {"tokens": 64, "kernel": "triton", "replays": 1}
    return {
        "workload": name,
        "drawn": drawn,
        "tokens": 64 + len(name),
        "rows": 256,
        "graphed_ms": {"auto": run_of(ms), "torch": run_of(1.05 * ms)},
        "reference_graph_ms": run_of(1.6 * ms),
        "paths": {"auto": [step], "torch": [step]},
        **(
            {}
            if drawn
            else {
                "hf_ms": run_of(9 * ms),
                "bare_ms": run_of(ms - 0.1),
                "accelerated_ms": run_of(ms),
            }
        ),
    }


def results() -> dict[str, Any]:
    names = [*speed.TABLE, *speed.BESIDE]
    about = {
        "gpu": "NVIDIA H200",
        "torch": "2.11.0",
        "transformers": "5.17.0",
        "dtype": "bfloat16",
        "driver": "580.1.2",
        "power_limit_watts": 700.0,
        "extras": {"flash-attn-4": "4.0.0b36"},
        "runs": 15,
    }
    return {"about": about, "towers": [made_up(name) for name in names]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "small", "batch"),
    [
        ("qwen3_vl", "Qwen3-VL-8B", [[1, 4, 4]], [[1, 4, 6]] * 3),
        ("intern_vit_300m", "InternViT-300M", [[1, 8, 8]], [[2, 8, 8], [1, 8, 8]]),
    ],
)
def test_a_tower_is_measured_without_a_gpu_as_with_one(
    family: str, name: str, small: list[list[int]], batch: list[list[int]], tmp_path: Path
) -> None:
    encoder, reference = build_pair(BY_NAME[family], BY_NAME[family].tiny)
    cases = [Case("1x224", small), Case("8x448", batch), Case("random", batch, drawn=True)]
    setup = Setup(runs=2, stages=("cold", "warm"), backend="static", max_budget=64, max_graphs=2)
    with torch.no_grad():
        row = measure_tower(
            name,
            encoder,
            cases,
            setup,
            {"hf_ms": lambda pixels, grids: hf_call(TOWERS[name], reference, pixels, grids)},
        )
    assert set(row["captures"]["auto"]["capture_seconds"]) == {"cold", "warm"}
    assert set(row["captures"]["torch"]["capture_seconds"]) == {"cold"}
    first, _, drawn = row["workloads"]
    assert {"hf_ms", "reference_graph_ms", "accelerated_ms"} <= set(first)
    assert first["graphed_ms"]["auto"]["runs"] == 3 * setup.runs  # few tokens, more runs
    assert first["paths"]["auto"][0]["kernel"] == "reference"
    assert "hf_ms" not in drawn
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize("name", ["Qwen3-VL-8B", "Qwen2-VL-7B", "InternViT-300M"])
def test_random_workloads_fit_the_largest_budget_and_follow_their_seed(name: str) -> None:
    for seed in range(20):
        drawn = random_workloads(TOWERS[name], seed)
        assert len(drawn) == 5
        for grids in drawn.values():
            tokens = sum(t * h * w // 4 for t, h, w in grids)
            assert tokens <= (MOST_TILES * 256 if "Intern" in name else MOST_TOKENS)
        assert random_workloads(TOWERS[name], seed) == drawn
    assert random_workloads(TOWERS[name], 0) != random_workloads(TOWERS[name], 1)


def test_towers_of_a_later_run_replace_their_own_and_keep_the_others(tmp_path: Path) -> None:
    path, body = tmp_path / "r.json", results()
    speed.write(path, body)
    fresh = copy.deepcopy(body["towers"][1])
    fresh["tower_mib"] = 1.0
    merged = speed.merge(path, [fresh])
    assert [tower["tower"] for tower in merged["towers"]] == [
        tower["tower"] for tower in body["towers"]
    ]
    assert merged["towers"][1]["tower_mib"] == 1.0
    fresh["about"] = {"gpu": "NVIDIA H100 80GB HBM3"}
    with pytest.raises(ValueError, match="another --json"):
        speed.merge(path, [fresh])


def test_calls_run_in_turn_in_any_order_and_slow_ones_less_often() -> None:
    said: list[str] = []
    calls = {name: (lambda name=name: said.append(name)) for name in "abc"}
    times = milliseconds(calls, 20, {"c": 2})
    assert {name: len(values) for name, values in times.items()} == {"a": 20, "b": 20, "c": 2}
    assert all(sorted(said[at : at + 3]) == ["a", "b", "c"] for at in (0, 3, 6))
    pairs = ["".join(said[at : at + 2]) for at in range(9, len(said), 2)]
    assert set(pairs) == {"ab", "ba"}


def test_forced_replay_never_runs_eagerly() -> None:
    encoder = build_encoder(BY_NAME["qwen3_vl"], BY_NAME["qwen3_vl"].tiny)
    graphed = GraphedEncoder(encoder, [16, 64], backend="static").capture(progress=False)
    grids = [[1, 4, 6]]
    pixels = draw(encoder, grids)
    output = forced_replay(graphed)(pixels, grids)
    assert torch.equal(output.pooler_output, graphed(pixels, grids).pooler_output)
    assert graphed.stats().eager_calls == 0


def test_vllm_figures_say_where_they_come_from_and_cover_the_table() -> None:
    about = json.loads(speed_results.VLLM.read_text())["about"]
    assert {"version", "budgets", "date", "method", "runs", "commit"} <= set(about)
    assert "formula" in json.loads(speed_results.FLOORS.read_text())["about"]
    best, floors = speed_results.vllm_best(), speed_results.read_floors()
    for tower in speed.TABLE:
        assert set(best[tower]) == set(floors[tower]) == set(TOWERS[tower].workloads)
    assert best["Qwen3-VL-8B"]["8x448"] == 19.2


def test_tables_mark_another_run_and_every_workload_where_vllm_is_faster() -> None:
    body = results()
    body["towers"][0]["workloads"][2]["graphed_ms"]["auto"] = run_of(20.0)
    assert "| vLLM 0.26.0 |" in table.comparison(body)
    assert "in 1 of 22 with the `flash` extra (Qwen3-VL-8B 1x1024)" in table.behind(body)
    (row,) = [line for line in table.comparison(body).splitlines() if "VL-8B | 1x1024" in line]
    assert "| 54.0 | **6.30** | 20.0 | 14.8 | 2.35 | 0.74 |" in row  # the least is bold
    assert len(table.comparison(body).splitlines()) == 2 + 22


def test_flash_attention_2_of_transformers_is_not_measured_or_stands_beside_sdpa() -> None:
    body = results()
    assert "| Qwen3-VL-8B | 8x448 | 72.0 | not measured | 8.00 |" in table.two_attentions(body)
    body["towers"][0]["workloads"][3]["hf_flash_ms"] = run_of(31.0)
    assert "| Qwen3-VL-8B | 8x448 | 72.0 | 31.0 | 8.00 |" in table.two_attentions(body)
    (row,) = [line for line in table.comparison(body).splitlines() if "VL-8B | 8x448" in line]
    assert "| 31.0 | " in row  # transformers stands in the tables with the faster of both
    for given in ([], ["--transformers", "sdpa", "flash_attention_2"]):
        names = speed.read_options(given).transformers
        assert [speed.THEIRS[name] for name in names] == ["hf_ms", "hf_flash_ms"]


def test_the_page_and_both_charts_are_made_of_results(tmp_path: Path) -> None:
    page = table.page(results())
    for word in ("least to most", "Seed 7", "from a saved table", "Qwen2.5-VL-72B", "DeepSeek-OCR"):
        assert word in page
    for drawing in (charts.draw_picture, charts.draw_bars):
        drawing(results(), tmp_path / "speed.svg")
        check_picture(tmp_path / "speed.svg")


def check_picture(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    assert root.find("{*}title") is not None
    assert root.find("{*}desc") is not None


def test_the_charts_show_the_committed_speed_figures(tmp_path: Path) -> None:
    """Measured anew? ``python -m benchmarks.pages`` draws the charts."""
    body = table.read_results()
    assert body is not None
    charts.draw_bars(body, tmp_path / "bars.svg")
    for path in (tmp_path / "bars.svg", charts.BARS):
        words = [text.text for text in ElementTree.parse(path).getroot().findall(".//{*}text")]
        figures = {"15.5", "42.2", "39.3", "174", "20.4"}
        assert figures <= set(words)
    check_picture(charts.PICTURE)


def luminance(ink: str) -> float:
    parts = [int(ink[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_machine_without_git_or_package_metadata_is_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("VITGRAPH_COMMIT", "abc")
    assert read_commit() == "abc"
    assert version_of("no-such-package", "no_such_module.part") is None
    assert version_of("no-such-package", "torch") == torch.__version__


DTYPES = ("float32", "bfloat16")


def test_bench_speed_measures_a_checkpoint_and_says_that_the_reference_runs(
    cli: Cli, folder: Path
) -> None:
    code, out, err = cli("bench", "speed", folder, "--dtype", "float32", "--runs", 1)
    assert (code, err) == (0, "")
    assert "Qwen3VLEncoder on cpu, float32" in out
    assert "the reference runs in place of the accelerated encoder: the encoder is on cpu" in out
    assert "there are no graphs without CUDA" in out
    assert "gain" not in out  # the reference ran twice
    assert "speed of bfloat16" in out
    code, out, _ = cli(
        "bench",
        "speed",
        folder,
        "--dtype",
        "float32",
        "--runs",
        1,
        "--json",
        "--kernels",
        "auto",
        "torch",
        "--device",
        "cpu",
    )
    body = json.loads(out)
    assert [entry["kernels"] for entry in body["kernels"]] == ["auto", "torch"]
    assert body["kernels"][0]["sizes"][0]["reference_ms"]["median"] > 0
    assert body["kernels"][0]["graphs"] is None
    assert [row["images"] for row in body["dtypes"]] == [1, 2]
    assert all(row[f"{dtype}_ms"]["min"] > 0 for row in body["dtypes"] for dtype in DTYPES)


def test_bench_speed_prints_the_attention_kernel_of_each_budget() -> None:
    times = {"min": 1.0, "median": 2.0, "max": 3.0}
    graphs = {
        "capture_seconds": 9.5,
        "arena_bytes": 2**20,
        "pool_bytes": 2**30,
        "derived_bytes": 0,
        "budgets": [
            {
                "tokens": 64,
                "segments": 8,
                "longest_segment": 256,
                "kernel": "flash4, triton",
                "replay_ms": 1.5,
            }
        ],
    }
    size = {"images": 1, "tokens": 64, "reference_ms": {**times, "median": 8.0}}
    size |= {"accelerated_ms": times, "graph_ms": {**times, "median": 1.6}}
    about = dict.fromkeys(("checkpoint", "encoder", "device", "dtype", "torch", "runs"), "x")
    entry = {"kernels": "auto", "note": "", "sizes": [size], "graphs": graphs}
    out = bench_speed.table({"about": about, "kernels": [entry], "dtypes": []})
    assert "gain" in out
    assert "1 budget captured in 9.5 s; MiB: arena 1, pool 1024, derived weights 0" in out
    assert "flash4, triton" in out
    assert "5.00" in out


def test_bench_speed_times_graphs_beside_both_other_forms() -> None:
    encoder = build_encoder(BY_NAME["qwen3_vl"], BY_NAME["qwen3_vl"].tiny)
    graphed = GraphedEncoder(encoder, [64], backend="static").capture(progress=False)
    with torch.no_grad():
        row = bench_speed.measure_size(encoder, encoder.accelerated(), graphed, (1, 1), 2)
    assert {"reference_ms", "accelerated_ms", "graph_ms"} <= set(row)
    graphs = bench_speed.describe(graphed.stats())
    assert graphs["budgets"][0]["kernel"] == "reference"
    assert graphs["derived_bytes"] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kernels", "typo"], "--kernels typo: must be one of auto, torch"),
        (["--runs", "0"], "--runs 0: must be a positive integer"),
        (["--batchsize=3"], "`vitgraph bench speed --help`"),
    ],
)
def test_bench_speed_refuses_in_one_line(cli: Cli, options: list[str], said: str) -> None:
    code, out, err = cli("bench", "speed", "no/repo", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
