"""Time to the first token inside vLLM: its tower eagerly, its tower's own graphs, and our tower.

    python -m benchmarks.engines --json benchmarks/results/engines_h200.json
    python -m benchmarks.engines --models Qwen3-VL-8B --modes stock,ours --layers 4
    python -m benchmarks.engines --check --json benchmarks/results/engines_check_h200.json
    python -m benchmarks.engines --write      (draws the table of docs/engines.md)

Every engine is a process of its own, and every cell is written when it is measured. Weights are
drawn by vLLM (``load_format="dummy"``), every request has new random images and asks for one token.
``benchmarks/engine_check.py`` compares tokens, KV blocks and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.engine_models import MODELS, write_model
from benchmarks.machine import describe_machine

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CELLS = {
    "1x224": (1, 224, 224),
    "1x448": (1, 448, 448),
    "1x1024": (1, 1024, 1024),
    "8x448": (8, 448, 448),
    "1x1920x1080": (1, 1920, 1080),
}
"""Cell -> images per request, their width and height."""
MODES = {
    "stock": "vLLM's tower, eagerly",
    "graphs": "vLLM's tower, its own encoder graphs",
    "ours": "vitgraph's tower",
}
WARM, RUNS = 5, 21
"""Requests per cell that are not timed, and that are."""


class Engine:
    """vLLM inside this process."""

    def __init__(self, folder: Path, mode: str, *, compiled: bool, **more: Any) -> None:
        os.environ |= {
            "VITGRAPH_VLLM": "1" if mode == "ours" else "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM

        self.llm = LLM(**{**settings(folder, mode, compiled=compiled), **more})

    def answer(self, requests: Sequence[dict[str, Any]], tokens: int) -> list[Any]:
        """The outputs of requests that are sent at once, each of so many greedy tokens."""
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        return list(self.llm.generate(list(requests), greedy, use_tqdm=False))

    def stages(self) -> dict[str, float]:
        """Seconds of preprocessing and of the tower since this was asked last, as vLLM says."""
        from vllm.benchmarks.mm_processor import get_timing_stats_from_engine

        found = get_timing_stats_from_engine(self.llm.llm_engine).values()
        return {
            "encoder": sum(one.get("encoder_forward_secs", 0.0) for one in found),
            "preprocess": sum(one.get("preprocessor_total_secs", 0.0) for one in found),
        }


def settings(folder: Path, mode: str, *, compiled: bool) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``."""
    compilation: dict[str, Any] = {} if compiled else {"mode": 0, "cudagraph_mode": "NONE"}
    if mode == "graphs":  # its manager works only beside the graphs of the language model
        graphs = {} if compiled else {"cudagraph_mode": "FULL_DECODE_ONLY"}
        compilation |= {**graphs, "cudagraph_mm_encoder": True}
    return {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": 16384,
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.9,
        "limit_mm_per_prompt": {"image": 8, "video": 0},
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
        "disable_log_stats": False,
        "enable_mm_processor_stats": True,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16], **compilation},
    }


def request_of(cell: str, dice: np.random.Generator) -> dict[str, Any]:
    """A prompt with new random images."""
    count, width, height = CELLS[cell]
    pixels = dice.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    images = [Image.fromarray(one) for one in pixels]
    return {"prompt": IMAGE * count + "What is this?", "multi_modal_data": {"image": images}}


def measure_cell(engine: Engine, cell: str) -> dict[str, float]:
    """Medians in milliseconds over the timed requests of a cell, which come one by one."""
    dice, rows = np.random.default_rng(0), []
    for _ in range(WARM + RUNS):
        request = request_of(cell, dice)
        began = time.perf_counter()
        (output,) = engine.answer([request], tokens=1)
        seconds = {"wall": time.perf_counter() - began}
        seconds["first_token"] = output.metrics.first_token_latency
        rows.append({**seconds, **engine.stages()})
    timed = rows[WARM:]
    result = {f"{name}_ms": 1e3 * statistics.median(row[name] for row in timed) for name in rows[0]}
    result["first_token_iqr_ms"] = 1e3 * float(
        np.subtract(*np.percentile([row["first_token"] for row in timed], [75, 25]))
    )
    return {name: round(value, 3) for name, value in result.items()}


def measure(
    model: str,
    mode: str,
    cells: Sequence[str],
    layers: int | None,
    record: Callable[[dict[str, Any]], None],
    *,
    compiled: bool,
    start: Callable[..., Engine] = Engine,
) -> None:
    """Measure the cells of one engine; every row is recorded as it is done."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        engine = start(write_model(Path(folder), model, layers), mode, compiled=compiled)
        seconds = round(time.perf_counter() - began, 1)
        common = {"model": model, "layers": layers or "all", "mode": mode, "compiled": compiled}
        for cell in cells:
            row = measure_cell(engine, cell)
            record({**common, "cell": cell, **row, "start_seconds": seconds})


def recorder(path: Path | None, about: Callable[[], dict[str, Any]]) -> Callable[[Any], None]:
    """A function that prints a row and puts it into the file, in place of an older one like it."""

    def record(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        if path is None:
            return
        found = json.loads(path.read_text()) if path.exists() else {"rows": []}
        rows = [old for old in found["rows"] if key(old) != key(row)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"about": about(), "rows": [*rows, row]}, indent=1) + "\n")

    return record


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is about; of two such rows the later one counts."""
    return tuple(
        row.get(name) for name in ("model", "layers", "mode", "compiled", "cell", "runner", "part")
    )


def describe() -> dict[str, Any]:
    """The machine, the versions, and how a cell is measured."""
    try:
        engine = version("vllm")
    except PackageNotFoundError:
        import vllm

        engine = str(vllm.__version__)
    return {**describe_machine(), "vllm": engine, "warm": WARM, "runs": RUNS, "dtype": "bfloat16"}


def run_apart(options: argparse.Namespace, module: str, given: dict[str, Any]) -> None:
    """Run one engine in a process of its own, so that the next one finds an empty GPU."""
    print(f"# {given}", flush=True)
    command = [sys.executable, "-m", module, "--one", json.dumps(given)]
    command += ["--json", str(options.json)] if options.json else []
    began = time.perf_counter()
    done = subprocess.run(command, check=False)
    print(f"# ended with {done.returncode}, {time.perf_counter() - began:.0f} s", flush=True)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--layers", default="4", help="layers of the language model, or all")
    parser.add_argument("--runners", default="0,1", help="of --check: V2 model runner off, on")
    parser.add_argument("--eager-language-model", action="store_true", help="compile nothing")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true", help="draw the table of docs/engines.md")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, check, or draw."""
    options = read_options(arguments)
    if options.write:
        from benchmarks.engine_table import write_page

        return write_page()
    if options.one:
        return measure(**options.one, record=recorder(options.json, describe))
    layers = None if options.layers == "all" else int(options.layers)
    models = options.models.split(",")
    if options.check:
        from benchmarks.engine_check import PARTS

        for runner in options.runners.split(","):
            for model in models:
                for part in PARTS:
                    given = {"model": model, "part": part, "layers": layers, "runner": runner}
                    run_apart(options, "benchmarks.engine_check", given)
        return None
    compiled = not options.eager_language_model
    for model in models:
        for mode in options.modes.split(","):
            cells = options.cells.split(",")
            given = {"model": model, "mode": mode, "cells": cells, "layers": layers}
            run_apart(options, "benchmarks.engines", {**given, "compiled": compiled})
    return None


if __name__ == "__main__":
    main()
