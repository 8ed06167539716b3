"""CLIP, DINO, C-RADIO and SAM 3 as CUDA graphs, beside transformers, timm and open_clip on a GPU.

    python -m benchmarks.image_towers --json benchmarks/results/image_towers_h100.json
    python -m benchmarks.image_towers --table benchmarks/results/image_towers_h100.json

Towers have their real size and random weights in bfloat16. A workload is a number of images of
224x224 or of the tower's own size, normalised and on the GPU before the timing; a tower of large
images has fewer. ``graphs`` is a call of a ``GraphedEncoder``; the others are run with their sdpa
attention, as they are and compiled by ``torch.compile`` (``mode="max-autotune"``, which captures
CUDA graphs). "over eager" is the time of transformers' tower, or of timm's where transformers is
too old to have it, over that of the graphs. ``--no-compile`` leaves out the compiled forms, of all
towers or of those named. All calls run in turn, and each figure is a median. A library that is not
installed, or too old, is left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown
from encoders.base.vision_encoder import VisionEncoder
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME
from tests.oracles.configs import edited, vision_of
from vitgraph.timing import medians
from weights.published import PUBLISHED


class ImageTower(NamedTuple):
    """A published tower, and the names that it has in other libraries."""

    family: str
    """Its name in ``tests/oracles/references``."""
    repo_id: str
    timm: str | None
    open_clip: str | None = None
    side: int = 224
    """The side of its images in pixels."""
    most: int = 256
    """The largest number of images of a workload."""
    reader: str = ""
    """The module of transformers with its class, if its config names no model type."""


TOWERS = {
    "CLIP-B/16": ImageTower(
        "clip",
        "openai/clip-vit-base-patch16",
        "vit_base_patch16_clip_quickgelu_224",
        "ViT-B-16-quickgelu",
    ),
    "CLIP-L/14": ImageTower(
        "clip",
        "openai/clip-vit-large-patch14",
        "vit_large_patch14_clip_quickgelu_224",
        "ViT-L-14-quickgelu",
    ),
    "CLIP-L/14-336": ImageTower(
        "clip",
        "openai/clip-vit-large-patch14-336",
        "vit_large_patch14_clip_quickgelu_336",
        "ViT-L-14-336-quickgelu",
        side=336,
    ),
    "DINOv2-B/14": ImageTower("dinov2", "facebook/dinov2-base", "vit_base_patch14_dinov2"),
    "DINOv2-L/14": ImageTower("dinov2", "facebook/dinov2-large", "vit_large_patch14_dinov2"),
    "DINOv3-B/16": ImageTower(
        "dinov3", "facebook/dinov3-vitb16-pretrain-lvd1689m", "vit_base_patch16_dinov3_qkvb"
    ),
    "DINOv3-L/16": ImageTower(
        "dinov3", "facebook/dinov3-vitl16-pretrain-lvd1689m", "vit_large_patch16_dinov3_qkvb"
    ),
    "C-RADIOv4-H": ImageTower(
        "c_radio",
        "nvidia/C-RADIOv4-H",
        "vit_huge_patch16_radio_v4",
        side=512,
        most=32,
        reader="radio",
    ),
    "SAM 3": ImageTower("sam3", "facebook/sam3", None, side=1008, most=8),
}
OTHERS = ("transformers", "timm", "open_clip")
"""The libraries whose towers are run beside ours."""
TINY_SIDE = 112
"""The side of images of the small towers of a test."""
BATCHES = (1, 8, 256)
"""The numbers of images of the workloads."""
GOALS = {1: 3.0, 256: 1.2}
"""How many times as fast as transformers' eager tower the graphs are to be, by images."""


def build(tower: ImageTower, device: str, tiny: bool) -> tuple[VisionEncoder, dict[str, nn.Module]]:
    """Build our encoder and the towers of other libraries, with random weights in bfloat16."""
    family = BY_NAME[tower.family]
    config: Any = next(model.config for model in PUBLISHED if model.repo_id == tower.repo_id)
    side = tower.side
    if tiny:
        config = edited(config, **family.tiny)
        side = vision_of(config).get("image_size", TINY_SIDE)
        if "preferred_resolution" in config:
            config = {**config, "preferred_resolution": [side, side]}
    torch.manual_seed(0)
    with torch.device(device):
        encoder = family.encoder_class(family.config_class.from_hf(config))
        others = build_transformers(tower, config)
        if tower.timm and importlib.util.find_spec("timm"):
            timm: Any = importlib.import_module("timm")

            sizes = {"embed_dim": 64, "depth": 2, "num_heads": 2} if tiny else {}
            sizes |= {"img_size": side, "num_classes": 0}
            if timm.is_model(tower.timm):
                others["timm"] = timm.create_model(tower.timm, **sizes)
        if tower.open_clip and not tiny and importlib.util.find_spec("open_clip"):
            open_clip: Any = importlib.import_module("open_clip")

            others["open_clip"] = open_clip.create_model(tower.open_clip).visual
    towers = {name: other.bfloat16().to(device) for name, other in others.items()}
    for module in (encoder, *towers.values()):
        module.eval().requires_grad_(False)
    assert isinstance(encoder, VisionEncoder)
    return encoder.to(torch.bfloat16), towers


def build_transformers(tower: ImageTower, config: Any) -> dict[str, nn.Module]:
    """Build the tower of transformers with its sdpa attention, if the installed one has it."""
    section = vision_of(config)
    if "model_type" in section:
        theirs = AutoConfig.for_model(**section)
        return {"transformers": AutoModel.from_config(theirs, attn_implementation="sdpa")}
    if not importlib.util.find_spec(f"transformers.models.{tower.reader}"):
        return {}
    with suppress(pytest.skip.Exception):  # an older transformers has files, but no such class
        return {"transformers": BY_NAME[tower.family].reference(config)}
    return {}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one tower with every number of images that it is measured with."""
    tower = TOWERS[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder, built = build(tower, device, options.tiny)
    others = {library: module for library, module in built.items() if library in options.others}
    calls: dict[str, Any] = dict(others)
    left_out = options.no_compile
    if left_out is None or (left_out and name not in left_out):
        for library, module in others.items():
            calls[f"{library}, compiled"] = torch.compile(module, mode="max-autotune")
    rows = []
    for count in sorted({min(count, tower.most) for count in options.batches}):
        side = TINY_SIDE if options.tiny else tower.side
        images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
        inputs = encoder.preprocess([*images]).to(device, torch.bfloat16)
        tokens = sum(spec.output_tokens for spec in encoder.item_specs(inputs.grid_thw))
        graphed = GraphedEncoder(encoder, [tokens], max_batch_size=count)
        graphed.capture(progress=False)
        scaled = (images.to(device) / 127.5 - 1).bfloat16()
        grids = inputs.grid_thw.tolist()
        timed: dict[str, Callable[[], object]] = {
            "graphs": partial(graphed, inputs.pixel_values, grids),
            **{library: partial(call, scaled) for library, call in calls.items()},
        }
        times = medians(timed, options.runs)
        others_ms = [value for label, value in times.items() if label != "graphs"]
        best = min(others_ms, default=float("nan"))
        row = {
            "images": count,
            "tokens": tokens,
            "ms": times,
            "over eager": times.get("transformers", times.get("timm", best)) / times["graphs"],
            "over the best": best / times["graphs"],
            "goal over eager": GOALS.get(count),
        }
        graphed.release()
        rows.append(row)
        print(name, json.dumps(row), flush=True)
    return {"tower": name, "side": tower.side, "workloads": rows}


def table(body: Mapping[str, Any]) -> str:
    """Return a Markdown table of milliseconds, a row per tower and number of images."""
    rows = [(tower["tower"], row) for tower in body["towers"] for row in tower["workloads"]]
    labels = list(dict.fromkeys(label for _, row in rows for label in row["ms"]))
    shown = []
    for name, row in rows:
        cells = [f"{row['ms'][label]:.2f}" if label in row["ms"] else "-" for label in labels]
        shown.append((name, str(row["images"]), *cells, f"{row['over eager']:.2f}"))
    return markdown(("tower", "images", *labels, "over eager"), shown)


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the towers that the command line names, and write the file after each tower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--towers", nargs="+", default=list(TOWERS), choices=tuple(TOWERS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument(
        "--no-compile",
        nargs="*",
        choices=tuple(TOWERS),
        help="leave out the compiled forms, of these towers or, without names, of all",
    )
    parser.add_argument("--others", nargs="+", default=list(OTHERS), choices=OTHERS)
    parser.add_argument("--tiny", action="store_true", help="small towers, for a test")
    parser.add_argument("--table", type=Path, help="print the table of a results file")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    body: dict[str, Any] = {"about": about(options.runs), "towers": []}
    for name in options.towers:
        body["towers"].append(measure(name, options))
        if options.json is not None:
            write_results(options.json, body)


if __name__ == "__main__":
    main()
