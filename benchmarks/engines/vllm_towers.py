"""vLLM's own encoders at the workloads of the README: eagerly, and with its encoder graphs.

    python -m benchmarks.engines.vllm_towers --json benchmarks/results/vllm_0.26_h100.json

vLLM starts each model with one layer of its language model and weights that it draws itself. In
its worker, the two calls that its model runner makes are timed in turn: ``embed_multimodal`` of the
model ("eager"), and ``execute`` of its manager of encoder graphs, with its own budgets, powers of
two ("auto"), and with budgets in steps of 512 tokens ("512"). A call ends with a synchronisation.
Outputs with NaN are listed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.measure import Engine, describe
from benchmarks.engines.models import MODELS, write_model
from benchmarks.measuring.results import write_results
from benchmarks.towers import TOWERS, Tower
from tests.oracles import BY_NAME, Grids
from vitgraph.timing import medians

NAMES = (*MODELS, "Qwen2-VL-7B", "InternViT-300M")
STEPS = range(512, 8193, 512)
"""The budgets of "512", in output tokens."""
ABOUT = {
    "engine": "vLLM",
    "printed_by": "python -m benchmarks.engines.vllm_towers",
    "method": "vLLM's own classes, graph manager and defaults in its worker, with random weights "
    "and FlashAttention 3; milliseconds of a synchronised call, medians, the calls in turn.",
    "budgets": {
        "eager": "its tower without graphs",
        "auto": "its budgets in powers of two",
        "512": "budgets tuned by hand, in steps of 512 tokens",
    },
    "nan": "workloads where an output had NaN",
}
RUNS = 21


def inputs_of(tower: Tower, grids: Grids, device: torch.device) -> dict[str, Any]:
    """Draw the keywords that vLLM's models take for a workload: pixels, and grids or tiles."""
    if BY_NAME[tower.family].tiled:
        tiles = [grid[0] for grid in grids]
        pixels = torch.randn(sum(tiles), 3, 448, 448, device=device, dtype=torch.bfloat16)
        return {
            "pixel_values_flat": pixels,
            "image_num_patches": torch.tensor(tiles),
            "image_token_id": torch.tensor(0),  # it is asked for, and serves the prompt alone
        }
    rows = sum(t * h * w for t, h, w in grids)
    width = 3 * 2 * tower.patch**2
    pixels = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def managers_of(runner: Any) -> dict[str, Any]:
    """Return vLLM's manager of encoder graphs, and one with budgets tuned by hand."""
    runner.compilation_config.encoder_cudagraph_token_budgets = list(STEPS)
    tuned = runner._create_encoder_cudagraph_manager()
    tuned.capture(graph_pool=torch.cuda.graph_pool_handle())
    return {"auto": runner.encoder_cudagraph_manager, "512": tuned}


@torch.inference_mode()
def time_tower(worker: Any, name: str, runs: int) -> dict[str, Any]:
    """Time a model's encoder inside vLLM's worker; return its row of the results.

    Args:
        worker: vLLM's worker, which holds the model runner.
        name: the name of the tower in :mod:`benchmarks.towers`.
        runs: calls per figure.
    """
    runner, tower = worker.model_runner, TOWERS[name]
    model, managers = runner.get_model(), managers_of(runner)
    row: dict[str, Any] = {"tower": name, "ms": {}, "nan": {}}
    for workload, grids in tower.workloads.items():
        inputs = inputs_of(tower, grids, runner.device)
        calls: dict[str, Callable[[], Iterable[Tensor]]] = {
            "eager": partial(model.embed_multimodal, **inputs)
        }
        for ladder, manager in managers.items():
            calls[ladder] = partial(manager.execute, inputs)
        wrong = {way: any(out.isnan().any() for out in call()) for way, call in calls.items()}
        for way, ms in medians(calls, runs).items():
            row["ms"].setdefault(way, {})[workload] = float(f"{ms:.3g}")
            row["nan"].setdefault(way, []).extend([workload] if wrong[way] else [])
        print(workload, {way: ms[workload] for way, ms in row["ms"].items()}, flush=True)
    return row


def measure(name: str, runs: int, start: Callable[..., Engine] = Engine) -> dict[str, Any]:
    """Start an engine for a tower, and return the tower's row."""
    tiled = BY_NAME[TOWERS[name].family].tiled
    more = {"limit_mm_per_prompt": {"image": 8}, "trust_remote_code": True} if tiled else {}
    with tempfile.TemporaryDirectory() as folder:
        place = write_model(Path(folder), name, layers=1)
        engine = start(place, "graphs", compiled=False, gpu_memory_utilization=0.3, **more)
        (row,) = engine.llm.collective_rpc(time_tower, args=(name, runs))
    return dict(row)


def record(path: Path, row: dict[str, Any]) -> None:
    """Put a tower's row into the file of results, in place of an older one."""
    found = json.loads(path.read_text())["towers"] if path.exists() else []
    towers = {tower["tower"]: tower for tower in [*found, row]}
    version = describe()
    about = {**ABOUT, **version, "version": version["vllm"], "runs": RUNS}
    write_results(path, {"about": about, "towers": list(towers.values())})


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure towers, each in a process of its own, since an engine keeps the GPU's memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--towers", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args(arguments)
    if len(options.towers) > 1:
        more = ["--runs", str(options.runs)]
        more += ["--json", str(options.json)] if options.json else []
        for name in options.towers:
            command = [sys.executable, "-m", __spec__.name, "--towers", name, *more]
            subprocess.run(command, check=False)
        return
    (name,) = options.towers
    row = measure(name, options.runs)
    if options.json:
        record(options.json, row)


if __name__ == "__main__":
    main()
