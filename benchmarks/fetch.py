"""Times of downloading a vision tower by byte ranges and by whole shards, from a slow hub.

    python -m benchmarks.fetch [--repeats 3] [--json FILE]
    python -m benchmarks.fetch --width 1280 --depth 32 --times 2    (second loads of a gigabyte)
    python -m benchmarks.fetch --transformers --width 96 --times 34 [--json FILE]

The hub is ``tests/support/hub/server.py`` in a process of its own: 100 MB/s per connection, 20 ms
per request and redirect. The checkpoint has a tower of more than 32 MB with random weights, spread
over three shards; all shards together are 50 times as large, and their other bytes are holes of a
sparse file, sent as zeros. Every load is a new process with an empty cache, timed after its
imports; the two ways take turns. The floor for shards is the time that three connections need at
full speed. Second loads, from the cache, are compared with ``safetensors.torch.load_file`` of the
tower's file and a ``clone`` of each tensor, in one thread with the file in the page cache. Memory
is the growth of RssAnon + RssFile in a new process, from after its imports to the peak.

With ``--transformers``, the bytes that loading transfers are compared with those that transformers'
class for the vision tower alone needs. Given a full checkpoint, that class finds no tensors by
itself; with ``key_mapping`` it loads all of them, after every shard is downloaded. The SHA-256 of
names and tensors must be equal in both towers.
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
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown

ROOT = Path(__file__).parents[1]

RATE, LATENCY = 100e6, 0.02
REPO = "owner/large"

SERVE = f"""
import json, sys
from pathlib import Path
from tests.support.hub.server import HubServer

with HubServer(latency={LATENCY}, bytes_per_second={RATE}) as hub:
    print(hub.endpoint, hub.push({REPO!r}, Path(sys.argv[1])), flush=True)
    for line in sys.stdin:
        print(json.dumps([len(hub.requests), hub.bytes_sent()]), flush=True)
        hub.requests.clear()
"""

CLIENT = """
import json, os, sys, threading, time
import huggingface_hub, torch, weights
from safetensors.torch import load_file
from weights import load_encoder
torch.set_num_threads(1)

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssFile"))) * 1024

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], resident())

way, repo, revision, allowed = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
def fetch():
    if way == "shards":
        return huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=allowed)
    if way == "floor":
        return {name: value.clone() for name, value in load_file(allowed[0]).items()}
    return load_encoder(repo, revision=revision, fetch="auto", progress=False)

if way == "floor":
    fetch()  # what load_file imports late
start, peak, done = resident(), [0], threading.Event()
thread = threading.Thread(target=watch, daemon=True)
thread.start()
began = time.perf_counter()
result = fetch()
seconds = time.perf_counter() - began
done.set()
thread.join()
print(json.dumps([seconds, max(peak[0], resident()) - start]))
"""

BESIDE_TRANSFORMERS = """
import hashlib, json, sys, time
import torch, weights
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

began = time.perf_counter()
if sys.argv[1] == "vitgraph":
    tower = weights.load_encoder(sys.argv[2], progress=False)
else:
    mapping = {"^model.visual.": ""}
    tower = Qwen3VLVisionModel.from_pretrained(sys.argv[2], key_mapping=mapping, dtype="auto")
seconds = time.perf_counter() - began
digest = hashlib.sha256()
for name, value in sorted(tower.state_dict().items()):
    digest.update(name.encode() + value.view(torch.uint8).numpy().tobytes())
print(json.dumps([seconds, digest.hexdigest()]))
"""


class Hub:
    """A process that runs ``tests/support/hub/server.py``, a small imitation of the Hub."""

    def __init__(self, folder: Path) -> None:
        shell = dict(os.environ, PYTHONPATH=str(ROOT))
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(folder)],
            env=shell,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.endpoint, self.commit = self._line().split()

    def traffic(self) -> tuple[int, int]:
        """Return the numbers of requests and of bytes sent since the last call of this method."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        requests, sent = json.loads(self._line())
        return requests, sent

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def client(hub: Hub, home: Path, way: str, revision: str, *allowed: str) -> tuple[float, int]:
    """Load a tower in a new process; return the seconds and the growth of memory in bytes.

    Args:
        hub: the hub to download from.
        home: folder of the process's cache.
        way: "shards" downloads whole files, "floor" only reads a local file with safetensors, and
            any other value calls ``load_encoder``.
        revision: branch or commit to load.
        allowed: names of the files to download for "shards"; path of the file for "floor".
    """
    seconds, grown = in_fresh_process(hub, home, CLIENT, way, REPO, revision, *allowed)
    return seconds, grown


def in_fresh_process(hub: Hub, home: Path, code: str, *arguments: str) -> list[Any]:
    """Run Python code in a new process that can reach only this hub; return its JSON output.

    Its cache is in the folder ``home``, and ``arguments`` are its command line arguments.
    """
    shell = dict(
        os.environ,
        HF_ENDPOINT=hub.endpoint,
        HF_HOME=str(home),
        HF_HUB_DISABLE_XET="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        TRANSFORMERS_VERBOSITY="error",
        OMP_NUM_THREADS="1",
        PYTHONPATH=str(ROOT),
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=shell, stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def checkpoint(folder: Path, options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Write the large checkpoint; return its folder, and a description of it for the result."""
    from tests.support.hub.client import sparse_around
    from vitgraph.seeded import write_seeded_checkpoint
    from weights import inspect_checkpoint

    made = write_seeded_checkpoint(
        folder / "large", "qwen3_vl", width=options.width, depth=options.depth, shards=3
    )
    tower = inspect_checkpoint(made).bytes
    headers = sparse_around(made, options.times * tower)
    shards = sorted(path.name for path in made.glob("*.safetensors"))
    return made, {
        "tower_bytes": tower,
        "checkpoint_bytes": sum((made / name).stat().st_size for name in shards),
        "header_bytes": headers,
        "json_bytes": sum(path.stat().st_size for path in made.glob("*.json")),
        "shards": shards,
    }


def first_loads(hub: Hub, folder: Path, repeats: int, shards: list[str]) -> dict[str, Any]:
    """Time loads with an empty cache by byte ranges and by whole shards, in turn."""
    figures: dict[str, list[tuple[float, int, int, int]]] = {"ranges": [], "shards": []}
    for turn in range(repeats):
        for way, rows in figures.items():
            with tempfile.TemporaryDirectory(dir=folder) as home:
                seconds, grown = client(hub, Path(home), way, "main", *shards, "*.json")
                rows.append((seconds, grown, *hub.traffic()))
        print(f"turn {turn + 1}: " + ", ".join(f"{w} {r[-1][0]:.2f} s" for w, r in figures.items()))
    return {
        way: {
            "seconds": round(statistics.median(row[0] for row in rows), 3),
            "seconds_range": [round(f(row[0] for row in rows), 3) for f in (min, max)],
            "memory_growth": max(row[1] for row in rows),
            "requests": rows[-1][2],
            "bytes": rows[-1][3],
        }
        for way, rows in figures.items()
    }


def second_loads(hub: Hub, folder: Path, repeats: int) -> dict[str, Any]:
    """Time loads from the cache, at a commit and at a branch, and the mere reading of the file."""
    home = folder / "home"
    client(hub, home, "ranges", "main")
    hub.traffic()
    (tensors,) = (str(path) for path in home.rglob("tower/model.safetensors"))
    cases = {
        "at a commit": ("ranges", hub.commit),
        "of a branch": ("ranges", "main"),
        "floor": ("floor", "main", tensors),
    }
    rows: dict[str, list[tuple[float, int, int, int]]] = {name: [] for name in cases}
    for _ in range(2 * repeats + 1):
        for name, arguments in cases.items():
            rows[name].append((*client(hub, home, *arguments), *hub.traffic()))
    return {
        name: {
            "seconds": round(statistics.median(row[0] for row in found), 4),
            "memory_growth": max(row[1] for row in found),
            "requests": found[-1][2],
        }
        for name, found in rows.items()
    }


def show(what: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Print the tables of first and second loads, and return the ratios computed from them."""
    tower, ours, shards = what["tower_bytes"], first["ranges"], first["shards"]
    print(f"\ntower {tower / 1e6:.1f} MB, checkpoint {what['checkpoint_bytes'] / 1e6:,.0f} MB")
    print(f"{'first load':14}{'seconds':>9}{'requests':>10}{'MB':>10}{'memory MB':>11}")
    for way, row in first.items():
        print(
            f"{way:14}{row['seconds']:9.2f}{row['requests']:10}{row['bytes'] / 1e6:10,.1f}"
            f"{row['memory_growth'] / 1e6:11.1f}"
        )
    print(f"{'second load':14}{'seconds':>9}{'requests':>10}{'':10}{'memory MB':>11}")
    for name, row in second.items():
        print(
            f"{name:14}{row['seconds']:9.3f}{row['requests']:10}{'':10}"
            f"{row['memory_growth'] / 1e6:11.1f}"
        )
    floor = what["checkpoint_bytes"] / len(what["shards"]) / RATE
    beside = what["header_bytes"] + what["json_bytes"]
    derived = {
        "bytes over the tower, without headers and configs": (ours["bytes"] - beside) / tower,
        "times faster than the shards": shards["seconds"] / ours["seconds"],
        "times faster than their floor": floor / ours["seconds"],
        "second load over the floor": (
            second["at a commit"]["seconds"] / second["floor"]["seconds"]
        ),
        "memory over the tower": ours["memory_growth"] / tower,
    }
    for name, value in derived.items():
        print(f"{name:56}{value:8.3f}")
    return {name: round(value, 4) for name, value in derived.items()}


def both_ways(hub: Hub, folder: Path, repeats: int, what: dict[str, Any]) -> dict[str, Any]:
    """Time first loads by byte ranges and by whole shards, and second loads from the cache."""
    import huggingface_hub
    import torch

    first = first_loads(hub, folder, repeats, what["shards"])
    second = second_loads(hub, folder, repeats)
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "huggingface_hub": huggingface_hub.__version__,
        "hub": {"bytes_per_second_a_connection": RATE, "latency_s": LATENCY},
        "repeats": repeats,
        "checkpoint": what,
        "first_load": first,
        "second_load": second,
        "derived": show(what, first, second),
    }


def beside_transformers(hub: Hub, folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Load the tower with this library and with transformers; print the bytes of each."""
    import transformers

    ways: dict[str, dict[str, Any]] = {}
    for way in ("vitgraph", "transformers"):
        with tempfile.TemporaryDirectory(dir=folder) as home:
            seconds, digest = in_fresh_process(hub, Path(home), BESIDE_TRANSFORMERS, way, REPO)
        requests, sent = hub.traffic()
        row = {"seconds": round(seconds, 2), "requests": requests, "bytes": sent}
        ways[way] = {**row, "sha256": digest}
        print(f"{way:14}{sent / 1e6:8.1f} MB{requests:5} requests{seconds:8.2f} s")
    assert len({row["sha256"] for row in ways.values()}) == 1, "the towers differ"
    versions = {"transformers": transformers.__version__}
    return {"versions": versions, "checkpoint": about, "loads": ways}


def table(record: Mapping[str, Any]) -> str:
    """Return the figures of the first load of :func:`both_ways` as a Markdown table."""
    head = ("first load", "seconds", "requests", "MB transferred", "growth of host memory, MB")
    names = {"ranges": "`load_encoder`", "shards": "`snapshot_download` of the shards"}
    rows = []
    for way, name in names.items():
        row = record["first_load"][way]
        least, most = row["seconds_range"]
        megabytes = (f"{row['bytes'] / 1e6:,.1f}", f"{row['memory_growth'] / 1e6:,.0f}")
        seconds = f"{row['seconds']:.2f} ({least:.2f} to {most:.2f})"
        rows.append((name, seconds, str(row["requests"]), *megabytes))
    return markdown(head, rows)


def main() -> None:
    """Measure and print; write the results as JSON if ``--json`` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--transformers", action="store_true", help="compare what is transferred")
    parser.add_argument("--width", type=int, default=384, help="of the tower")
    parser.add_argument("--depth", type=int, default=5, help="of the tower")
    parser.add_argument("--times", type=int, default=50, help="the checkpoint over the tower")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        made, what = checkpoint(Path(name), options)
        hub = Hub(made)
        try:
            if options.transformers:
                record = beside_transformers(hub, Path(name), what)
            else:
                record = both_ways(hub, Path(name), options.repeats, what)
        finally:
            hub.close()
    if options.json:
        write_results(options.json, record)


if __name__ == "__main__":
    main()
