"""Graphs of the newer families beside transformers on one GPU: one tower per family, bfloat16.

    python -m benchmarks.family_speed --json benchmarks/results/family_speed_h200.json
    python -m benchmarks.family_speed --table benchmarks/results/family_speed_h200.json

Towers have their published size and random weights. Each workload is a list of images of noise,
prepared by the family's own rules once; ``hf_ms`` is transformers' tower and projector (sdpa) on
inputs prepared as its processor does, ``graphed_ms`` a call of ``GraphedEncoder`` whose budgets are
the workloads' tokens. All calls run in turn, and each figure is a median.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.measure_speed import empty_cache
from benchmarks.towers import about, milliseconds
from encoders.base.vision_encoder import VisionEncoder
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, Grids
from tests.oracles.pixtral import pixtral_states
from tests.oracles.siglip import siglip2_inputs

TOWERS = (
    *("glm4v", "glm_ocr", "glm5_next", "pixtral", "siglip", "siglip2", "gemma3", "gemma4"),
    *("gemma4_e2b", "moonvit", "paddleocr_vl", "idefics3"),
)
"""Rows of ``tests/oracles/families.py``."""
WORKLOADS = {
    "1x224": [(224, 224)],
    "1x1024": [(1024, 1024)],
    "8x448": [(448, 448)] * 8,
    "mix8": [
        (224, 224), (640, 480), (480, 640), (1280, 720), (1024, 1024), (336, 336), (512, 896),
        (768, 768),
    ],
}  # fmt: skip
"""Widths and heights of images."""
Call = Callable[[], object]


class Workload(NamedTuple):
    """Images as an encoder takes them."""

    pixels: Tensor
    grids: Grids


def glm_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """A GLM tower, whose rows of grids are frame pairs."""
    rows = torch.tensor([[1, h, w] for t, h, w in grids for _ in range(t)], device=pixels.device)
    return lambda: reference(pixels, rows)


def pixtral_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Pixtral's tower and projector, on the padded images that its processor makes."""
    held: list[Any] = []

    def record(batch: Tensor, image_sizes: Tensor) -> SimpleNamespace:
        held.extend((batch, image_sizes))
        return SimpleNamespace(last_hidden_state=[batch])

    record.config = reference.vision_tower.config  # type: ignore[attr-defined]
    pixtral_states(record, pixels, grids, reference.merge)  # type: ignore[arg-type]
    batch, sizes = held

    def call() -> object:
        hidden = reference.vision_tower(batch, image_sizes=sizes).last_hidden_state[0]
        return reference.multi_modal_projector(hidden, sizes)

    return call


def siglip2_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """NaFlex, on patches padded to the longest image."""
    inputs = siglip2_inputs(pixels, torch.tensor(grids))
    moved = {name: value.to(pixels.device) for name, value in inputs.items()}
    return lambda: reference(**moved)


def gemma3_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Gemma 3's tower and projector, on images of one size."""
    return lambda: reference["projector"](reference["tower"](pixels).last_hidden_state)


def gemma4_call(reference: Any, pixels: Tensor, grids: Grids, longest: int = 2520) -> Call:
    """Gemma 4's tower and projector, on images that its processor pads to 2,520 patches."""
    sizes = [(h, w) for t, h, w in grids for _ in range(t)]
    batch = pixels.new_zeros(len(sizes), longest, pixels.shape[1])
    places = torch.full((len(sizes), longest, 2), -1, device=pixels.device)
    rows = pixels.split([h * w for h, w in sizes])
    for number, ((h, w), patches) in enumerate(zip(sizes, rows, strict=True)):
        batch[number, : h * w] = patches / 2 + 0.5
        column, row = torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy")
        places[number, : h * w] = torch.stack((column, row), -1).flatten(0, 1).to(places)

    def call() -> object:
        out = reference["vision_tower"](pixel_values=batch, pixel_position_ids=places)
        return reference["embed_vision"](out.last_hidden_state)

    return call


def moonvit_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Kimi-K2.5's tower and projector."""
    side = reference.vision_tower.config.patch_size
    rows, grid_thw = pixels.unflatten(1, (3, side, side)), torch.tensor(grids, device=pixels.device)
    return lambda: reference.mm_projector(reference.vision_tower(rows, grid_thw).pooler_output)


def paddle_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """PaddleOCR-VL's tower and projector."""
    side = reference["tower"].config.patch_size
    patches, grid_thw = pixels.view(1, -1, 3, side, side), torch.tensor(grids, device=pixels.device)
    tower, projector = reference["tower"], reference["projector"]
    return lambda: projector(tower(patches, grid_thw).last_hidden_state, grid_thw)


def idefics3_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Idefics3's tower and connector, on square tiles."""
    return lambda: reference["connector"](reference["tower"](pixels).last_hidden_state)


CALLS: dict[str, Callable[[Any, Tensor, Grids], Call]] = {
    "glm4v": glm_call,
    "glm_ocr": glm_call,
    "glm5_next": glm_call,
    "pixtral": pixtral_call,
    "siglip": lambda reference, pixels, grids: lambda: reference(pixels),
    "siglip2": siglip2_call,
    "gemma3": gemma3_call,
    "gemma4": gemma4_call,
    "gemma4_e2b": gemma4_call,
    "moonvit": moonvit_call,
    "paddleocr_vl": paddle_call,
    "idefics3": idefics3_call,
}


def build(name: str, changes: Mapping[str, Any], device: str) -> tuple[VisionEncoder, nn.Module]:
    """Our tower and transformers' with equal random weights, in bfloat16."""
    from tests.oracles.configs import edited

    family = BY_NAME[name]
    config = edited(family.config, **changes)
    torch.manual_seed(0)
    with torch.device(device):
        encoder = family.encoder_class(family.config_class.from_hf(config)).bfloat16()
        reference = family.reference(config).bfloat16()
    reference.load_state_dict(family.keys(encoder.state_dict()), strict=True)
    return tuple(module.eval().requires_grad_(False) for module in (encoder, reference))


def prepare(encoder: VisionEncoder, sizes: Sequence[tuple[int, int]]) -> Workload:
    """Images of noise by the rules of the encoder, on its device and in its dtype."""
    images = [
        torch.randint(0, 256, (3, height, width), dtype=torch.uint8) for width, height in sizes
    ]
    inputs, weight = encoder.preprocess(images=images), next(encoder.parameters())
    pixels = inputs.pixel_values.to(weight.device, weight.dtype)
    return Workload(pixels, inputs.grid_thw.tolist())


def measure(
    name: str, encoder: VisionEncoder, reference: nn.Module, runs: int, sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Every workload of one tower."""
    loads = {key: prepare(encoder, images) for key, images in sizes.items()}
    specs = {key: encoder.item_specs(load.grids) for key, load in loads.items()}
    tokens = {key: sum(spec.output_tokens for spec in of) for key, of in specs.items()}
    graphed = GraphedEncoder(
        encoder, sorted(set(tokens.values())), max_batch_size=max(map(len, specs.values()))
    )
    graphed.capture(progress=False)
    rows = []
    for key, load in loads.items():
        theirs = CALLS[name](reference, *load)
        calls = {"hf_ms": theirs, "graphed_ms": partial(graphed, *load)}
        times = {label: statistics.median(ms) for label, ms in milliseconds(calls, runs).items()}
        faster = times["hf_ms"] / times["graphed_ms"]
        rows.append({"workload": key, "tokens": tokens[key], **times, "faster": faster})
        print(f"{name:13}{key:8}{tokens[key]:7} tokens  {times}  {faster:.2f}x", flush=True)
    kernels = sorted({str(budget.kernel) for budget in graphed.stats().budgets})
    eager = graphed.stats().eager_calls
    graphed.release()
    return {"tower": name, "kernels": kernels, "eager_calls": eager, "workloads": rows}


def table(body: Mapping[str, Any]) -> str:
    """Markdown: milliseconds of both, per tower and workload."""
    head = ("tower", "images", "tokens", "transformers, ms", "graphs, ms", "faster")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for tower in body["towers"]:
        for row in tower["workloads"]:
            cells = (
                tower["tower"],
                row["workload"],
                str(row["tokens"]),
                f"{row['hf_ms']:.1f}",
                f"{row['graphed_ms']:.2f}",
                f"{row['faster']:.2f}x",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every tower asked for; a run that is cut off leaves the towers before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--towers", nargs="*", default=list(TOWERS), choices=TOWERS)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--table", type=Path, help="print the table of a results file")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    body: dict[str, Any] = {"about": about(options.runs), "towers": []}
    for name in options.towers:
        encoder, reference = build(name, {}, "cuda")
        with torch.no_grad():
            body["towers"].append(measure(name, encoder, reference, options.runs, WORKLOADS))
        del encoder, reference
        empty_cache()
        if options.json is not None:
            options.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
