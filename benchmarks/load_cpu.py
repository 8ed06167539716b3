"""Loading a tower against reading its bytes: interleaved, torch on one thread, medians.

    python -m benchmarks.load_cpu [--repeats 9] [--depth 32] [--json FILE]

The floor is ``safetensors.torch.load_file`` of just the tower's tensors and a ``clone`` of each
(load_file alone returns a mapping, of which nothing has been read). We read with up to four threads
where there are cores. Ratios are our median over the
floor's, below 1 where we are faster; the goal is 1.1 and 0.3 s of fixed cost. A/A is the floor's
median over that of a second, interleaved series of it. All files are in the page cache. Memory is
that of a fresh process, from after the imports to the peak, RssAnon + RssFile, as a
multiple of the tower.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from benchmarks.towers import milliseconds  # noqa: E402
from vitgraph.seeded import write_seeded_checkpoint  # noqa: E402
from weights import extract_encoder, inspect_checkpoint, load_encoder  # noqa: E402

FAMILIES = ("intern_vit_300m", "intern_vit_hf", "qwen2_5_vl", "qwen2_5_omni", "qwen3_vl")

GROWTH = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
import huggingface_hub, torch
import weights

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssFile"))) * 1024

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], resident())
        time.sleep(0.001)

start = resident()
peak, done = [start], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
encoder = weights.load_encoder(sys.argv[2], progress=False)
done.set()
thread.join()
tower = sum(value.nbytes for value in encoder.state_dict().values())
print((max(peak[0], resident()) - start) / tower)
"""
"""Prints the growth of a fresh process, as a multiple of the tower."""


def compare(folder: Path, family: str, depth: int, repeats: int) -> dict[str, Any]:
    """Medians of one family, their ratio, and the memory of a fresh process."""
    checkpoint = write_seeded_checkpoint(folder / "whole", family, depth=depth, width=1280)
    tower = extract_encoder(checkpoint, folder / "tower") / "model.safetensors"

    def floor() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in load_file(tower).items()}

    runs = {"ours": lambda: load_encoder(checkpoint), "floor": floor, "floor again": floor}
    times = {
        name: [value / 1e3 for value in values]
        for name, values in milliseconds(runs, repeats).items()
    }
    medians = {name: statistics.median(values) for name, values in times.items()}
    command = [sys.executable, "-c", GROWTH, str(ROOT), str(checkpoint)]
    growth = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {
        "bytes": inspect_checkpoint(checkpoint).bytes,
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "seconds_range": {n: [round(min(v), 4), round(max(v), 4)] for n, v in times.items()},
        "ratio": round(medians["ours"] / medians["floor"], 3),
        "goal_met": medians["ours"] <= 1.1 * medians["floor"] + 0.3,
        "a_a": round(medians["floor again"] / medians["floor"], 3),
        "memory_growth": round(growth, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--depth", type=int, default=32, help="blocks of width 1280")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            one = compare(Path(folder), family, options.depth, options.repeats)
        figures[family] = one
        seconds = one["seconds"]
        print(
            f"{family:16} {one['bytes'] / 1e9:5.2f} GB  ours {seconds['ours']:6.3f} s  floor "
            f"{seconds['floor']:6.3f} s  ratio {one['ratio']:5.2f}  "
            f"A/A {one['a_a']:4.2f}  memory {one['memory_growth']:4.2f}x"
        )
    if options.json:
        record = {
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "cpu": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": 1,
            "repeats": options.repeats,
            "families": figures,
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
