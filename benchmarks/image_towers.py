"""CLIP, DINO, C-RADIO and SAM 3 as CUDA graphs, beside transformers, timm and open_clip on a GPU.

    python -m benchmarks.image_towers --json benchmarks/results/image_towers_h100.json
    python -m benchmarks.image_towers --towers CLIP-L/14 --turns lock --add --json ...
    python -m benchmarks.image_towers --table benchmarks/results/image_towers_h100.json

Towers have their real size and random weights in bfloat16. A workload is a number of images of
224x224 or of the tower's own size, normalised and on the GPU before the timing; a tower of large
images has fewer. ``graphs`` is a call of a ``GraphedEncoder``; the others are run with their sdpa
attention, as they are, and those that ``--compiled`` names by ``torch.compile`` as well, for the
shape of the workload alone: with ``mode="reduce-overhead"``, which captures CUDA graphs, for one
image and by default for more, or as ``--mode`` says. "over eager" is the time of transformers'
tower, or of timm's where transformers is too old to have it, over that of the graphs. All calls run
in turn, and each figure is a median. The file is written after each workload; with ``--add`` it
keeps the other workloads that it has. After ``--seconds`` nothing more is built or compiled, and a
line says what was left out. A library that is not installed, or too old, is left out.

Compiling takes most of the time, half a minute and more for each tower, library and number of
images. Two processes that are given the same file as ``--turns`` compile at once, and each waits
until the other does nothing before it times anything.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown
from benchmarks.speed.measure import empty_cache
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import VisionInputs
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
MODES = {1: "reduce-overhead"}
"""The ``mode`` of ``torch.compile`` by the number of images; the default of torch for others."""


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


def measure(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure one tower with every number of images, and yield each workload once it is done."""
    tower = TOWERS[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with turn(options, alone=False):
        encoder, built = build(tower, device, options.tiny)
    others = {library: module for library, module in built.items() if library in options.others}
    for count in sorted({min(count, tower.most) for count in options.batches}):
        if is_late(options, f"{name}, {count} images"):
            continue
        side = TINY_SIDE if options.tiny else tower.side
        images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
        inputs = encoder.preprocess([*images]).to(device, torch.bfloat16)
        scaled = (images.to(device) / 127.5 - 1).bfloat16()
        mode = options.mode or MODES.get(count, "default")
        with turn(options, alone=False):
            compiled = compile_towers(name, others, scaled, mode, options)
        calls = {library: partial(call, scaled) for library, call in (others | compiled).items()}
        with turn(options, alone=True):
            row = time_calls(encoder, inputs, calls, options.runs)
        if compiled:
            row["mode"] = mode
        print(name, json.dumps(row), flush=True)
        yield row
    torch.compiler.reset()
    empty_cache()


def time_calls(
    encoder: VisionEncoder,
    inputs: VisionInputs,
    calls: Mapping[str, Callable[[], object]],
    runs: int,
) -> dict[str, Any]:
    """Return the row of a workload: medians of our graphs and of calls of other towers, in turn."""
    count = len(inputs.grid_thw)
    tokens = sum(spec.output_tokens for spec in encoder.item_specs(inputs.grid_thw))
    graphed = GraphedEncoder(encoder, [tokens], max_batch_size=count)
    graphed.capture(progress=False)
    graphs = partial(graphed, inputs.pixel_values, inputs.grid_thw.tolist())
    times = medians({"graphs": graphs, **calls}, runs)
    graphed.release()
    best = min((times[label] for label in calls), default=float("nan"))
    return {
        "images": count,
        "tokens": tokens,
        "ms": times,
        "over eager": times.get("transformers", times.get("timm", best)) / times["graphs"],
        "over the best": best / times["graphs"],
        "goal over eager": GOALS.get(count),
    }


@contextmanager
def turn(options: argparse.Namespace, *, alone: bool) -> Iterator[None]:
    """Keep the turn of this process, which is alone or beside others that are not.

    Without ``--turns`` there are no other processes.
    """
    if options.turns is None:
        yield
        return
    with options.turns.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has the file open, too


def compile_towers(
    name: str,
    others: Mapping[str, nn.Module],
    scaled: Tensor,
    mode: str,
    options: argparse.Namespace,
) -> dict[str, Callable[[Tensor], object]]:
    """Compile the towers of ``--compiled`` for these images, as long as there is time.

    Returns them by their label.
    """
    torch.compiler.reset()  # nothing of another shape, which would make sizes dynamic
    compiled: dict[str, Callable[[Tensor], object]] = {}
    for library, module in others.items():
        if library in options.compiled and not is_late(options, f"{name}, {library}, compiled"):
            call = torch.compile(module, mode=mode, dynamic=False)
            began = time.perf_counter()
            for _ in range(3):  # compiles, captures a graph, replays it
                call(scaled)
            seconds = time.perf_counter() - began
            print(f"{name}: {library} compiled in {seconds:.0f} s ({mode})", flush=True)
            compiled[f"{library}, compiled"] = call
    return compiled


def is_late(options: argparse.Namespace, what: str) -> bool:
    """Return whether the seconds of the command are over, and print what is left out."""
    late = bool(time.perf_counter() > options.end)
    if late:
        print(f"{what}: left out, {options.seconds:g} s are over", flush=True)
    return late


def table(body: Mapping[str, Any]) -> str:
    """Return a Markdown table of milliseconds, a row per tower and number of images.

    Of several compiled towers it shows the fastest, with its library and its mode.
    """
    rows = [(tower["tower"], row) for tower in body["towers"] for row in tower["workloads"]]
    labels = list(dict.fromkeys(label for _, row in rows for label in eager_of(row)))
    any_compiled = any("mode" in row for _, row in rows)
    head = ("tower", "images", *labels, *(["compiled"] if any_compiled else []), "over eager")
    shown = []
    for name, row in rows:
        cells = [f"{row['ms'][label]:.2f}" if label in row["ms"] else "-" for label in labels]
        if any_compiled:
            cells.append(fastest_compiled(row))
        shown.append((name, str(row["images"]), *cells, f"{row['over eager']:.2f}"))
    return markdown(head, shown)


def eager_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of all calls of a workload that are not compiled."""
    return {label: ms for label, ms in row["ms"].items() if not label.endswith(", compiled")}


def fastest_compiled(row: Mapping[str, Any]) -> str:
    """Return the milliseconds of the fastest compiled tower, its library and its mode."""
    found = {label: ms for label, ms in row["ms"].items() if label.endswith(", compiled")}
    if not found:
        return "-"
    label = min(found, key=lambda label: found[label])
    return f"{found[label]:.2f} ({label.removesuffix(', compiled')}, `{row['mode']}`)"


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the towers that the command line names, and write the file after each tower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--towers", nargs="+", default=list(TOWERS), choices=tuple(TOWERS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument(
        "--compiled", nargs="*", default=["timm"], choices=OTHERS, help="the libraries to compile"
    )
    parser.add_argument("--mode", help="of torch.compile, for every number of images")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin nothing after these"
    )
    parser.add_argument("--turns", type=Path, help="a file by which two processes take turns")
    parser.add_argument("--add", action="store_true", help="keep what the results file has")
    parser.add_argument("--others", nargs="+", default=list(OTHERS), choices=OTHERS)
    parser.add_argument("--tiny", action="store_true", help="small towers, for a test")
    parser.add_argument("--table", type=Path, help="print the table of a results file")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    options.end = time.perf_counter() + options.seconds
    machine = about(options.runs)
    if options.json is not None and not options.add:
        options.json.unlink(missing_ok=True)
    for name in options.towers:
        if is_late(options, name):
            continue
        for row in measure(name, options):
            if options.json is not None:
                with turn(options, alone=True):
                    add_row(options.json, machine, name, row)


def add_row(path: Path, machine: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> None:
    """Add a workload to a file of results, in place of the same one there.

    Raises:
        ValueError: the file has the results of another GPU.
    """
    body: dict[str, Any] = {"about": machine, "towers": []}
    if path.exists():
        body = json.loads(path.read_text())
    if body["about"]["gpu"] != machine["gpu"]:
        raise ValueError(
            f"{path}: has rows of {body['about']['gpu']}, and this is {machine['gpu']}; "
            "give another file to --json"
        )
    if body["about"]["commit"] != machine["commit"]:
        row = {**row, "commit": machine["commit"]}
    towers: list[dict[str, Any]] = body["towers"]
    entry = next((tower for tower in towers if tower["tower"] == name), None)
    if entry is None:
        entry = {"tower": name, "side": TOWERS[name].side, "workloads": []}
        towers.append(entry)
    others = [one for one in entry["workloads"] if one["images"] != row["images"]]
    entry["workloads"] = sorted([*others, row], key=lambda one: one["images"])
    write_results(path, body)


if __name__ == "__main__":
    main()
