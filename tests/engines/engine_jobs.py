"""Runs engines in a process of their own, and compares what they say with our tower and vLLM's."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOGPROB = 1e-4
"""Bound for the difference of the log-probabilities of twelve tokens, which are about -40."""
ENGINE = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.2,
    "num_gpu_blocks_override": 128,  # 16,384 tokens; to clear a gigabyte takes a second
    "seed": 0,
}
STATIC = {"backend": "static", "budgets": [32, 64, 128]}
Answers = dict[str, dict[str, Any]]


def drive(folder: Path, jobs: dict[str, dict[str, Any]], **environment: str) -> Answers:
    """The answers of the jobs by name; what the engines print goes to this process's output."""
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    settings = {
        "PYTHONPATH": f"{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_MLA_DISABLE": "1",  # there is none for CPUs
        "VLLM_NO_USAGE_STATS": "1",
        "VITGRAPH_VLLM": "0",
        **environment,
    }
    command = [sys.executable, str(ROOT / "tests" / "engines" / "drive.py")]
    command += [str(folder / "jobs.json"), str(folder / "answers.json")]
    subprocess.run(command, env=os.environ | settings, check=True, timeout=900)
    return dict(json.loads((folder / "answers.json").read_text()))


def compare(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    """Equal tokens, and log-probabilities within the bound."""
    assert "error" not in ours
    for name in ours.keys() - {"about"}:
        answer = ours[name]
        if "rows" in answer:
            compare_rows(answer["rows"], stock[name]["rows"])
            continue
        assert answer["tokens"] == stock[name]["tokens"], name
        assert abs(answer["logprob"] - stock[name]["logprob"]) < LOGPROB, name


def compare_rows(ours: list[list[float]], stock: list[list[float]]) -> None:
    """Equal embeddings of tokens, of length one each."""
    assert len(ours) == len(stock) > 1
    for found, wanted in zip(ours, stock, strict=True):
        assert math.dist(found, wanted) < 1e-5
