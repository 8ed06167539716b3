"""What loading a tower transfers: ours, and transformers' tower class with ``key_mapping``.

    python -m benchmarks.compare_fetch [--json FILE]

transformers' class of the tower alone finds no tensor in a full checkpoint by itself, and with
``key_mapping`` it loads all of them, after the client has downloaded every shard. The hub is that
of ``benchmarks/fetch.py``, and so is the checkpoint, smaller: random weights for a tower over three
shards, the rest holes. Each load is a fresh process with an empty cache, timed from after the
imports. Both towers must have the same tensors under the same names, by SHA-256.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.fetch import REPO, ROOT, Hub, checkpoint

CLIENT = """
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


def load(hub: Hub, way: str) -> dict[str, Any]:
    """Load the tower in a fresh process; returns seconds, requests, bytes and the digest."""
    with tempfile.TemporaryDirectory() as home:
        shell = dict(
            os.environ,
            HF_ENDPOINT=hub.endpoint,
            HF_HOME=home,
            HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            TRANSFORMERS_VERBOSITY="error",
            PYTHONPATH=str(ROOT),
        )
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, way, REPO],
            env=shell,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    seconds, digest = json.loads(done.stdout.splitlines()[-1])
    requests, sent = hub.traffic()
    return {"seconds": round(seconds, 2), "requests": requests, "bytes": sent, "sha256": digest}


def main() -> None:
    """Load the tower in both ways and print what each transferred."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--width", type=int, default=96, help="of the tower")
    parser.add_argument("--depth", type=int, default=5, help="of the tower")
    parser.add_argument("--times", type=int, default=34, help="the checkpoint over the tower")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made, about = checkpoint(Path(folder), options)
        hub = Hub(made)
        try:
            ways = {way: load(hub, way) for way in ("vitgraph", "transformers")}
        finally:
            hub.close()
    assert len({row["sha256"] for row in ways.values()}) == 1, "the towers differ"
    print(f"tower {about['tower_bytes'] / 1e6:.1f} MB of {about['checkpoint_bytes'] / 1e6:.1f} MB")
    for way, row in ways.items():
        print(
            f"{way:14}{row['bytes'] / 1e6:8.1f} MB{row['requests']:5} requests"
            f"{row['seconds']:8.2f} s"
        )
    if options.json:
        versions = {"transformers": transformers.__version__}
        record = {"versions": versions, "checkpoint": about, "loads": ways}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
