"""Encoding against transformers' own towers (sdpa): same weights and inputs, one CPU thread,
medians.

    python -m benchmarks.encode_cpu --json benchmarks/results/encode_cpu.json  (in a clone)

True widths, depth 4, float32. Both sides run in turn, at least nine times; a ratio is our median
over theirs, below 1 where we are faster. A/A is our own median over that of a second, interleaved
series of ours: what the machine's noise does. Both prepare positions and segments in every call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402

from benchmarks.towers import interleaved  # noqa: E402
from tests.oracles import BY_NAME, Grids, build_pair, draw_pixels  # noqa: E402

PHOTOGRAPH: Grids = [[1, 26, 36]]
MIXED: Grids = [[1, 16, 16], [1, 26, 20], [2, 12, 12], [1, 30, 14]]
TILES: Grids = [[2, 32, 32]]
WORKLOADS = {"photograph": PHOTOGRAPH, "mixed items": MIXED}
FAMILIES: dict[str, dict[str, Any]] = {
    "intern_vit_300m": {"num_hidden_layers": 4},
    "intern_vit_6b": {"num_hidden_layers": 1},
    "qwen2_vl": {"depth": 4},
    "qwen2_5_vl": {"depth": 4, "fullatt_block_indexes": [3]},
    "qwen3_vl": {"depth": 4, "deepstack_visual_indexes": [0, 1, 2]},
    "qwen3_5": {"depth": 4},
}


def run(name: str, grids: Grids, runs: int) -> dict[str, float]:
    """Median milliseconds of ours and of the reference, their ratio, and A/A."""
    encoder, reference = build_pair(BY_NAME[name], FAMILIES[name])
    pixels, grid = draw_pixels(encoder, grids), torch.tensor(grids)
    tiled = BY_NAME[name].tiled

    def theirs() -> object:
        return BY_NAME[name].output(reference, pixels, grid) if tiled else reference(pixels, grid)

    def ours() -> object:
        return encoder(pixels, grid)

    calls: dict[str, Callable[[], object]] = {"ours": ours, "theirs": theirs, "again": ours}
    with torch.no_grad():
        median = interleaved(calls, runs)
    return {
        "ours_ms": median["ours"],
        "transformers_ms": median["theirs"],
        "ratio": median["ours"] / median["theirs"],
        "a_a": median["ours"] / median["again"],
    }


def main() -> None:
    """Print the table; write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(
        f"{'family':<16} {'workload':<12} {'ours ms':>9} {'theirs ms':>9} {'ratio':>6} {'A/A':>6}"
    )
    for name in options.families:
        workloads = {"2 tiles": TILES} if BY_NAME[name].tiled else WORKLOADS
        for workload, grids in workloads.items():
            row = run(name, grids, options.runs)
            rows.append({"family": name, "workload": workload, "grids": grids, **row})
            print(
                f"{name:<16} {workload:<12} {row['ours_ms']:>9.1f} {row['transformers_ms']:>9.1f} "
                f"{row['ratio']:>6.3f} {row['a_a']:>6.3f}",
                flush=True,
            )
    if options.json:
        about = {
            "cpu": platform.processor() or platform.machine(),
            "threads": 1,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "runs": options.runs,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
