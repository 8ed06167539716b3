"""A local checkpoint of many gigabytes: only headers and the tower's tensors are touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub.client import sparse_around
from vitgraph.seeded import write_seeded_checkpoint
from weights import inspect_checkpoint

LOAD = """
import sys
import huggingface_hub, torch, weights
from weights import inspect_checkpoint, load_encoder

def read():
    return int(open("/proc/self/io").read().split("rchar: ")[1].split()[0])

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssFile"))) * 1024

inspect_checkpoint(sys.argv[2])  # imports what is imported late
before = read(), resident()
encoder = load_encoder(sys.argv[1])
print(read() - before[0], resident() - before[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/io")
def test_of_a_checkpoint_of_many_gigabytes_only_the_tower_is_read(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "large", "qwen3_vl", width=256, depth=8, shards=3)
    other = write_seeded_checkpoint(tmp_path / "small", "qwen3_vl", width=64)
    tower = inspect_checkpoint(folder).bytes
    headers = sparse_around(folder, 8 << 30)
    files = list(folder.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in files) > 8 << 30
    assert sum(path.stat().st_blocks for path in files) * 512 < 100e6
    shell = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[3]))
    command = [sys.executable, "-c", LOAD, str(folder), str(other)]
    done = subprocess.run(command, env=shell, capture_output=True, text=True, check=True)
    read, grown = map(int, done.stdout.split())
    assert tower <= read <= 1.01 * tower + 2 * headers + 100_000  # JSON files and /proc itself
    assert grown <= 1.15 * tower + (64 << 20)
