"""The least milliseconds that a GPU's peak rates allow for each workload of the README.

    python -m benchmarks.speed.floors --json benchmarks/results/floors_h100.json

Both rates are measured on the GPU: a product of two 8192 x 8192 matrices in bfloat16, and a copy
of 4 GiB. A workload's floor is the larger of its operations over the first rate, and the bytes of
the tower's parameters over the second.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.speed.__main__ import TABLE
from benchmarks.towers import TOWERS, Tower
from encoders import Qwen2_5VLConfig
from encoders.base.vision_encoder import VisionEncoder
from tests.oracles import BY_NAME
from vitgraph.timing import medians

SIDE, COPIED, RUNS = 8192, 2**32, 21
FORMULA = (
    "max(operations / products_per_second, parameter bytes / bytes_per_second), the whole tower "
    "counted: patch embedding, blocks, mergers, DeepStack mergers."
)


def measure_rates() -> tuple[float, float]:
    """Return the operations of products and the bytes of copies per second, of this GPU."""
    one, other = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(COPIED, device="cuda", dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    calls = {"product": lambda: one @ other, "copy": lambda: target.copy_(source)}
    ms = medians(calls, RUNS)
    return 2 * SIDE**3 / ms["product"] * 1e3, 2 * COPIED / ms["copy"] * 1e3  # read and written


def build_on_meta(tower: Tower) -> VisionEncoder:
    """Build a tower without memory for its weights."""
    family = BY_NAME[tower.family]
    with torch.device("meta"):
        encoder = family.build(family.config_class.from_hf(dict(tower.config)))
    return encoder.to(torch.bfloat16)


def count_operations(encoder: VisionEncoder, grid: Sequence[int]) -> float:
    """Return the floating-point operations of products and attention for one item.

    Without memory, attention is traced as that of all rows to all rows. Blocks that attend within
    windows have a smaller part of it.
    """
    metadata = encoder.prepare_encoder_metadata([grid], device="cpu")
    (spec,) = encoder.item_specs([grid])
    pixels = torch.empty(spec.input_size, *encoder.row_shape, device="meta", dtype=torch.bfloat16)
    moved = {name: x if x.ndim == 0 else x.to("meta") for name, x in metadata.items()}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(pixels, encoder_metadata=moved)
    counted = counter.get_flop_counts()["Global"]
    attention = counted.get(torch.ops.aten.bmm, 0)
    windows = metadata.get("cu_window_seqlens")
    if windows is None:
        return counter.get_total_flops()
    assert isinstance(encoder.config, Qwen2_5VLConfig)
    whole = len(encoder.config.fullatt_block_indexes) / encoder.config.depth
    share = float((windows.diff().double() ** 2).sum()) / spec.input_size**2
    return counter.get_total_flops() - attention * (1 - whole) * (1 - share)


def floors_of(tower: Tower, products: float, copies: float) -> dict[str, float]:
    """Return the least milliseconds per workload, for operations and bytes per second."""
    encoder = build_on_meta(tower)
    size = sum(weight.nbytes for weight in encoder.parameters())
    found = {}
    for workload, grids in tower.workloads.items():
        tiled = BY_NAME[tower.family].tiled  # each tile of an item attends to itself
        items = [[1, *grid[1:]] for grid in grids for _ in range(grid[0])] if tiled else grids
        kinds = {tuple(grid): items.count(grid) for grid in items}
        operations = sum(n * count_operations(encoder, grid) for grid, n in kinds.items())
        found[workload] = float(f"{1e3 * max(operations / products, size / copies):.3g}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the rates, and print and write the floors of the towers of the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    products, copies = measure_rates()
    rates = {"products_per_second": products, "bytes_per_second": copies}
    towers: list[dict[str, Any]] = [
        {"tower": name, "ms": floors_of(TOWERS[name], products, copies)} for name in TABLE
    ]
    body = {"about": {**about(RUNS), "formula": FORMULA, **rates}, "towers": towers}
    print(json.dumps(body, indent=1))
    if options.json:
        write_results(options.json, body)


if __name__ == "__main__":
    main()
