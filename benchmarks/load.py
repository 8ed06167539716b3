"""Loading a tower to memory or straight to a GPU against reading its bytes, and the host's memory.

    python -m benchmarks.load cpu [--repeats 9] [--depth 32] [--json FILE]
    python -m benchmarks.load gpu --json benchmarks/results/load_gpu_h200.json

The floor is ``safetensors.torch.load_file`` of just the tower's tensors; on the CPU each of them is
cloned, since nothing of a mapping has been read. All files are in the page cache.

``cpu`` takes turns in one process, torch on one thread, for five layouts. We read with up to four
threads where there are cores. A ratio is our median over the floor's, below 1 where we are faster.
A/A is the floor's median over that of a second, interleaved series of it. Memory is that of a fresh
process, from after the imports to the peak, RssAnon + RssFile, as a multiple of the tower.

``gpu`` loads from a folder, from a hub on loopback (nothing kept yet) and from the cache. Each load
is a fresh process that has a CUDA context; memory is its growth from there to the peak, RssAnon and
pinned memory together.
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
MIB = 1 << 20

CLIENT = """
import json, sys, threading, time
import huggingface_hub, torch, weights
from safetensors.torch import load_file
way, device, what, dtype = sys.argv[1:]
parts = ("RssAnon", "RssFile") if device == "cpu" else ("RssAnon",)
torch.zeros(1, device=device).item()

def host():
    lines = open("/proc/self/status").read().splitlines()
    resident = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(parts))
    pinned = {} if device == "cpu" else torch.cuda.host_memory_stats()
    return resident + pinned.get("allocated_bytes.current", 0)

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], host())

start = host()
peak, done = [start], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
began = time.perf_counter()
if way == "load_file":
    loaded = load_file(what, device=device)
else:
    loaded = weights.load_encoder(what, device=device, dtype=dtype, progress=False)
if device == "cuda":
    torch.cuda.synchronize()
seconds = time.perf_counter() - began
done.set()
thread.join()
print(json.dumps([seconds, max(peak[0], host()) - start]))
"""
"""Loads a tower, and prints its seconds and the growth of the process in bytes."""


def client(
    way: str, device: str, what: str | Path, dtype: str = "auto", **shell: str
) -> tuple[float, int]:
    """Seconds and bytes of growth of one fresh process."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"} | shell
    command = [sys.executable, "-c", CLIENT, way, device, str(what), dtype]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds, grown = json.loads(done.stdout)
    return seconds, grown


# --- to memory ------------------------------------------------------------------------------------


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
    nbytes = inspect_checkpoint(checkpoint).bytes
    return {
        "bytes": nbytes,
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "seconds_range": {n: [round(min(v), 4), round(max(v), 4)] for n, v in times.items()},
        "ratio": round(medians["ours"] / medians["floor"], 3),
        "a_a": round(medians["floor again"] / medians["floor"], 3),
        "memory_growth": round(client("ours", "cpu", checkpoint)[1] / nbytes, 3),
    }


def measure_cpu(repeats: int, depth: int) -> dict[str, Any]:
    """Print a line per family, and return the figures."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            one = figures[family] = compare(Path(folder), family, depth, repeats)
        seconds = one["seconds"]
        print(
            f"{family:16} {one['bytes'] / 1e9:5.2f} GB  ours {seconds['ours']:6.3f} s  floor "
            f"{seconds['floor']:6.3f} s  ratio {one['ratio']:5.2f}  "
            f"A/A {one['a_a']:4.2f}  memory {one['memory_growth']:4.2f}x"
        )
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": 1,
        "repeats": repeats,
        "families": figures,
    }


# --- to a GPU -------------------------------------------------------------------------------------


def measure_gpu(repeats: int, depth: int) -> dict[str, Any]:
    """Print a line per place that a tower is loaded from, and return the figures."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))  # for the small hub of the tests
    from hub_server import HubServer

    cases: dict[str, list[tuple[float, int]]] = {}
    with tempfile.TemporaryDirectory() as folder, HubServer() as hub:
        made = write_seeded_checkpoint(
            Path(folder) / "made", "qwen3_vl", width=1152, depth=depth, shards=3
        )
        tower = extract_encoder(made, Path(folder) / "tower") / "model.safetensors"
        nbytes = inspect_checkpoint(made).bytes
        hub.push("owner/tower", made)
        for turn in range(repeats):
            home = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": f"{folder}/home{turn}"}
            home["HF_HUB_DISABLE_XET"] = "1"
            for name, row in {
                "folder": client("ours", "cuda", made),
                "folder, to float32": client("ours", "cuda", made, "float32"),
                "hub, first": client("ours", "cuda", "owner/tower", **home),
                "cache": client("ours", "cuda", "owner/tower", **home, HF_HUB_OFFLINE="1"),
                "load_file": client("load_file", "cuda", tower),
            }.items():
                cases.setdefault(name, []).append(row)
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}: a tower of {nbytes / MIB:.0f} MiB")
    rows: dict[str, Any] = {}
    for name, found in cases.items():
        seconds = round(statistics.median(seconds for seconds, _ in found), 3)
        grown = round(max(grown for _, grown in found) / MIB, 1)
        rows[name] = {"seconds": seconds, "host_growth_mib": grown}
        print(f"{name:20} {seconds:6.2f} s  host {grown:6.1f} MiB")
    about = {
        "gpu": gpu,
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "repeats": repeats,
        "tower_mib": round(nbytes / MIB, 1),
    }
    return {"about": about, "loads": rows}


def main() -> None:
    """Measure and print; write the figures as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", choices=("cpu", "gpu"))
    parser.add_argument("--repeats", type=int, help="by default 9, on a GPU 5")
    parser.add_argument("--depth", type=int, help="blocks; by default 32 of width 1280, 27 of 1152")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.place == "cpu":
        record = measure_cpu(options.repeats or 9, options.depth or 32)
    else:
        record = measure_gpu(options.repeats or 5, options.depth or 27)
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
