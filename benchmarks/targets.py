"""What the figures of ``benchmarks/speed.py`` have to reach, and whether they do.

Milliseconds are those of an H200 with the ``flash`` extra. Two targets are measured elsewhere:
never slower than eager by ``benchmarks/never_slower.py``, and the H100's table by another run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

RESULTS = Path(__file__).parent / "results"
VLLM = RESULTS / "vllm_0.26_h200.json"
FLOORS = RESULTS / "floors_h200.json"
Body: TypeAlias = Mapping[str, Any]

PIXELS = ("1x224", "1x448", "1x1024", "8x448", "32x448", "mix8")
TILES = ("1 tile", "4 tiles", "13 tiles", "64 tiles")
MILLISECONDS = {
    "Qwen3-VL-8B": dict(zip(PIXELS, (1.65, 2.6, 13.2, 14.2, 55, 40.5), strict=True)),
    "Qwen2.5-VL-7B": dict(zip(PIXELS, (1.8, 3.35, 16.2, 22.5, 88, 56), strict=True)),
    "Qwen2-VL-7B": dict(zip(PIXELS, (1.9, 3.6, 25.5, 24.8, 96, 74), strict=True)),
    "InternViT-300M": dict(zip(TILES, (2.2, 6.4, 21.0, 101), strict=True)),
}
"""Milliseconds of a call at most."""
FURTHER = {
    "Qwen3-VL-8B": dict(zip(PIXELS, (1.25, 2.2, 11.5, 12.5, 48, 34), strict=True)),
    "Qwen2.5-VL-7B": dict(zip(PIXELS, (1.4, 2.8, 14.5, 20, 79, 49), strict=True)),
    "Qwen2-VL-7B": dict(zip(PIXELS, (1.4, 3.0, 22, 22, 86, 63), strict=True)),
    "InternViT-300M": dict(zip(TILES, (1.7, 5.6, 18.5, 92), strict=True)),
}
"""What to go on towards once the first is met everywhere."""
OVER_VLLM, OVER_VLLM_MEAN = 1.12, 1.45
TORCH_AHEAD, TORCH_WITHIN = 19, 1.15
OVER_TRANSFORMERS = {"1x224": 7.5, "1 tile": 2.8, "8x448": 1.9}
OVER_TRANSFORMERS_WINDOWS = 6.0
"""At 8x448 for Qwen2.5-VL, whose windows transformers runs one by one."""
CALL_MS = 0.12
"""A call over the bare replay of the same exact shape, at 1x224 and 1x448."""
RANDOM_GAIN = 0.85
BESIDE = {
    "Qwen3-VL-2B": {"1x448": 1.3, "8x448": 1.3},
    "Qwen2.5-VL-72B": {"1x448": 1.3, "8x448": 1.3},
    "Qwen3.5-0.8B": {"1x448": 1.3, "8x448": 1.3},
    "InternViT-6B": {"1 tile": 1.1, "13 tiles": 1.05},
}
"""Gain over our own reference graph."""
CAPTURE_SECONDS = {
    ("torch", "cold"): 15,
    ("auto", "cold"): 40,
    ("auto", "warm"): 15,
    ("auto", "saved"): 10,
}
LARGE_TOWER, LARGE_SECONDS = "InternViT-6B", 60
DERIVED = 0.75
EAGER = {"32x448": 1.03, "64 tiles": 1.03}
"""The accelerated encoder without graphs over its graphs."""


class Line(NamedTuple):
    """One target."""

    name: str
    wanted: str
    got: str
    passed: bool


def report(body: Body) -> str:
    """Every target that the results say something about, a line each, and how many pass."""
    lines = list(judge(body))
    passed = sum(line.passed for line in lines)
    width = max((len(line.name) for line in lines), default=0)
    text = [
        f"{'pass' if line.passed else 'FAIL'}  {line.name:<{width}}  {line.got} ({line.wanted})"
        for line in lines
    ]
    extra = (body["about"].get("extras") or {}).get("flash-attn-4")
    text.append(f"{passed} of {len(lines)} targets pass; flash-attn-4: {extra or 'not installed'}")
    if not on_h200(body):
        text.append("milliseconds and vLLM are not compared: they are of an H200")
    return "\n".join(text)


def judge(body: Body) -> Iterator[Line]:
    """The targets in the order of the list above."""
    table = [tower for tower in body["towers"] if tower["tower"] in MILLISECONDS]
    if on_h200(body):
        for tower in table:
            yield from judge_milliseconds(tower)
        yield from judge_vllm(table)
    for tower in table:
        yield from judge_transformers(tower)
        yield from judge_call(tower)
        yield from judge_random(tower)
        yield from judge_eager(tower)
    for tower in body["towers"]:
        yield from judge_beside(tower)
        yield from judge_capture(tower)


def on_h200(body: Body) -> bool:
    """Whether the figures are of the GPU that vLLM and the floors were measured on."""
    return "H200" in str(body["about"].get("gpu"))


def cells(tower: Body, drawn: bool = False) -> list[Body]:
    """The workloads of the table, or those drawn at random."""
    return [row for row in tower["workloads"] if row["drawn"] == drawn]


def graphed(row: Body, kernels: str = "auto") -> float | None:
    """Median milliseconds of a call of the graphs, None if they were not measured."""
    return row["graphed_ms"].get(kernels, {}).get("median")


def median(row: Body, figure: str) -> float | None:
    """The median of another figure, None if it was not measured."""
    return row.get(figure, {}).get("median")


def ratio(above: float | None, below: float | None) -> float | None:
    """``above / below``, None where one was not measured."""
    return above / below if above and below else None


def judge_milliseconds(tower: Body) -> Iterator[Line]:
    """Each cell of the table."""
    for row in cells(tower):
        limit, ms = MILLISECONDS[tower["tower"]].get(row["workload"]), graphed(row)
        if limit is not None and ms is not None:
            further = FURTHER[tower["tower"]][row["workload"]]
            name = f"{tower['tower']} {row['workload']}"
            yield Line(name, f"at most {limit}, further {further}", f"{ms:.3f} ms", ms <= limit)


def read_floors(path: Path = FLOORS) -> Mapping[str, Mapping[str, float]]:
    """Milliseconds that the GPU's peak rates allow, by tower and workload."""
    return {tower["tower"]: tower["ms"] for tower in json.loads(path.read_text())["towers"]}


def vllm_best(path: Path = VLLM) -> dict[str, dict[str, float]]:
    """vLLM's best milliseconds by tower and workload, over its ladders and its eager run."""
    towers = json.loads(path.read_text())["towers"]
    return {
        tower["tower"]: {
            workload: min(ladder[workload] for ladder in tower["ms"].values())
            for workload in tower["ms"]["eager"]
        }
        for tower in towers
    }


def over_vllm(towers: Sequence[Body], kernels: str) -> dict[str, float]:
    """How many times as fast as vLLM's best each cell is, by tower and workload."""
    best = vllm_best()
    found = {
        f"{tower['tower']} {row['workload']}": ratio(
            best[tower["tower"]].get(row["workload"]), graphed(row, kernels)
        )
        for tower in towers
        for row in cells(tower)
    }
    return {name: gain for name, gain in found.items() if gain is not None}


def judge_vllm(towers: Sequence[Body]) -> Iterator[Line]:
    """Each cell and the geometric mean with the extra; how many cells with torch alone."""
    gains = over_vllm(towers, "auto")
    for name, gain in gains.items():
        got = f"{gain:.2f}x vLLM's best"
        yield Line(name, f"at least {OVER_VLLM}x", got, gain >= OVER_VLLM)
    if gains:
        mean = math.exp(sum(map(math.log, gains.values())) / len(gains))
        name = f"geometric mean of {len(gains)} cells"
        wanted = f"at least {OVER_VLLM_MEAN}x"
        yield Line(name, wanted, f"{mean:.2f}x vLLM's best", mean >= OVER_VLLM_MEAN)
    alone = over_vllm(towers, "torch")
    if alone:
        ahead = sum(gain > 1 for gain in alone.values())
        worst = min(alone, key=alone.__getitem__)
        allowed = sum(map(len, MILLISECONDS.values())) - TORCH_AHEAD
        passed = len(alone) - ahead <= allowed and alone[worst] >= 1 / TORCH_WITHIN
        got = f"ahead of vLLM in {ahead} of {len(alone)} cells, worst {worst} {alone[worst]:.2f}x"
        yield Line("torch alone", f"all but {allowed}, within 15 % there", got, passed)


def judge_transformers(tower: Body) -> Iterator[Line]:
    """The gain over transformers eager in the same process."""
    for row in cells(tower):
        limit = OVER_TRANSFORMERS.get(row["workload"])
        if row["workload"] == "8x448" and tower["tower"].startswith("Qwen2.5"):
            limit = OVER_TRANSFORMERS_WINDOWS
        gain = ratio(median(row, "hf_ms"), graphed(row))
        if limit is not None and gain is not None:
            name = f"{tower['tower']} {row['workload']}"
            yield Line(name, f"at least {limit}x", f"{gain:.2f}x transformers", gain >= limit)


def judge_call(tower: Body) -> Iterator[Line]:
    """What a call costs over the bare replay."""
    for row in cells(tower):
        ms, bare = graphed(row), median(row, "bare_ms")
        if row["workload"] in ("1x224", "1x448") and ms and bare:
            name, got = f"{tower['tower']} {row['workload']}", f"{ms - bare:.3f} ms over bare"
            yield Line(name, f"at most {CALL_MS} ms", got, ms - bare <= CALL_MS)


def judge_random(tower: Body) -> Iterator[Line]:
    """The gain over our reference graph, beside that of the table cell nearest in tokens."""
    fixed = [row for row in cells(tower) if gain_of(row)]
    for row in cells(tower, drawn=True):
        gain = gain_of(row)
        if not fixed or gain is None:
            continue
        near = min(fixed, key=lambda cell: abs(cell["tokens"] - row["tokens"]))
        beside = gain_of(near)
        assert beside is not None
        got = f"gain {gain:.2f}x beside {beside:.2f}x at {near['workload']}"
        name = f"{tower['tower']} {row['workload']}, {row['tokens']} tokens"
        yield Line(name, f"at least {RANDOM_GAIN} of it", got, gain >= RANDOM_GAIN * beside)


def gain_of(row: Body) -> float | None:
    """How many times as fast as our reference graph."""
    return ratio(median(row, "reference_graph_ms"), graphed(row))


def judge_eager(tower: Body) -> Iterator[Line]:
    """The accelerated encoder without graphs, where launches cost nothing."""
    for row in cells(tower):
        limit = EAGER.get(row["workload"])
        over = ratio(median(row, "accelerated_ms"), graphed(row))
        if limit is not None and over is not None:
            got = f"accelerated eagerly {over:.3f}x its graphs"
            name = f"{tower['tower']} {row['workload']}"
            yield Line(name, f"at most {limit}x", got, over <= limit)


def judge_beside(tower: Body) -> Iterator[Line]:
    """Towers beside the table: the gain over our reference graph."""
    for row in cells(tower):
        limit = BESIDE.get(tower["tower"], {}).get(row["workload"])
        gain = gain_of(row)
        if limit is not None and gain is not None:
            name = f"{tower['tower']} {row['workload']}"
            got = f"{gain:.2f}x our reference graph"
            yield Line(name, f"at least {limit}x", got, gain >= limit)


def judge_capture(tower: Body) -> Iterator[Line]:
    """Seconds of each capture, and derived weights."""
    name, captures = tower["tower"], tower["captures"]
    if name not in MILLISECONDS and name != LARGE_TOWER:
        return
    for (kernels, stage), limit in CAPTURE_SECONDS.items():
        seconds = captures.get(kernels, {}).get("capture_seconds", {}).get(stage)
        if seconds is not None:
            most = LARGE_SECONDS if name == LARGE_TOWER else limit
            got = f"{stage} capture {seconds:.1f} s"
            yield Line(f"{name} {kernels}", f"at most {most} s", got, seconds <= most)
    for kernels, capture in captures.items():
        share = capture["derived_mib"] / tower["tower_mib"]
        if kernels != "reference":
            got = f"derived weights {share:.2f} of the tower"
            yield Line(f"{name} {kernels}", f"at most {DERIVED}", got, share <= DERIVED)
