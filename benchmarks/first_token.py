"""Time to the first token of a Qwen3-VL model with its vision tower and with ours in its place.

    python -m benchmarks.first_token --json benchmarks/results/first_token_h200.json

The model is transformers' Qwen3-VL with the vision tower of the 8B model and a language model of
four layers, with random weights in bfloat16. A run is one ``generate(max_new_tokens=1)``, with
pixels and token ids on the GPU. The variants take turns; figures are medians in milliseconds.

- ``transformers``: the unchanged model, with sdpa attention.
- ``accelerated``: the model with ``as_vision_tower(encoder.accelerated())`` as its tower.
- ``graphs``: the model with ``as_vision_tower(GraphedEncoder(encoder))`` as its tower.
- ``without a tower``: the model with a module that returns precomputed features as its tower, which
  gives the time of the rest of the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown
from benchmarks.towers import TOWERS
from encoders import Qwen3VLConfig, Qwen3VLEncoder
from encoders.contract import Grid
from graphwrap import GraphedEncoder
from vitgraph.integrations.transformers import as_vision_tower
from vitgraph.timing import medians

IMAGE, START, END = 60, 61, 62
TEXT = {
    "vocab_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 5e6},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""The config of the small language model, without its width, which is set to the tower's."""


def build_model(vision: dict[str, Any], device: str) -> PreTrainedModel:
    """Build a Qwen3-VL model with random weights whose vision tower has this config."""
    width = vision["out_hidden_size"]
    config = AutoConfig.for_model(
        "qwen3_vl",
        vision_config=vision,
        text_config={**TEXT, "hidden_size": width, "intermediate_size": 3 * width},
        image_token_id=IMAGE,
        video_token_id=IMAGE + 3,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16
        )
    return model.eval().requires_grad_(False)


def make_prompt(encoder: Qwen3VLEncoder, grids: list[Grid]) -> dict[str, Tensor]:
    """Make random pixels for these grids, and a prompt with one image token per feature.

    Returns:
        The arguments of ``generate``.
    """
    specs = encoder.item_specs(grids)
    device, rows = encoder.device, sum(spec.input_size for spec in specs)
    ids = [3]
    for spec in specs:
        ids += [START, *[IMAGE] * spec.output_tokens, END]
    tokens = torch.tensor([[*ids, 7, 9]], device=device)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE).long(),
        "pixel_values": torch.randn(rows, *encoder.row_shape, device=device, dtype=encoder.dtype),
        "image_grid_thw": torch.tensor(grids, device=device),
    }


def measure(
    vision: dict[str, Any], workloads: dict[str, list[Grid]], device: str, runs: int
) -> list[dict[str, Any]]:
    """Time the first token with every variant of the vision tower.

    Args:
        vision: the config of the tower.
        workloads: the patch grids of the images of each workload, by its name.
        device: the device to measure on.
        runs: number of timed runs of each variant.

    Returns:
        A row of medians per workload.
    """
    model = build_model(vision, device)
    with torch.device(device):
        encoder = (
            Qwen3VLEncoder(Qwen3VLConfig.from_hf({"vision_config": vision}))
            .to(torch.bfloat16)
            .eval()
        )
    encoder.to(torch.bfloat16).eval().requires_grad_(False)
    encoder.load_state_dict(model.model.visual.state_dict(), strict=True)
    towers: dict[str, nn.Module] = {
        "transformers": model.model.visual,
        "accelerated": as_vision_tower(encoder.accelerated()),
        "graphs": as_vision_tower(GraphedEncoder(encoder).capture(progress=False)),
    }

    def variant(name: str, prompt: dict[str, Any]) -> Callable[[], None]:
        def run() -> None:
            model.model.visual = towers[name]
            model.generate(**prompt, max_new_tokens=1, do_sample=False)

        return run

    rows = []
    for workload, grids in workloads.items():
        prompt = make_prompt(encoder, grids)
        towers["without a tower"] = KnownFeatures(towers["accelerated"], prompt)
        calls = {name: variant(name, prompt) for name in towers}
        ms = medians(calls, runs)
        tokens = int((prompt["input_ids"] == IMAGE).sum())
        rows.append(
            {
                "workload": workload,
                "image_tokens": tokens,
                **{f"{name} ms": round(value, 2) for name, value in ms.items()},
                "speedup": round(ms["transformers"] / ms["graphs"], 2),
            }
        )
    return rows


def table(body: Mapping[str, Any]) -> str:
    """Return the milliseconds of every workload as a Markdown table."""
    ways = {
        "transformers": "transformers' tower",
        "accelerated": "`as_vision_tower(accelerated)`",
        "graphs": "`as_vision_tower(GraphedEncoder)`",
        "without a tower": "no tower at all",
    }
    rows = [(row["workload"], *(f"{row[f'{way} ms']:.1f}" for way in ways)) for row in body["rows"]]
    return markdown(("images", *ways.values()), rows)


class KnownFeatures(nn.Module):
    """A vision tower that returns precomputed features, to time the rest of a model alone."""

    def __init__(self, tower: Any, prompt: dict[str, Tensor]) -> None:
        super().__init__()
        self.features = tower(prompt["pixel_values"], prompt["image_grid_thw"])
        self.dtype, self.spatial_merge_size = tower.dtype, tower.spatial_merge_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the features in a new mapping, because the model modifies the mapping."""
        return type(self.features)(**self.features)


def main() -> None:
    """Measure the time to the first token; print the rows, and write them to ``--json``'s file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    tower = TOWERS["Qwen3-VL-8B"]
    names = ("1x224", "1x448", "1x1024", "8x448", "mix8")
    workloads = {name: [(t, h, w) for t, h, w in tower.workloads[name]] for name in names}
    vision = dict(tower.config)["vision_config"]
    rows = measure(dict(vision), workloads, "cuda", options.runs)
    result = {"about": about(options.runs), "tower": tower.name, "rows": rows}
    print(json.dumps(result, indent=1))
    if options.json:
        write_results(options.json, result)


if __name__ == "__main__":
    main()
