"""`vitgraph bench`: committed figures are listed and printed, and the pages that show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from command_line import Cli, refusal
from vitgraph.commands.benching import bench

ROOT = Path(__file__).parents[2]


def figures() -> dict[str, Any]:
    """A results file of two towers, in the form that ``benchmarks/graphs.py`` writes."""
    row = {
        "workload": "1x224",
        "rows": 196,
        "tokens": 49,
        "hf_eager_ms": 15.0,
        "eager_ms": 7.5,
        "graphed_ms": 2.5,
        "bare_replay_ms": 2.4,
        "host_us": 98.4,
        "path": "64 (8x256)",
        "padding": 64 / 49 - 1,
    }
    eager = row | {
        "workload": "32x448",
        "host_us": None,
        "bare_replay_ms": None,
        "path": "eager",
        "padding": 0.0,
    }
    tower = {
        "tower": "Qwen3-VL-8B",
        "capture_seconds": 4.26,
        "budgets": 48,
        "arena_mib": 210.4,
        "pool_mib": 1804.0,
        "workloads": [row, eager],
        "latency": [{"tokens": 64, "eager_ms": 7.4, "replay_ms": 2.4}],
        "memory_by_budgets": [{"budgets": 1, "pool_mib": 900.0, "arena_mib": 210.0}],
    }
    about = {
        "gpu": "NVIDIA H200",
        "torch": "2.11.0",
        "transformers": "5.23.0",
        "date": "2026-11-21",
        "dtype": "bfloat16",
        "runs": 15,
    }
    return {"about": about, "towers": [tower, tower | {"tower": "InternViT-300M"}]}


def write_json(path: Path, body: object) -> Path:
    path.write_text(json.dumps(body))
    return path


def test_bench_prints_a_table_a_tower_and_what_it_was_measured_on(cli: Cli, tmp_path: Path) -> None:
    path = write_json(tmp_path / "r.json", figures())
    code, out, err = cli("bench", "graphs", "--results", path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "NVIDIA H200, torch 2.11.0, transformers 5.23.0, bfloat16, 2026-11-21: milliseconds, "
        "medians of 15"
    )
    assert lines[2] == ("Qwen3-VL-8B: 48 budgets captured in 4.3 s, arena 210 MiB, pool 1,804 MiB")
    (small, large) = [line.split() for line in lines[5:7]]
    assert small[:9] == ["1x224", "196", "49", "15.00", "7.50", "2.50", "2.40", "6.00", "3.00"]
    assert small[9:] == ["98", "30.6%", "64", "(8x256)"]
    assert large[6] == large[9] == "-"
    assert large[-1] == "eager"
    assert "InternViT-300M: 48 budgets" in out


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"about": {}, "towers": []}'])
def test_file_of_another_kind_is_not_read_as_figures(cli: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    error = refusal(cli("bench", "graphs", "--results", tmp_path / "r.json"))
    assert "python -m benchmarks.graphs --json" in error


def test_figures_that_are_not_there_are_one_line(cli: Cli, tmp_path: Path) -> None:
    error = refusal(cli("bench", "graphs", "--results", tmp_path / "r.json"))
    assert "there is no such file" in error


def test_bench_without_a_clone_says_where_the_figures_are(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "CLONE", tmp_path / "nowhere")
    assert "`vitgraph bench speed REPO` measures" in refusal(cli("bench", "graphs"))
    code, out, err = cli("bench")
    assert (code, err) == (0, "")
    assert "measured figures are part of a clone of the repository" in out
    path = write_json(tmp_path / "r.json", figures())
    assert cli("bench", "graphs", "--results", path)[0] == 0


def test_bench_lists_every_results_file_with_its_script(cli: Cli) -> None:
    code, out, _ = cli("bench")
    assert code == 0
    commands, table = out.split("\n\n")
    assert [line.split()[2] for line in commands.splitlines()] == ["graphs", "speed", "accuracy"]
    lines = table.splitlines()[3:]
    assert [line.split()[0] for line in lines] == sorted(
        path.stem for path in bench.results_folder().glob("*.json")
    )
    for line in lines:
        assert (bench.CLONE / line.split()[1]).is_file(), line


def test_committed_figures_are_printed_whole(cli: Cli) -> None:
    code, out, err = cli("bench", "graphs")
    assert (code, err) == (0, "")
    for tower in bench.read_graphs()["towers"]:
        assert f"{tower['tower']}: {tower['budgets']} budgets" in out
        assert len(tower["workloads"]) >= 3


def test_options_without_a_table_are_one_line(cli: Cli, tmp_path: Path) -> None:
    for options in (["--results", tmp_path / "r.json"], ["--markdown"]):
        assert "vitgraph bench graphs" in refusal(cli("bench", *options))


def test_short_table_has_the_accelerated_column_only_where_it_was_measured(
    cli: Cli, tmp_path: Path
) -> None:
    body = figures()
    for tower in body["towers"]:
        for row in tower["workloads"]:
            row["accelerated_ms"] = 2.6
    for content, columns in ((figures(), 0), (body, 2)):
        _, out, _ = cli("bench", "graphs", "--results", write_json(tmp_path / "r.json", content))
        assert out.count("accelerated") == columns


def test_docs_show_the_padding_that_was_printed() -> None:
    results = json.loads((bench.results_folder() / "ladder_waste.json").read_text())
    text = (ROOT / "docs" / "graphs.md").read_text()
    header, _, *rows = text[text.index("| preprocessing of |") :].split("\n\n")[0].splitlines()
    ladders = [cell.strip() for cell in header.split("|")[2:-1]]
    for row in rows:
        family, *cells = [cell.strip() for cell in row.split("|")[1:-1]]
        measured = [results[family][ladder]["fixed"]["padding"] for ladder in ladders]
        assert cells == [f"{100 * padding:.1f} %" for padding in measured], family


def test_the_picture_is_well_formed_and_says_in_words_what_it_shows() -> None:
    root = ElementTree.parse(ROOT / "docs" / "graphs.svg").getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert root.find("{*}title") is not None
    assert root.find("{*}desc") is not None
    for element in root.iter():
        assert 0 <= float(element.get("x", 0)) <= width
        assert 0 <= float(element.get("y", 0)) <= height
