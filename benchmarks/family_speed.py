"""The speed of CUDA graphs and of transformers on one GPU, for one tower per newer family.

    python -m benchmarks.family_speed --json benchmarks/results/family_speed_h200.json
    python -m benchmarks.family_speed --table benchmarks/results/family_speed_h200.json

Towers have their real size and random weights in bfloat16. Each workload is a list of noise images,
which are preprocessed once, before the timing. ``hf_ms`` is transformers' vision tower and
projector (sdpa), on inputs in the layout of transformers' processor; for DeepSeek-V4, it is timm's
tower. dots.ocr and Kimi-K3 have no tower in either; for them, ``own_ms`` is our encoder as it is,
without graphs. Molmo2's pooling and projector and LLaVA-OneVision's newlines are in our time alone.
``graphed_ms`` is a call of a ``GraphedEncoder`` whose token budgets are exactly the tokens of the
workloads. All calls run in turn, and each figure is a median.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown
from benchmarks.speed.measure import empty_cache
from encoders.base.encoder import Encoder
from encoders.base.paths_encoder import PathsEncoder
from encoders.contract import VisionInputs
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, Grids
from tests.oracles.references.minicpm_v import side_by_side
from tests.oracles.references.pixtral import pixtral_states
from tests.oracles.references.siglip import siglip2_inputs
from vitgraph.timing import medians

TOWERS = (
    *("glm4v", "glm_ocr", "glm5_next", "pixtral", "siglip", "siglip2", "gemma3", "gemma4"),
    *("gemma4_e2b", "moonvit", "paddleocr_vl", "idefics3", "lfm2_vl", "lfm2_5_vl", "llama4"),
    *("minimax_m3", "ernie4_5_vl", "granite_docling", "cosmos3_edge", "deepseek_ocr2"),
    *("deepseek_v4", "minicpm_v", "hunyuan_vl", "muse_glimmer", "paligemma", "modernvbert"),
    *("janus", "llava_onevision", "molmo2", "nemotron"),
)
"""The towers that are measured, by their names in ``tests/oracles/references``."""
WITHOUT_PEER = ("dots_ocr", "kimi_k3")
"""The towers that no other library has outside an engine; measured beside our eager encoder."""
RIGHT_SINCE = {"minimax_m3": Version("5.23")}
"""The first version of transformers whose tower is correct; in 5.17, the rotary embedding of
MiniMax-M3's is wrong and images attend to each other."""
WORKLOADS = {
    "1x224": [(224, 224)],
    "1x1024": [(1024, 1024)],
    "8x448": [(448, 448)] * 8,
    "mix8": [
        (224, 224), (640, 480), (480, 640), (1280, 720), (1024, 1024), (336, 336), (512, 896),
        (768, 768),
    ],
}  # fmt: skip
"""The (width, height) of each image of a workload, by the name of the workload."""
Call = Callable[[], Tensor]
"""A function that runs transformers' tower and returns tokens."""


class Workload(NamedTuple):
    """The images of a workload, preprocessed."""

    inputs: VisionInputs

    @property
    def given(self) -> tuple[Any, ...]:
        """What a call of a single-path encoder takes: pixels and grids."""
        (path,) = self.inputs.paths.values()
        return path.pixel_values, path.grid_thw.tolist()


def glm_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs transformers' GLM tower, with one grid row per pair of frames."""
    rows = torch.tensor([[1, h, w] for t, h, w in grids for _ in range(t)], device=pixels.device)
    return lambda: reference(pixels, rows).pooler_output


def pixtral_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs Pixtral's tower and projector on images padded to one size."""
    held: list[Any] = []

    def record(batch: Tensor, image_sizes: Tensor) -> SimpleNamespace:
        held.extend((batch, image_sizes))
        return SimpleNamespace(last_hidden_state=[batch])

    record.config = reference.vision_tower.config  # type: ignore[attr-defined]
    pixtral_states(record, pixels, grids, reference.merge)
    batch, sizes = held

    def call() -> Tensor:
        hidden = reference.vision_tower(batch, image_sizes=sizes).last_hidden_state[0]
        return reference.multi_modal_projector(hidden, sizes)

    return call


def siglip2_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs SigLIP2 NaFlex on patches padded to the longest image."""
    inputs = siglip2_inputs(pixels, torch.tensor(grids))
    moved = {name: value.to(pixels.device) for name, value in inputs.items()}
    return lambda: reference(**moved).last_hidden_state


def gemma3_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs Gemma 3's tower and projector on images of one size."""
    return lambda: reference["projector"](reference["tower"](pixels).last_hidden_state)


def gemma4_call(reference: Any, pixels: Tensor, grids: Grids, longest: int = 2520) -> Call:
    """Return a function that runs Gemma 4's tower and projector on images padded to ``longest``
    patches."""
    sizes = [(h, w) for t, h, w in grids for _ in range(t)]
    batch = pixels.new_zeros(len(sizes), longest, pixels.shape[1])
    places = torch.full((len(sizes), longest, 2), -1, device=pixels.device)
    rows = pixels.split([h * w for h, w in sizes])
    for number, ((h, w), patches) in enumerate(zip(sizes, rows, strict=True)):
        batch[number, : h * w] = patches / 2 + 0.5
        column, row = torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy")
        places[number, : h * w] = torch.stack((column, row), -1).flatten(0, 1).to(places)

    def call() -> Tensor:
        out = reference["vision_tower"](pixel_values=batch, pixel_position_ids=places)
        return reference["embed_vision"](out.last_hidden_state)

    return call


def moonvit_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs Kimi-K2.5's tower and projector."""
    side = reference.vision_tower.config.patch_size
    rows, grid_thw = pixels.unflatten(1, (3, side, side)), torch.tensor(grids, device=pixels.device)
    return lambda: reference.mm_projector(reference.vision_tower(rows, grid_thw).pooler_output)


def paddle_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs PaddleOCR-VL's tower and projector."""
    side = reference["tower"].config.patch_size
    patches, grid_thw = pixels.view(1, -1, 3, side, side), torch.tensor(grids, device=pixels.device)
    tower, projector = reference["tower"], reference["projector"]
    return lambda: projector(tower(patches, grid_thw).last_hidden_state, grid_thw)


def idefics3_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs Idefics3's tower and connector on square tiles."""
    return lambda: reference["connector"](reference["tower"](pixels).last_hidden_state)


def lfm2_call(reference: Any, pixels: Tensor, grids: Grids, longest: int = 1024) -> Call:
    """Return a function that runs LFM2-VL's tower and projector on views padded to ``longest``
    patches."""
    padded = siglip2_inputs(pixels, torch.tensor(grids))
    inputs = {name: value.to(pixels.device) for name, value in padded.items()}
    more = longest - inputs["pixel_values"].shape[1]
    inputs["pixel_values"] = nn.functional.pad(inputs["pixel_values"], (0, 0, 0, more))
    inputs["pixel_attention_mask"] = nn.functional.pad(inputs["pixel_attention_mask"], (0, more))
    shapes, lengths = inputs["spatial_shapes"], inputs["pixel_attention_mask"].sum(1)

    def call() -> Tensor:
        hidden, tokens = reference["tower"](**inputs).last_hidden_state, []
        for view, length, (h, w) in zip(hidden, lengths, shapes, strict=True):
            rows = reference["projector"](view[:length].reshape(1, h, w, -1))
            tokens.append(rows.flatten(0, 2))
        return torch.cat(tokens)

    return call


def llama4_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs Llama 4's tower and projector on square tiles."""
    return lambda: reference["projector"](
        reference["tower"](pixels).last_hidden_state.flatten(0, 1)
    )


def minimax_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs MiniMax-M3's tower and projector."""
    tower, grid_thw = reference.tower, torch.tensor(grids, device=pixels.device)
    return lambda: reference.projector(tower(pixels, grid_thw=grid_thw).last_hidden_state[0])


def ernie_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs ERNIE-4.5-VL's tower and resampler."""
    tower, resampler = reference.vision_tower, reference.resampler_model
    grid_thw = torch.tensor(grids, device=pixels.device)
    return lambda: resampler(tower(pixels, grid_thw).last_hidden_state, grid_thw)


def cosmos3_edge_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs Cosmos3-Edge's tower and merger."""
    tower, grid_thw = reference["tower"], torch.tensor(grids, device=pixels.device)
    return lambda: reference["merger"](tower(pixels, grid_thw).last_hidden_state)


def minicpm_call(reference: Any, pixels: Tensor, grids: Grids) -> Call:
    """Return a function that runs MiniCPM-V's tower and merger on patches side by side."""
    tower, merger, inside = reference["tower"], reference["merger"], reference.merges_inside
    row = side_by_side(pixels, tower.config.patch_size)
    shapes = torch.tensor([[h, w] for t, h, w in grids for _ in range(t)], device=pixels.device)

    def call() -> Tensor:
        out = tower(row, target_sizes=shapes, use_vit_merger=inside)
        return torch.cat(merger(out.last_hidden_state, shapes // 2 if inside else shapes))

    return call


def path_call(name: str, reference: nn.Module, load: Workload) -> Call:
    """Return a function that runs the reference of the tests on one input path after another."""
    parts = [path for path in load.inputs.paths.values() if len(path.pixel_values)]
    given = [(part.pixel_values, part.grid_thw.to(part.pixel_values.device)) for part in parts]
    output = BY_NAME[name].output
    return lambda: torch.cat([output(reference, *one).pooler_output for one in given])


def their_call(name: str, reference: nn.Module, load: Workload) -> Call:
    """Return a function that runs the tower of the other library on the images of a workload."""
    if name not in CALLS:
        return path_call(name, reference, load)
    paths = load.inputs.paths.values()
    pixels = torch.cat([path.pixel_values for path in paths])
    return CALLS[name](reference, pixels, torch.cat([path.grid_thw for path in paths]).tolist())


CALLS: dict[str, Callable[[Any, Tensor, Grids], Call]] = {
    "glm4v": glm_call,
    "glm_ocr": glm_call,
    "glm5_next": glm_call,
    "pixtral": pixtral_call,
    "siglip": lambda reference, pixels, grids: lambda: reference(pixels).last_hidden_state,
    "siglip2": siglip2_call,
    "gemma3": gemma3_call,
    "gemma4": gemma4_call,
    "gemma4_e2b": gemma4_call,
    "moonvit": moonvit_call,
    "paddleocr_vl": paddle_call,
    "idefics3": idefics3_call,
    "lfm2_vl": lfm2_call,
    "lfm2_5_vl": lfm2_call,
    "llama4": llama4_call,
    "minimax_m3": minimax_call,
    "ernie4_5_vl": ernie_call,
    "granite_docling": lambda reference, pixels, grids: lambda: reference(pixels).pooler_output,
    "cosmos3_edge": cosmos3_edge_call,
    "minicpm_v": minicpm_call,
}
"""How to run a tower of transformers on the pixels and grids of all input paths together, where
the reference of the tests would not do: it takes hooks, loops or lists of Python for a comparison.

An input path is a kind of view that an encoder takes, such as "image" or "tiles".
"""


def build(
    name: str,
    changes: Mapping[str, Any],
    device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Encoder, nn.Module | None]:
    """Build our encoder and transformers' tower with the same random weights.

    ``name`` is one of :data:`TOWERS`, or of :data:`WITHOUT_PEER` with None for the other tower;
    ``changes`` are fields of its config to replace.
    """
    from tests.oracles.configs import edited

    family = BY_NAME[name]
    config = edited(family.config, **changes)
    torch.manual_seed(0)
    with torch.device(device):
        encoder = family.encoder_class(family.config_class.from_hf(config)).to(dtype)
        if name in WITHOUT_PEER:
            return encoder.eval().requires_grad_(False), None
        reference = family.reference(config)
    # ``to(dtype)`` would cast Llama 4's complex rotary angles, too.
    reference = reference.bfloat16() if dtype == torch.bfloat16 else reference.float()
    reference.load_state_dict(family.keys(encoder.state_dict()), strict=True)
    return encoder.eval().requires_grad_(False), reference.eval().requires_grad_(False)


def prepare(encoder: Encoder, sizes: Sequence[tuple[int, int]]) -> Workload:
    """Make noise images of the given sizes, and preprocess them for the encoder, on its device."""
    images = [
        torch.randint(0, 256, (3, height, width), dtype=torch.uint8) for width, height in sizes
    ]
    weight = next(encoder.parameters())
    return Workload(encoder.preprocess(images=images).to(weight.device, weight.dtype))


def graphs_of(encoder: Encoder, loads: Sequence[Workload]) -> tuple[GraphedEncoder, list[int]]:
    """Wrap an encoder in graphs whose token budgets are the tokens of the workloads.

    Returns:
        The graphs, and the token counts of the workloads.
    """
    paths: Mapping[str, Any] = (
        encoder.paths if isinstance(encoder, PathsEncoder) else {"image": encoder}
    )
    budgets: dict[str, list[int]] = {}
    totals, items = [0] * len(loads), 1
    for name, path in paths.items():
        specs = [path.item_specs(load.inputs.paths[name].grid_thw) for load in loads]
        tokens = [sum(spec.output_tokens for spec in of) for of in specs]
        budgets[name] = sorted(set(tokens) - {0})
        totals = [total + more for total, more in zip(totals, tokens, strict=True)]
        items = max(items, *map(len, specs))
    graphed = GraphedEncoder(encoder, budgets, max_batch_size=items)
    return graphed.capture(progress=False), totals


def measure(
    name: str, encoder: Encoder, reference: nn.Module | None, runs: int, sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure one tower in every workload, as CUDA graphs and in transformers.

    Without a ``reference``, our encoder without graphs takes its place.
    """
    loads = {key: prepare(encoder, images) for key, images in sizes.items()}
    graphed, totals = graphs_of(encoder, list(loads.values()))
    rows = []
    for (key, load), tokens in zip(loads.items(), totals, strict=True):
        given = (load.inputs,) if isinstance(encoder, PathsEncoder) else load.given
        ours: Callable[[], object] = partial(graphed, *given)
        theirs: Callable[[], object] = (
            their_call(name, reference, load) if reference is not None else partial(encoder, *given)
        )
        calls = {"own_ms" if reference is None else "hf_ms": theirs, "graphed_ms": ours}
        times = medians(calls, runs)
        faster = next(iter(times.values())) / times["graphed_ms"]
        rows.append({"workload": key, "tokens": tokens, **times, "faster": faster})
        print(f"{name:13}{key:8}{tokens:7} tokens  {times}  {faster:.2f}x", flush=True)
    kernels = sorted({str(budget.kernel) for budget in graphed.stats().budgets})
    eager = graphed.stats().eager_calls
    graphed.release()
    return {"tower": name, "kernels": kernels, "eager_calls": eager, "workloads": rows}


def table(body: Mapping[str, Any]) -> str:
    """Return a Markdown table of our milliseconds and transformers', per tower and workload."""
    head = ("tower", "images", "tokens", "transformers, ms", "graphs, ms", "faster")
    rows = [
        (
            tower["tower"],
            row["workload"],
            str(row["tokens"]),
            f"{row['hf_ms']:.1f}" if "hf_ms" in row else f"- (our eager: {row['own_ms']:.1f})",
            f"{row['graphed_ms']:.2f}",
            f"{row['faster']:.2f}x",
        )
        for tower in body["towers"]
        for row in tower["workloads"]
    ]
    return markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every tower that the command line names, and write the file after each tower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--towers", nargs="*", default=[*TOWERS, *WITHOUT_PEER], choices=[*TOWERS, *WITHOUT_PEER]
    )
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--table", type=Path, help="print the table of a results file")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    body: dict[str, Any] = {"about": about(options.runs), "towers": []}
    for name in options.towers:
        needed = RIGHT_SINCE.get(name, Version("5"))
        if Version(transformers.__version__) < needed:
            print(f"{name}: left out, transformers {transformers.__version__} is before {needed}")
            continue
        encoder, reference = build(name, {}, "cuda")
        with torch.no_grad():
            body["towers"].append(measure(name, encoder, reference, options.runs, WORKLOADS))
        del encoder, reference
        empty_cache()
        if options.json is not None:
            write_results(options.json, body)


if __name__ == "__main__":
    main()
