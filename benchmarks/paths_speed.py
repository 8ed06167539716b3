"""Times of encoders that encode an image and its tiles by separate input paths.

    python -m benchmarks.paths_speed --json benchmarks/results/paths_speed_h200.json

An input path takes one kind of view of an image, such as "image" (the whole image) or "tiles"; the
features of both are joined per image. Towers have their real size, with random weights in bfloat16
and inputs on the GPU. Figures are medians in milliseconds; the variants take turns in one process.

- ``transformers``: transformers' tower (sdpa) and projector over the views of each input path,
  without joining the features per image.
- ``reference``: ``encoder(inputs)``; ``reference_graph``: ``GraphedEncoder(kernels="reference")``.
- ``accelerated``: ``encoder.accelerated()(inputs)``; ``graph``: ``GraphedEncoder``.
- ``floor``: a CUDA graph per accelerated input path, captured by hand for exactly this shape,
  without preparation, padding and joining.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.graphs import bare_replay
from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.towers import SIZES_MIX8, Tower
from encoders.base.paths_encoder import PathsEncoder
from encoders.contract import VisionInputs
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME
from vitgraph.timing import medians

TOWERS = (
    Tower("Step3-VL-10B", "step3_vl", "stepfun-ai/Step3-VL-10B"),
    Tower("DeepSeek-OCR", "deepseek_ocr", "deepseek-ai/DeepSeek-OCR"),
)
WORKLOADS = {
    "one small image": [(320, 240)],
    "most tiles": [(1920, 1280)],
    "mix8": [(4 * width // 3, 4 * height // 3) for width, height in SIZES_MIX8],
}
"""The (width, height) of the images of a workload. An image of 1920x1280 has the most tiles: 12 in
Step3-VL, and 6 in DeepSeek-OCR."""
VIEWS = {"image": (1, 2, 4, 8), "tiles": (2, 4, 6, 8, 12, 24, 36)}
"""The numbers of views for which graphs are captured, by input path. They are fewer than by
default, because capturing all default budgets of 2 billion parameters twice would take minutes."""


def random_inputs(encoder: PathsEncoder, sizes: list[tuple[int, int]]) -> VisionInputs:
    """Return the inputs of images of these sizes, with random pixels on the GPU."""
    images = [torch.zeros(3, height, width, dtype=torch.uint8) for width, height in sizes]
    inputs = encoder.preprocess(images)
    return inputs.with_pixels(
        lambda pixels: torch.randn(pixels.shape, device="cuda", dtype=encoder.dtype)
    )


def run_all(graphs: Sequence[Callable[[], object]]) -> None:
    """Replay the graphs of all input paths, one after another."""
    for replay in graphs:
        replay()


def run_transformers(tower: Tower, reference: nn.Module, inputs: VisionInputs) -> None:
    """Run transformers' tower (``reference``) over the views of each input path."""
    for path in inputs.paths.values():
        if len(path.grid_thw):
            BY_NAME[tower.family].output(reference, path.pixel_values, path.grid_thw)


@torch.no_grad()
def measure(tower: Tower, runs: int) -> list[dict[str, Any]]:
    """Measure one tower; return a row of medians per workload."""
    encoder: Any = tower.build_encoder()
    reference = tower.reference(encoder)
    fast = encoder.accelerated()
    tokens = {
        name: path.item_specs([path.grid_for(1)])[0].output_tokens
        for name, path in encoder.paths.items()
    }
    budgets = {name: [views * tokens[name] for views in VIEWS[name]] for name in tokens}
    began = time.perf_counter()
    graphed = GraphedEncoder(encoder, budgets, table=None).capture(progress=False)
    capture_seconds = time.perf_counter() - began
    plain = GraphedEncoder(encoder, budgets, kernels="reference").capture(progress=False)
    rows = []
    for workload, sizes in WORKLOADS.items():
        inputs = random_inputs(encoder, sizes)
        used = {name: path for name, path in inputs.paths.items() if len(path.grid_thw)}
        graphs = [bare_replay(fast.paths[name], *path[:2]) for name, path in used.items()]
        calls: dict[str, Callable[[], object]] = {
            "transformers": partial(run_transformers, tower, reference, inputs),
            "reference": partial(encoder, inputs),
            "reference_graph": partial(plain, inputs),
            "accelerated": partial(fast, inputs),
            "graph": partial(graphed, inputs),
            "floor": partial(run_all, graphs),
        }
        ms = medians(calls, runs)
        gains = {name: round(ms[name] / ms["graph"], 2) for name in ms}
        rows.append(
            {
                "tower": tower.name,
                "workload": workload,
                "capture_seconds": round(capture_seconds, 1),
                "views": {name: len(path.pixel_values) for name, path in used.items()},
                **{f"{name}_ms": round(value, 3) for name, value in ms.items()},
                "graph_is_faster_by": gains,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(graphed.stats().to_dict())[:2000])
    return rows


def main() -> None:
    """Measure the towers; print the rows, and write them if ``--json`` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    rows = []
    for tower in TOWERS:
        rows += measure(tower, options.runs)
        torch.cuda.empty_cache()
    result = {"about": about(options.runs), "rows": rows}
    if options.json:
        write_results(options.json, result)


if __name__ == "__main__":
    main()
