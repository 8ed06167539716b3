"""Functions that read benchmark results: of ``python -m benchmarks``, of vLLM, and the floors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

RESULTS = Path(__file__).parents[1] / "results"
VLLM = RESULTS / "vllm_0.26_h100.json"
FLOORS = RESULTS / "floors_h100.json"
FP8 = (RESULTS / "fp8_errors_cpu.json", RESULTS / "fp8_h200.json")
FORMS_OF_FP8 = ("fp8", "rounded, kept")
"""The names of fp8 in results: measured on a GPU, and imitated on a CPU by rounding."""
Body: TypeAlias = Mapping[str, Any]


def cells(tower: Body, drawn: bool = False) -> list[Body]:
    """Return the rows of a tower's fixed workloads, or with ``drawn`` of its random workloads."""
    return [row for row in tower["workloads"] if row["drawn"] == drawn]


def graphed(row: Body, kernels: str = "auto") -> float | None:
    """Return the median milliseconds of a workload with CUDA graphs; None if not measured."""
    return row["graphed_ms"].get(kernels, {}).get("median")


def median(row: Body, figure: str) -> float | None:
    """Return the median of a workload's figure, such as "hf_ms"; None if not measured."""
    return row.get(figure, {}).get("median")


def theirs(row: Body) -> float | None:
    """Return the milliseconds of transformers' tower with its faster attention implementation."""
    kinds = (median(row, "hf_ms"), median(row, "hf_flash_ms"))
    return min((ms for ms in kinds if ms is not None), default=None)


def ratio(above: float | None, below: float | None) -> float | None:
    """Return ``above / below``; None if one of the two was not measured."""
    return above / below if above and below else None


def gain_of(row: Body) -> float | None:
    """Return how many times as fast graphs of the accelerated encoder are as the reference's."""
    return ratio(median(row, "reference_graph_ms"), graphed(row))


def read_floors(path: Path = FLOORS) -> Mapping[str, Mapping[str, float]]:
    """Return the least milliseconds that a GPU's peak rates allow, by tower and workload."""
    return {tower["tower"]: tower["ms"] for tower in json.loads(path.read_text())["towers"]}


def measured_on_cpu() -> set[str]:
    """Return the towers whose errors in fp8 were measured on a CPU, where torch emulates fp8."""
    cpu, gpu = (
        {tower["tower"] for tower in json.loads(file.read_text())["towers"] if tower["errors"]}
        for file in FP8
    )
    return cpu - gpu


def fp8_errors() -> dict[str, tuple[float, float]]:
    """Return the largest error of each tower in (bfloat16, fp8), without added outlier channels."""
    found = {}
    for tower in [tower for file in FP8 for tower in json.loads(file.read_text())["towers"]]:
        drawn = [row for row in tower["errors"] if row["weights"] == "drawn"]
        of = {
            name: [row["relative_l2"] for row in drawn if row["precision"] in names]
            for name, names in (("bf16", ("bf16",)), ("fp8", FORMS_OF_FP8))
        }
        if drawn:
            found[tower["tower"]] = (max(of["bf16"]), max(of["fp8"]))
    return found


def vllm_best(path: Path = VLLM) -> dict[str, dict[str, float]]:
    """Return vLLM's smallest milliseconds, of its eager run and several settings of its graphs.

    The keys are the names of towers, then of workloads.
    """
    towers = json.loads(path.read_text())["towers"]
    return {
        tower["tower"]: {
            workload: min(times[workload] for times in tower["ms"].values())
            for workload in tower["ms"]["eager"]
        }
        for tower in towers
    }


def over_vllm(towers: Sequence[Body], kernels: str) -> dict[str, float]:
    """Return vLLM's smallest time divided by the time of our graphs, by tower and workload."""
    best = vllm_best()
    found = {
        f"{tower['tower']} {row['workload']}": ratio(
            best[tower["tower"]].get(row["workload"]), graphed(row, kernels)
        )
        for tower in towers
        for row in cells(tower)
    }
    return {name: gain for name, gain in found.items() if gain is not None}
