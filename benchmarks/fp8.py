"""Encoders with matrix products in fp8 and in bfloat16: milliseconds, bytes and errors.

    python -m benchmarks.fp8 --json benchmarks/results/fp8_h200.json
    python -m benchmarks.fp8 --device cpu --no-speed     (errors alone, of products rounded to e4m3)
    python -m benchmarks.fp8 --table benchmarks/results/fp8_h200.json     (table of docs/speed.md)

Towers have their real size and random weights. ``ms`` is a call of a ``GraphedEncoder`` whose only
token budget is exactly the workload's tokens; both precisions run in turn. Errors are those of the
outputs against the same weights in float32, for photographs (scikit-learn's and matplotlib's) and
for noise. They are measured with the random weights as they are ("drawn"), and with outlier
channels: a few input columns of every weight in the blocks are multiplied by 50.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown
from benchmarks.speed.measure import MIB, empty_cache
from benchmarks.towers import TOWERS, Tower
from encoders.accelerated.fp8 import OUTLIER
from encoders.base.vision_encoder import VisionEncoder
from encoders.block_parts import NamesItsParts
from graphwrap import GraphedEncoder
from tests.oracles import Grids
from vitgraph.commands.bench_accuracy import COMPARED_FIELDS, errors
from vitgraph.timing import medians, random_pixels

CELLS = {
    "Qwen3-VL-8B": ("1x224", "1x448", "1x1024", "8x448", "32x448", "mix8"),
    "Qwen2.5-VL-7B": ("1x224", "1x448", "1x1024", "8x448", "32x448", "mix8"),
    "Qwen2-VL-7B": ("1x224", "1x448", "1x1024", "8x448", "32x448", "mix8"),
    "InternViT-300M": ("1 tile", "4 tiles", "13 tiles", "64 tiles"),
    "InternViT-6B": ("1 tile", "13 tiles"),
}
E4M3 = torch.float8_e4m3fn
OUTLIERS, FACTOR = 3, 50.0
"""The number of outlier columns per weight, and the factor by which they are multiplied."""
REMEDIES = {
    "plain": "every product is rounded",
    "ends": "the first and the last block stay in bfloat16",
    "smoothed": "columns of weights and rows share their size, as SmoothQuant does",
    "kept": 'products with outlier columns stay in bfloat16, as precision="fp8" does',
}


def add_outliers(encoder: VisionEncoder) -> None:
    """Multiply a few input columns of every weight in the encoder's blocks by ``FACTOR``."""
    generator = torch.Generator().manual_seed(1)
    for layer in layers_of(encoder):
        columns = torch.randperm(layer.in_features, generator=generator)[:OUTLIERS]
        layer.weight[:, columns.to(layer.weight.device)] *= FACTOR


def fill_scales(encoder: VisionEncoder) -> None:
    """Set the layer scales of the blocks to one; in a newly built InternViT they are zeros."""
    for block in encoder.blocks:
        assert isinstance(block, NamesItsParts)
        parts = block.parts()
        assert parts is not None
        for scale in (parts.scale1, parts.scale2):
            if scale is not None:
                scale.fill_(1.0)


def layers_of(encoder: VisionEncoder) -> Iterator[nn.Linear]:
    """Yield the linear layers in the blocks of an encoder."""
    for block in encoder.blocks:
        yield from (layer for layer in block.modules() if isinstance(layer, nn.Linear))


def rounded(rows: Tensor) -> Tensor:
    """Return rows rounded to e4m3 with one scale per row, as float32."""
    rows = rows.float()
    scales = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
    return (rows / scales).to(E4M3).float() * scales


def round_products(encoder: VisionEncoder, remedy: str) -> VisionEncoder:
    """Return a copy of an encoder that imitates fp8: inputs and weights of products are rounded.

    Args:
        encoder: the encoder, of which only the blocks are changed.
        remedy: a key of :data:`REMEDIES`, the way in which rounding errors are reduced.
    """
    encoder, last = deepcopy(encoder), len(encoder.blocks) - 1
    for number, block in enumerate(encoder.blocks):
        if remedy == "ends" and number in (0, last):
            continue
        for layer in (x for x in block.modules() if isinstance(x, nn.Linear)):
            sizes = layer.weight.float().norm(dim=0)
            if remedy == "kept" and sizes.max() > OUTLIER * sizes.median():
                continue
            round_layer(layer, (sizes / sizes.median()).sqrt() if remedy == "smoothed" else None)
    return encoder


def round_layer(layer: nn.Linear, factors: Tensor | None) -> None:
    """Make a layer round its input and its weight to e4m3.

    Before the rounding, the input is multiplied by ``factors`` (one per column) and the weight is
    divided by them; None does neither.
    """
    factors = torch.ones_like(layer.weight[0]) if factors is None else factors.to(layer.weight)
    weight = rounded(layer.weight / factors).to(layer.weight.dtype)

    def forward(input: Tensor) -> Tensor:
        return F.linear(rounded(input * factors).to(input.dtype), weight, layer.bias)

    layer.forward = forward  # type: ignore[method-assign]


def forms(encoder: VisionEncoder) -> Iterator[tuple[str, VisionEncoder]]:
    """Yield an encoder in each precision, then with fp8 imitated by rounding in several ways."""
    if next(encoder.parameters()).is_cuda:
        for name in ("bf16", "fp8"):
            yield name, encoder.accelerated(precision=name)
    else:
        yield "bf16", encoder
    for remedy in REMEDIES:
        yield f"rounded, {remedy}", round_products(encoder, remedy)


def photographs(encoder: VisionEncoder) -> tuple[Tensor, Grids]:
    """Return pixels and grids of photographs, on the encoder's device and in its dtype."""
    from tests.support.photographs import photographs as pictures

    inputs = encoder.preprocess(images=pictures()[:4])
    weight = next(encoder.parameters())
    return inputs.pixel_values.to(weight.device, weight.dtype), inputs.grid_thw.tolist()


def measure_errors(encoder: VisionEncoder, grids: Grids) -> list[dict[str, Any]]:
    """Return the error of each precision, per kind of weights, kind of pixels, and output field."""
    rows = []
    for weights in ("drawn", "outliers"):
        if weights == "outliers":
            add_outliers(encoder)
        truth = deepcopy(encoder).float()
        torch.manual_seed(2)
        kinds = {
            "photographs": photographs(encoder),
            "noise": (random_pixels(encoder, grids), grids),
        }
        exact = {key: truth(values.float(), its) for key, (values, its) in kinds.items()}
        del truth
        for precision, tower in forms(encoder):
            for pixels, (values, its_grids) in kinds.items():
                output = tower(values, its_grids)
                for field in COMPARED_FIELDS:
                    ours, theirs = (
                        getattr(one, field).flatten(0, -2) for one in (output, exact[pixels])
                    )
                    case = {"weights": weights, "pixels": pixels, "precision": precision}
                    rows.append({**case, "field": field, **errors(ours, theirs)})
                    print("  ", *rows[-1].values(), flush=True)
        del exact
        empty_cache()
    return rows


def measure_speed(name: str, encoder: VisionEncoder, grids: Grids, runs: int) -> dict[str, Any]:
    """Return the milliseconds and bytes of each precision for one workload."""
    pixels, specs = random_pixels(encoder, grids), encoder.item_specs(grids)
    budget = sum(spec.output_tokens for spec in specs)
    graphs = {
        precision: GraphedEncoder(
            encoder, [budget], max_batch_size=len(specs), precision=precision
        ).capture(progress=False)
        for precision in ("bf16", "fp8")
    }
    ms = medians({key: partial(one, pixels, grids) for key, one in graphs.items()}, runs)
    stats = {key: one.stats() for key, one in graphs.items()}
    accelerator = graphs["fp8"]._forms["image"].accelerator
    assert accelerator is not None
    row = {
        "workload": name,
        "ms": ms,
        "faster": ms["bf16"] / ms["fp8"],
        "eager_calls": {key: one.eager_calls for key, one in stats.items()},
        "derived_mib": {key: one.derived_bytes / MIB for key, one in stats.items()},
        "products": accelerator.choices()["products"],
    }
    print(f"  {name:9} {ms} {row['faster']:.2f}x {row['derived_mib']}", flush=True)
    for one in graphs.values():
        one.release()
    empty_cache()
    return row


def measure(tower: Tower, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one tower: its errors and its speed, unless an option turns one of them off."""
    encoder = tower.build(device=options.device)
    if options.blocks:
        del encoder.blocks[options.blocks :]
    print(tower.name, flush=True)
    with torch.no_grad():
        fill_scales(encoder)
        speed = [
            measure_speed(name, encoder, tower.workloads[name], options.runs)
            for name in CELLS[tower.name]
            if options.speed
        ]
        shape = tower.workloads[CELLS[tower.name][1]]
        found = measure_errors(encoder, shape) if options.errors else []
    mib = sum(weight.nbytes for weight in encoder.parameters()) / MIB
    return {"tower": tower.name, "tower_mib": mib, "speed": speed, "errors": found}


def table(body: Mapping[str, Any]) -> str:
    """Return a Markdown table of the milliseconds per workload, and of the largest errors."""
    head = ("tower", "workload", "bf16, ms", "fp8, ms", "faster", "error in bf16", "error in fp8")
    rows = []
    for tower in body["towers"]:
        drawn = [row for row in tower["errors"] if row["weights"] == "drawn"]
        far = [
            max(
                (row["relative_l2"] for row in drawn if row["precision"] == name),
                default=0,
            )
            for name in ("bf16", "fp8")
        ]
        shown = [f"{number:.3f}" if number else "-" for number in far]
        for row in tower["speed"]:
            ms = row["ms"]
            cells = (f"{ms['bf16']:.2f}", f"{ms['fp8']:.2f}", f"{row['faster']:.2f}x", *shown)
            rows.append((tower["tower"], row["workload"], *cells))
    return markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every tower that the command line names, and write the file after each tower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--towers", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, help="only so many blocks of each tower")
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--errors", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--table", type=Path, help="print the table of a results file")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    body: dict[str, Any] = {"about": about(options.runs), "towers": []}
    for name in options.towers:
        body["towers"].append(measure(TOWERS[name], options))
        if options.json is not None:
            write_results(options.json, body)
        empty_cache()


if __name__ == "__main__":
    main()
