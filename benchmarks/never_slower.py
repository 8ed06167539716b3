"""The choice between graph replay and eager run, compared with always one of them, for 1,000 sizes.

    python -m benchmarks.never_slower --json benchmarks/results/never_slower_h200.json
    python -m benchmarks.never_slower --precision fp8 --json ...    (all with fp8 products)

The cases "single" are one image for every distinct token count among the 1,000 image sizes in
``benchmarks/traffic/sizes.py`` (for InternViT, every number of tiles). The cases "batch of 8" are
the 1,000 sizes in 125 batches; there, images over one megapixel are scaled down to one, because
attention over larger ones would take half a second in any case. For each case these run in turn,
at least nine times: the accelerated encoder without graphs, twice (``eager_ms``, ``again_ms``;
their difference is noise), ``GraphedEncoder``, which chooses between replay and eager run
(``chosen_ms``), and replay of every image that fits a graph (``replay_ms``). So the choice is
compared with ``encoder.accelerated()``, not with the slower reference encoder.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.graphs import executor_of, forget_plans, replay_what_fits
from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.towers import TOWERS, Tower
from benchmarks.traffic.sizes import fixed_sizes
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import PartialOutput, Precision
from encoders.inputs.sizes import best_tiling, smart_resize
from graphwrap import GraphedEncoder
from graphwrap.packing import Schedule
from graphwrap.replay import Cache
from tests.oracles import Grids
from vitgraph.timing import medians, random_pixels

BATCH_PIXELS = 1024 * 1024


def list_grids(tower: Tower, most: int | None = None) -> list[list[int]]:
    """Return the patch grid of each of the 1,000 sizes, resized as the tower's repo configures it.

    ``most`` is the most pixels per image; None takes the limit of the repo.
    """
    if tower.family.startswith("intern"):
        tilings = [best_tiling(*size, 1, 12, 448) for _, size in fixed_sizes()]
        counts = [columns * rows for columns, rows in tilings]
        return [[count + (count > 1), 32, 32] for count in counts]  # several tiles get a thumbnail
    low, largest = (65_536, 16_777_216) if tower.patch == 16 else (3_136, 12_845_056)
    pixels = low, most or largest
    grids = []
    for _, (width, height) in fixed_sizes():
        high, wide = smart_resize(height, width, 2 * tower.patch, *pixels)
        grids.append([1, high // tower.patch, wide // tower.patch])
    return grids


def singles(tower: Tower, encoder: VisionEncoder) -> list[Grids]:
    """Return one grid for every distinct token count up to the largest token budget."""
    grids = list_grids(tower)
    tokens = [spec.output_tokens for spec in encoder.item_specs(grids)]
    by_tokens = dict(zip(tokens, grids, strict=True))
    return [[by_tokens[count]] for count in sorted(by_tokens) if count <= encoder.budget_range[1]]


def batches(tower: Tower) -> list[Grids]:
    """Return the 1,000 sizes, shuffled, as batches of eight grids of at most one megapixel."""
    grids = list_grids(tower, BATCH_PIXELS)
    random.Random(0).shuffle(grids)
    return [grids[at : at + 8] for at in range(0, len(grids), 8)]


def run(
    tower: Tower, kind: str, runs: int, precision: Precision
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure every case of one tower.

    ``kind`` is "single" or "batch of 8".

    Returns:
        The measured times by which ``GraphedEncoder`` chooses, and a row per case.
    """
    encoder = tower.build()
    graphed = GraphedEncoder(encoder, precision=precision, table=None).capture(progress=False)
    forced, fast = forced_replay(graphed), encoder.accelerated(precision=precision)
    rows = []
    for grids in singles(tower, encoder) if kind == "single" else batches(tower):
        pixels = random_pixels(encoder, grids)
        calls = {
            "eager_ms": lambda: fast(pixels, grids),  # noqa: B023
            "chosen_ms": lambda: graphed(pixels, grids),  # noqa: B023
            "again_ms": lambda: fast(pixels, grids),  # noqa: B023
            "replay_ms": lambda: forced(pixels, grids),  # noqa: B023
        }
        steps = executor_of(graphed).schedule(grids).steps
        began = time.perf_counter()
        rows.append(
            {
                "tower": tower.name,
                "kind": kind,
                "tokens": sum(spec.output_tokens for spec in encoder.item_specs(grids)),
                "path": [step.budget.name if step.budget else "eager" for step in steps],
                **medians(calls, runs),
                "decision_us": decision_microseconds(graphed, grids),
                "seconds": time.perf_counter() - began,
            }
        )
    costs = executor_of(graphed).graphs.packer.costs
    replay_ms = {budget.name: ms for budget, ms in costs.replays.items()}
    return {"eager_ms": list(costs.eager_runs), "replay_ms": replay_ms}, rows


def forced_replay(graphed: GraphedEncoder) -> Callable[[Tensor, Grids], PartialOutput]:
    """Return a function that calls ``graphed`` but replays every image that fits a graph."""
    executor = executor_of(graphed)
    own = Cache[Schedule](executor.schedules.max_size), replay_what_fits(executor)

    def call(pixels: Tensor, grids: Grids) -> PartialOutput:
        kept = executor.schedules, executor.graphs.packer
        executor.schedules, executor.graphs.packer = own
        try:
            return graphed(pixels, grids)
        finally:
            executor.schedules, executor.graphs.packer = kept

    return call


def decision_microseconds(graphed: GraphedEncoder, grids: Grids) -> dict[str, float]:
    """Return the CPU microseconds to choose graphs for grids, if they are "new" and if "seen"."""
    executor = executor_of(graphed)
    new, seen = [], []
    for _ in range(5):
        forget_plans(executor)
        began = time.perf_counter()
        executor.schedule(grids)
        middle = time.perf_counter()
        executor.schedule(grids)
        new.append((middle - began) * 1e6)
        seen.append((time.perf_counter() - middle) * 1e6)
    return {"new": statistics.median(new), "seen": statistics.median(seen)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the noise, and statistics of the chosen path against the eager run, over all cases."""
    band = [abs(row["again_ms"] / row["eager_ms"] - 1) for row in rows]
    noise = sorted(band)[int(0.95 * (len(band) - 1))]
    ratios = [
        row["chosen_ms"] / statistics.mean((row["eager_ms"], row["again_ms"])) for row in rows
    ]
    slower = {
        row["tokens"]: round(row["chosen_ms"] / max(row["eager_ms"], row["again_ms"]), 3)
        for row in rows
        if row["chosen_ms"] > 1.02 * max(row["eager_ms"], row["again_ms"])
    }
    best = sum(min(row["eager_ms"], row["again_ms"], row["replay_ms"]) for row in rows)
    clear = [row for row in rows if row["replay_ms"] < 0.9 * min(row["eager_ms"], row["again_ms"])]
    missed = [row for row in clear if "eager" in row["path"]]
    return {
        "cases": len(rows),
        "noise_band": noise,
        "within": sum(ratio <= 1.02 + noise for ratio in ratios) / len(ratios),
        "worst": max(ratios),
        "slower_than_both_eager_runs": slower,
        "chosen_over_best": sum(row["chosen_ms"] for row in rows) / best,
        "replay_clearly_faster": len(clear),
        "of_those_not_replayed": len(missed),
        "not_replayed_tokens": [row["tokens"] for row in missed],
        "eager_over_best": sum(row["eager_ms"] for row in rows) / best,
        "replay_over_best": sum(row["replay_ms"] for row in rows) / best,
        "decision_new_us": statistics.median(row["decision_us"]["new"] for row in rows),
        "decision_seen_us": statistics.median(row["decision_us"]["seen"] for row in rows),
    }


PLAN = [
    ("InternViT-300M", "single"),
    ("Qwen3.5-0.8B", "batch of 8"),
    ("Qwen2.5-VL-7B", "single"),
    ("Qwen3-VL-8B", "single"),
]


def kept(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the entries of the file of ``--json`` that this run does not measure again."""
    if not options.json.exists():
        return []
    groups = json.loads(options.json.read_text())["groups"]
    return [
        group
        for group in groups
        if group["tower"] not in options.towers
        or group.get("precision", "bf16") != options.precision
    ]


def main() -> None:
    """Measure all cases; print the summaries, and write the cases if ``--json`` is given."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--towers", nargs="*", default=[tower for tower, _ in PLAN])
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    options = parser.parse_args()
    began, groups = time.perf_counter(), kept(options) if options.json else []
    with torch.no_grad():
        for name, kind in PLAN:
            if name not in options.towers:
                continue
            now = about(options.runs)
            costs, rows = run(TOWERS[name], kind, options.runs, options.precision)
            spent = sum(row.pop("seconds") for row in rows)
            groups.append(
                {
                    "tower": name,
                    "kind": kind,
                    "precision": options.precision,
                    "about": now,
                    "seconds": spent,
                    "summary": summary(rows),
                    "prices": costs,
                    "cases": rows,
                }
            )
            print(
                name, kind, options.precision, f"{spent:.0f} s", groups[-1]["summary"], flush=True
            )
            if options.json:
                body = {"about": now, "groups": groups}
                write_results(options.json, body)
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
