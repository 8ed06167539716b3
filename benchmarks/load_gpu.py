"""Loading a tower straight to a GPU: seconds, and host memory on the way.

    python -m benchmarks.load_gpu --json benchmarks/results/load_gpu_h200.json

A checkpoint with random weights in the published layout, from a folder, from a hub on loopback
(nothing kept yet) and from the cache. Each load is a fresh process that has a CUDA context; memory
is its growth from there to the peak, RssAnon and pinned memory together. The floor is
``safetensors.torch.load_file(..., device="cuda")`` of the tower's tensors alone. Files are in the
page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(
    0, str(ROOT / "tests" / "support")
)  # for the small hub and the checkpoints of the tests

import torch  # noqa: E402

from hub_server import HubServer  # noqa: E402
from vitgraph.seeded import write_seeded_checkpoint  # noqa: E402
from weights import extract_encoder, inspect_checkpoint  # noqa: E402

MIB = 1 << 20
LIMIT_MIB = 256

CLIENT = """
import json, sys, threading, time
import huggingface_hub, torch, weights
from safetensors.torch import load_file
torch.zeros(1, device="cuda").item()

def host():
    lines = open("/proc/self/status").read().splitlines()
    anonymous = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    return anonymous + torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], host())

way, what, dtype = sys.argv[1:]
start = host()
peak, done = [start], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
began = time.perf_counter()
if way == "load_file":
    loaded = load_file(what, device="cuda")
else:
    loaded = weights.load_encoder(
        what, device="cuda", dtype=getattr(torch, dtype, None), progress=False
    )
torch.cuda.synchronize()
seconds = time.perf_counter() - began
done.set()
thread.join()
print(json.dumps([seconds, max(peak[0], host()) - start]))
"""


def client(way: str, what: str | Path, dtype: str = "stored", **shell: str) -> tuple[float, int]:
    """Seconds and bytes of growth of one fresh process."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"} | shell
    command = [sys.executable, "-c", CLIENT, way, str(what), dtype]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds, grown = json.loads(done.stdout)
    return seconds, grown


def main() -> None:
    """Print the table; write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--depth", type=int, default=27, help="blocks of width 1152")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases: dict[str, list[tuple[float, int]]] = {}
    with tempfile.TemporaryDirectory() as folder, HubServer() as hub:
        made = write_seeded_checkpoint(
            Path(folder) / "made", "qwen3_vl", width=1152, depth=options.depth, shards=3
        )
        tower = extract_encoder(made, Path(folder) / "tower") / "model.safetensors"
        nbytes = inspect_checkpoint(made).bytes
        hub.push("owner/tower", made)
        for turn in range(options.repeats):
            home = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": f"{folder}/home{turn}"}
            home["HF_HUB_DISABLE_XET"] = "1"
            for name, row in {
                "folder": client("ours", made),
                "folder, to float32": client("ours", made, "float32"),
                "hub, first": client("ours", "owner/tower", **home),
                "cache": client("ours", "owner/tower", **home, HF_HUB_OFFLINE="1"),
                "load_file": client("load_file", tower),
            }.items():
                cases.setdefault(name, []).append(row)
    print(f"{torch.cuda.get_device_name()}: a tower of {nbytes / MIB:.0f} MiB")
    rows: dict[str, Any] = {}
    for name, found in cases.items():
        rows[name] = {
            "seconds": round(statistics.median(seconds for seconds, _ in found), 3),
            "host_growth_mib": round(max(grown for _, grown in found) / MIB, 1),
        }
        print(
            f"{name:20} {rows[name]['seconds']:6.2f} s  host {rows[name]['host_growth_mib']:6.1f}"
            f" MiB (at most {LIMIT_MIB})"
        )
    if options.json:
        about = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "repeats": options.repeats,
            "tower_mib": round(nbytes / MIB, 1),
        }
        options.json.write_text(json.dumps({"about": about, "loads": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
