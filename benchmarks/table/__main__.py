"""Prints ``benchmarks/RESULTS.md`` from the files in benchmarks/results.

    python -m benchmarks.table    (prints the page; python -m benchmarks.pages writes it)

``python -m benchmarks`` measures these results. The times of vLLM and the floors (the least times
that the GPU's peak rates allow) are in other files, which say how they were obtained; the tables
mark vLLM's times as those of another run. No figure on the page is written by hand: a test compares
the page with the results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.tables import markdown
from benchmarks.table.charts import picture_link
from benchmarks.table.results import (
    VLLM,
    Body,
    cells,
    fp8_errors,
    gain_of,
    graphed,
    measured_on_cpu,
    median,
    over_vllm,
    ratio,
    read_floors,
    theirs,
    vllm_best,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "speed_h100.json"
OTHERS = (ROOT / "benchmarks" / "results" / "speed_h200.json",)
"""The results of the same benchmark on other GPUs; files that do not exist are left out."""
PATHS = ROOT / "benchmarks" / "results" / "paths_speed_h200.json"
"""The results of ``benchmarks/paths_speed.py``: encoders that encode an image and its tiles."""
VIEWS = {"image": "whole", "tiles": "tiles"}
HEAD = """# Results

`python -m benchmarks` measures, and `python -m benchmarks.pages` writes this page.
[docs/speed.md](../docs/speed.md) says what is fast and why, [NOTES.md](NOTES.md) what was tried."""
STAGES = (("torch", "cold"), ("auto", "cold"), ("auto", "warm"), ("auto", "saved"), ("fp8", "cold"))


def read_results(path: Path = RESULTS) -> dict[str, Any] | None:
    """Return the results in a JSON file; None if there is no file."""
    return dict(json.loads(path.read_text())) if path.is_file() else None


def page(body: Body) -> str:
    """Return the text of ``benchmarks/RESULTS.md``."""
    others = [other for other in map(read_results, OTHERS) if other]
    parts = [
        HEAD,
        "## Beside transformers and vLLM",
        sentence(body),
        behind(body),
        comparison(body),
        picture_link(),
        "## transformers with flash-attention 2",
        two_attentions(body),
        "## Where the time goes",
        forms(body),
        "## Sizes drawn at random",
        drawn(body),
        "## Other towers",
        beside(body, *others),
        "## Capture and memory",
        captures(body),
    ]
    paths = read_results(PATHS)
    parts += ["## Towers with two inputs", several_inputs(paths)] if paths else []
    for other in others:
        parts += [f"## On one {other['about']['gpu']}", forms(other)]
    return "\n\n".join(parts) + "\n"


def sentence(body: Body) -> str:
    """Return the sentences of ``benchmarks/RESULTS.md`` that explain the figures of the tables."""
    about, vllm = body["about"], json.loads(VLLM.read_text())["about"]
    flash = about["extras"].get("flash-attn-4")
    extra = f"flash-attn-4 {flash}" if flash else "without flash-attn-4"
    driver = f", driver {about['driver']}" if about.get("driver") else ""
    power = f", {about['power_limit_watts']:.0f} W" if about.get("power_limit_watts") else ""
    rows = [row for tower in body["towers"] for row in tower["workloads"]]
    runs = sorted({figure["runs"] for row in rows for figure in row["graphed_ms"].values()})
    calls = f"{runs[0]} to {runs[-1]} calls" if len(runs) > 1 else f"{runs[0]} calls"
    return (
        f"Milliseconds per call on one {about['gpu']}{driver}{power}, {about['dtype']}, torch "
        f"{about['torch']}, {extra}: medians of {calls}, padding and copies included, "
        f"inputs on the GPU, towers of true size with random weights. transformers "
        f"{about['transformers']} ran in the same process, in turn, five times where a call has "
        "more than 3,500 tokens, with the faster of sdpa and flash-attention 2 per workload. "
        f"{vllm['engine']} {vllm['version']}, its newest release for "
        f"torch {vllm['torch']}, ran on the same GPU before, in a process of its own: the best of "
        "two sets of graphs and its eager run (`python -m benchmarks.engines.vllm_towers`). The "
        "floor is what the peak rates of this kind of GPU allow (`python -m "
        "benchmarks.speed.floors`). "
        "Errors are relative L2 distances to float32, random weights, the larger of photographs "
        "and noise (`python -m benchmarks.fp8`), on an H200 or, where marked, on a CPU, which "
        "emulates fp8."
    )


def behind(body: Body) -> str:
    """Return the sentences of ``benchmarks/RESULTS.md`` that say where vLLM is faster."""
    towers = [tower for tower in body["towers"] if tower["tower"] in vllm_best()]
    said = []
    for kernels, words in (("torch", "torch alone"), ("auto", "the `flash` extra")):
        gains = over_vllm(towers, kernels)
        lost = [name for name, gain in gains.items() if gain < 1]
        which = f" ({', '.join(lost)})" if lost else ""
        said.append(f"in {len(lost)} of {len(gains)} with {words}{which}")
    return (
        "The columns in italics are vLLM's milliseconds over ours. Below 1, vLLM is faster: "
        f"{', '.join(said)}."
    )


def comparison(body: Body) -> str:
    """Return the table of milliseconds of our CUDA graphs, of transformers and of vLLM."""
    best, floors = vllm_best(), read_floors()
    version = json.loads(VLLM.read_text())["about"]["version"]
    header = (
        "tower",
        "workload",
        "transformers",
        "torch alone",
        "`flash` extra",
        f"vLLM {version}",
        "*over torch alone*",
        "*over `flash` extra*",
        "floor",
        "`flash` extra in fp8",
        "error of bf16, of fp8",
    )
    rows, errors, emulated = [], fp8_errors(), measured_on_cpu()
    for tower, row in table_rows(body):
        vllm = best[tower["tower"]].get(row["workload"])
        forms = (theirs(row), graphed(row, "torch"), graphed(row), vllm)
        rows.append(
            [
                tower["tower"],
                row["workload"],
                *least_in_bold(forms),
                times(ratio(vllm, graphed(row, "torch"))),
                times(ratio(vllm, graphed(row))),
                number(floors.get(tower["tower"], {}).get(row["workload"])),
                number(graphed(row, "fp8")),
                (", ".join(f"{error:.3f}" for error in errors.get(tower["tower"], ())) or "-")
                + " (CPU)" * (tower["tower"] in emulated),
            ]
        )
    return markdown(header, rows)


def two_attentions(body: Body) -> str:
    """Return the table of transformers' tower with sdpa and flash-attention 2."""
    header = ("tower", "workload", "sdpa", "flash-attention 2", "`flash` extra")
    rows = [
        [
            tower["tower"],
            row["workload"],
            number(median(row, "hf_ms")),
            number(median(row, "hf_flash_ms")).replace("-", "not measured"),
            number(graphed(row)),
        ]
        for tower, row in table_rows(body)
    ]
    return (
        "With sdpa, transformers attends to each segment by itself, in a loop of Python. "
        "Qwen2.5-VL's windows are such segments: 128 of them at 8x448, in all blocks but four, "
        "are why it is slow there. With flash-attention 2 all windows are one call. Its kernels "
        "are those that come with torch, because the package flash-attn has no wheel for this "
        "torch; `--transformers sdpa flash_attention_2` takes the package where it is installed."
        "\n\n"
        f"{markdown(header, rows)}"
    )


def forms(body: Body) -> str:
    """Return the table of our towers' variants: graphs of the reference encoder, graphs of its
    accelerated form with their spread, graphs captured by hand, and the accelerated form eagerly.
    """
    header = (
        "tower",
        "workload",
        "transformers",
        "reference graph",
        "torch alone",
        "`flash` extra",
        "least to most",
        "bare replay",
        "accelerated, no graph",
        "attention kernel",
    )
    rows = [
        [
            tower["tower"],
            row["workload"],
            number(theirs(row)),
            number(median(row, "reference_graph_ms")),
            number(graphed(row, "torch")),
            number(graphed(row)),
            spread_of(row),
            number(median(row, "bare_ms")),
            number(median(row, "accelerated_ms")),
            kernels_of(row),
        ]
        for tower, row in table_rows(body)
    ]
    return markdown(header, rows)


def table_rows(body: Body) -> Iterator[tuple[Body, Body]]:
    """Yield (tower, workload) for every workload of the towers that were also measured in vLLM."""
    best = vllm_best()
    for tower in body["towers"]:
        if tower["tower"] in best:
            for row in cells(tower):
                yield tower, row


def drawn(body: Body) -> str:
    """Return the table of the random workloads."""
    seeds = sorted({str(tower["about"]["seed"]) for tower in body["towers"]})
    header = ("tower", "workload", "tokens", "reference graph", "`flash` extra", "gain")
    rows = [
        [
            tower["tower"],
            row["workload"],
            str(row["tokens"]),
            number(median(row, "reference_graph_ms")),
            number(graphed(row)),
            times(gain_of(row)),
        ]
        for tower in body["towers"]
        for row in cells(tower, drawn=True)
    ]
    return f"Seed {', '.join(seeds)}.\n\n{markdown(header, rows)}"


def beside(*bodies: Body) -> str:
    """Return the table of the towers that were not measured in vLLM: CUDA graphs of our reference
    encoder and of its accelerated form."""
    best = vllm_best()
    header = ("tower", "workload", "GPU", "reference graph", "torch alone", "`flash` extra", "gain")
    rows = [
        [
            tower["tower"],
            row["workload"],
            tower["about"]["gpu"],
            number(median(row, "reference_graph_ms")),
            number(graphed(row, "torch")),
            number(graphed(row)),
            times(gain_of(row)),
        ]
        for body in bodies
        for tower in body["towers"]
        if tower["tower"] not in best
        for row in cells(tower)
    ]
    return markdown(header, rows)


def several_inputs(body: Body) -> str:
    """Return the table of encoders that encode an image and its tiles, and join the features."""
    about = body["about"]
    flash = about["extras"].get("flash-attn-4")
    header = (
        "tower",
        "workload",
        "views",
        "transformers",
        "reference graph",
        "accelerated, no graph",
        "graph",
        "floor",
        "gain",
    )
    forms = ("transformers", "reference_graph", "accelerated", "graph", "floor")
    rows = [
        [
            row["tower"],
            row["workload"],
            " + ".join(f"{count} {VIEWS[name]}" for name, count in row["views"].items()),
            *(number(row[f"{form}_ms"]) for form in forms),
            times(row["graph_is_faster_by"]["reference_graph"]),
        ]
        for row in body["rows"]
    ]
    return (
        f"Another run: transformers {about['transformers']}, "
        f"{f'flash-attn-4 {flash}' if flash else 'torch alone'}, medians of {about['runs']}. "
        "transformers encodes the views and does not join them per image. The floor is a bare "
        "replay of each path. The gain is that of the graph over the reference graph.\n\n"
        f"{markdown(header, rows)}"
    )


def captures(body: Body) -> str:
    """Return the table of the seconds and MiB that capturing the CUDA graphs takes, per tower."""
    header = (
        "tower",
        "budgets",
        "torch alone, first, s",
        "`flash` extra, first, s",
        "again, s",
        "from a saved table, s",
        "`flash` extra in fp8, first, s",
        "pool",
        "arena",
        "derived weights",
        "tower",
    )
    rows = []
    for tower in body["towers"]:
        taken = tower["captures"]
        auto = taken.get("auto") or next(iter(taken.values()))
        seconds = [taken.get(name, {}).get("capture_seconds", {}).get(at) for name, at in STAGES]
        memory = (auto["pool_mib"], auto["arena_mib"], auto["derived_mib"], tower["tower_mib"])
        rows.append(
            [
                tower["tower"],
                str(auto["budgets"]),
                *("-" if value is None else f"{value:.1f}" for value in seconds),
                *(f"{value:,.0f}" for value in memory),
            ]
        )
    return f"Memory is in MiB.\n\n{markdown(header, rows)}"


def spread_of(row: Body) -> str:
    """Return the smallest and the largest milliseconds of the runs, as text."""
    figures = row["graphed_ms"].get("auto")
    return f"{number(figures['min'])} to {number(figures['max'])}" if figures else "-"


def kernels_of(row: Body) -> str:
    """Return the attention kernels of the graphs that a call replayed, as text."""
    steps = row["paths"].get("auto", [])
    return ", ".join(dict.fromkeys(step["kernel"] for step in steps)) or "-"


def number(value: float | None) -> str:
    """Return milliseconds as text with three significant digits; a dash if not measured."""
    if value is None:
        return "-"
    return f"{value:.{max(0, 2 - (value >= 10) - (value >= 100))}f}"


def times(gain: float | None) -> str:
    """Return a speedup as text with two decimals; a dash if a time was not measured."""
    return "-" if gain is None else f"{gain:.2f}"


def least_in_bold(milliseconds: Sequence[float | None]) -> list[str]:
    """Return the table cells of some milliseconds, of which the smallest is bold."""
    least = min((value for value in milliseconds if value is not None), default=None)
    cells = [number(value) for value in milliseconds]
    return [
        f"**{cell}**" if value is not None and value == least else cell
        for value, cell in zip(milliseconds, cells, strict=True)
    ]


def main() -> None:
    """Print ``benchmarks/RESULTS.md``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.parse_args()
    body = read_results()
    if body is None:
        parser.error(f"{RESULTS}: there is no such file; `python -m benchmarks` measures")
    print(page(body))


if __name__ == "__main__":
    main()
