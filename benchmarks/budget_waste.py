"""The padding in replays of one image each, for several choices of token budgets.

A CUDA graph is captured for a token budget, and every image is padded to the smallest budget that
holds it. The padding is sum(padded tokens) / sum(real tokens) - 1.

    python -m benchmarks.budget_waste --json benchmarks/results/budget_waste.json  (in a clone)

The image sizes are the 1,000 fixed ones of ``benchmarks/traffic/sizes.py``, in all and by class,
and its nine random lists, each resized by the preprocessing of the encoder family. Only images
between the smallest and the largest budget count. A larger image runs eagerly without padding; a
smaller image is padded to the smallest budget, whatever the other budgets are. The shares of both
are printed. Nothing is captured or timed: this is arithmetic, the same on every machine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown
from benchmarks.traffic.sizes import Size, fixed_sizes, other_lists
from encoders import InternViT, Qwen2_5VLEncoder, Qwen2VLEncoder, Qwen3VLEncoder
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderItemSpec, Grid
from encoders.inputs.patches import PatchPreprocessor
from encoders.inputs.pixel_rules import PixelRules
from encoders.inputs.sizes import best_tiling, smart_resize
from encoders.intern.intern_vit import InternViTConfig
from encoders.intern.intern_vit_pixels import TilePreprocessor
from encoders.qwen.qwen2_5_vl import Qwen2_5VLConfig
from encoders.qwen.qwen2_vl import Qwen2VLConfig
from encoders.qwen.qwen3_vl import Qwen3VLConfig
from graphwrap import Budget, fit_budgets
from graphwrap.budgets import Batch, choose_budgets

MOST = 48
QWEN2_5 = {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}


def towers() -> dict[str, VisionEncoder]:
    """Return one encoder per family with its real patch and tile sizes, without weights.

    For Qwen2-VL the limit of its repos is set, 12.8 megapixels per image, because the default
    without a repo's files is one megapixel.
    """
    smaller = PatchPreprocessor.published(
        "qwen2_vl", patch_size=14, temporal_patch_size=2, merge_size=2
    )
    published = replace(smaller, images=PixelRules(56 * 56, 16384 * 28 * 28))
    with torch.device("meta"):
        return {
            "Qwen2-VL p14": Qwen2VLEncoder(Qwen2VLConfig.from_hf({"depth": 1}), published),
            "Qwen2-VL p14, 1 MP": Qwen2VLEncoder(Qwen2VLConfig.from_hf({"depth": 1}), smaller),
            "Qwen2.5-VL p14": Qwen2_5VLEncoder(
                Qwen2_5VLConfig.from_hf({**QWEN2_5, "depth": 1, "fullatt_block_indexes": [0]}),
                published,
            ),
            "Qwen3-VL p16": Qwen3VLEncoder(
                Qwen3VLConfig.from_hf({"depth": 1, "deepstack_visual_indexes": []})
            ),
            "InternViT 448 tiles": InternViT(
                InternViTConfig.from_hf(
                    {
                        "force_image_size": 448,
                        "max_dynamic_patch": 12,
                        "dynamic_image_size": True,
                        "use_thumbnail": True,
                        "llm_config": {"hidden_size": 896},
                        "vision_config": {"num_hidden_layers": 1, "image_size": 448},
                    }
                )
            ),
        }


def grid_of(encoder: VisionEncoder, size: Size) -> Grid:
    """Return the patch grid (t, h, w) that the encoder's preprocessing makes of this image size."""
    width, height = size
    rules = encoder.preprocessor
    if isinstance(rules, TilePreprocessor):
        columns, rows = best_tiling(
            width, height, rules.min_tiles, rules.max_tiles, rules.image_size
        )
        tiles = columns * rows + (rules.use_thumbnail and columns * rows > 1)
        side = rules.image_size // rules.patch_size
        return int(tiles), side, side
    assert isinstance(rules, PatchPreprocessor)
    tall, wide = smart_resize(
        height,
        width,
        rules.patch_size * rules.merge_size,
        rules.images.min_pixels,
        rules.images.max_pixels,
    )
    return 1, tall // rules.patch_size, wide // rules.patch_size


def budget_sets(
    encoder: VisionEncoder, specs: Sequence[EncoderItemSpec]
) -> dict[str, list[Budget]]:
    """Return several choices of at most 48 token budgets, by name.

    The choice "fit_budgets" is fitted to ``specs``, the items on which it is then judged.
    """
    low, high = encoder.budget_range
    doublings = round(math.log2(high / low))
    powers = [low * 2**step for step in range(doublings + 1)]
    geometric = [round(low * (high / low) ** (step / (MOST - 1))) for step in range(MOST)]
    seen = [spec.output_tokens for spec in specs if low <= spec.output_tokens <= high]
    given = {
        "default": None,
        "powers of two": powers,
        "geometric": whole(encoder, geometric),
        "fit_budgets": fit_budgets(seen, MOST),
    }
    return {name: list(choose_budgets(encoder, tokens).budgets) for name, tokens in given.items()}


def whole(encoder: VisionEncoder, tokens: Sequence[int]) -> list[int]:
    """Return token counts replaced by counts that an image can have, without repetitions."""
    specs = encoder.item_specs([encoder.grid_for(count) for count in tokens])
    return sorted({spec.output_tokens for spec in specs})


def padded(budgets: Sequence[Budget], spec: EncoderItemSpec) -> int | None:
    """Return the tokens of the smallest budget that holds an image; None if no budget does."""
    load = Batch.of([spec])
    return min((b.tokens for b in budgets if b.exceeded_by(load) is None), default=None)


def waste(budgets: Sequence[Budget], specs: Sequence[EncoderItemSpec]) -> dict[str, float]:
    """Return the padding of images between the smallest and the largest budget, the share of images
    below the smallest, and the share that runs eagerly."""
    low, high = min(b.tokens for b in budgets), max(b.tokens for b in budgets)
    within = [spec for spec in specs if low <= spec.output_tokens <= high]
    places = [(padded(budgets, spec), spec.output_tokens) for spec in within]
    taken = [(budget, real) for budget, real in places if budget is not None]
    real = sum(real for _, real in taken)
    return {
        "padding": sum(budget for budget, _ in taken) / real - 1 if real else 0.0,
        "below": sum(spec.output_tokens < low for spec in specs) / max(len(specs), 1),
        "eager": 1 - (len(taken) + sum(s.output_tokens < low for s in specs)) / max(len(specs), 1),
    }


def report() -> dict[str, Any]:
    """Return the padding by family, choice of budgets and list of image sizes.

    For the fixed list, it is also given by class of images.
    """
    lists = {"fixed": fixed_sizes(), **other_lists()}
    result: dict[str, Any] = {}
    for family, encoder in towers().items():
        specs = {name: specs_of(encoder, sizes) for name, sizes in lists.items()}
        known = [spec for _, spec in specs["fixed"]]
        for choice, budgets in budget_sets(encoder, known).items():
            rows: dict[str, Any] = {
                name: waste(budgets, [spec for _, spec in listed]) for name, listed in specs.items()
            }
            rows["fixed"]["graphs"] = len(budgets)
            rows["fixed"]["classes"] = {
                kind: waste(budgets, [spec for k, spec in specs["fixed"] if k == kind])["padding"]
                for kind in dict(lists["fixed"])
            }
            result.setdefault(family, {})[choice] = rows
    return result


def specs_of(
    encoder: VisionEncoder, sizes: Sequence[tuple[str, Size]]
) -> list[tuple[str, EncoderItemSpec]]:
    """Return, per image size, its class and its token counts in the encoder."""
    specs = encoder.item_specs([grid_of(encoder, size) for _, size in sizes])
    return [(kind, spec) for (kind, _), spec in zip(sizes, specs, strict=True)]


def show(result: dict[str, Any]) -> None:
    """Print two tables of padding: for all lists, then for the classes of the fixed list."""
    lists, kinds = ["fixed", *other_lists()], list(dict(fixed_sizes()))
    head = f"{'family':20} {'choice':14}"
    print(f"{head} {'graphs':>6} |" + "".join(f"{name:>12}" for name in lists))
    for family, by_choice in result.items():
        for choice, rows in by_choice.items():
            cells = "".join(f"{rows[name]['padding']:>12.1%}" for name in lists)
            print(f"{family:20} {choice:14} {rows['fixed']['graphs']:>6} |{cells}")
    print(f"\n{head} {'eager':>6} {'below':>6} |" + "".join(f"{kind:>12}" for kind in kinds))
    for family, by_choice in result.items():
        for choice, rows in by_choice.items():
            row = rows["fixed"]
            cells = "".join(f"{row['classes'][kind]:>12.1%}" for kind in kinds)
            print(f"{family:20} {choice:14} {row['eager']:>6.1%} {row['below']:>6.1%} |{cells}")


def table_of_choices(result: dict[str, Any]) -> str:
    """Return the padding of three choices of budgets on the fixed list of sizes, in Markdown."""
    choices = ("default", "geometric", "powers of two")
    rows = [
        (family, *(_percent(by_choice[choice]["fixed"]) for choice in choices))
        for family, by_choice in result.items()
        if family != "Qwen2.5-VL p14"
    ]
    return markdown(("preprocessing of", *choices), rows)


def table_of_lists(result: dict[str, Any]) -> str:
    """Return the padding of the default budgets on the other lists of sizes, in Markdown."""
    families = [family for family in result if family != "Qwen2.5-VL p14"]
    rows = [
        (name, *(_percent(result[family]["default"][name]) for family in families))
        for name in result[families[0]]["default"]
        if name != "fixed"
    ]
    return markdown(("default budgets", *families), rows)


def _percent(row: dict[str, Any]) -> str:
    return f"{100 * row['padding']:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures here")
    path = parser.parse_args().json
    result = report()
    show(result)
    if path is not None:
        write_results(path, result)


if __name__ == "__main__":
    main()
