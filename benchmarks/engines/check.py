"""Tokens, KV blocks and memory of vLLM with this library's vision tower and with its own.

    python -m benchmarks.engines --check --json benchmarks/results/engines_check_h200.json

Per model and vLLM model runner, four engines load one checkpoint with random weights:

- ``reference``: our reference encoder, without accelerated kernels and without CUDA graphs
- ``eager``: our tower with accelerated kernels, without CUDA graphs
- ``ours``: our tower as it runs by default
- ``stock``: vLLM's own tower

The greedy tokens of ``ours`` are compared with those of ``reference`` and ``eager``. ``stock``
shows how often two towers in bfloat16 differ anyway, and how many KV blocks fit without our memory
pool. ``reference`` also answers the requests in the opposite order, which shows how many answers
change with the batching alone. Where an answer first differs, the gap between the log-probabilities
of the reference's two best tokens is recorded: a gap below the rounding of bfloat16 is a tie.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.engines.measure import IMAGE, Engine, describe, recorder
from benchmarks.engines.models import write_model

OPTIONS: dict[str, dict[str, str]] = {
    "reference": {"kernels": "reference", "backend": "eager"},
    "eager": {"backend": "eager"},
    "ours": {},
    "stock": {},
}
"""The options of our tower in each engine, by the name of the engine."""
PARTS = tuple(OPTIONS)
COMPARED, TOKENS = 24, 8
"""The number of requests whose tokens are compared, and the number of tokens per request."""
MIXED = 200
"""The number of requests that the engine ``ours`` must answer when they are sent all at once."""
SIDES = (64, 224, 336, 448, 640, 768, 1024, 1280)


def write_checkpoint(folder: Path, model: str, layers: int | None, device: str) -> Path:
    """Write a model with random weights from a fixed seed into a folder, if there is none yet.

    ``layers`` is the number of layers of the language model; None takes all.
    """
    if any(folder.glob("*.safetensors")):
        return folder
    from transformers import AutoConfig, AutoModelForImageTextToText

    write_model(folder, model, layers)
    written = (folder / "config.json").read_text()
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.from_pretrained(folder)
        drawn = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    drawn.save_pretrained(folder)
    (folder / "config.json").write_text(written)  # restore the config that transformers rewrote
    return folder


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Make prompts with up to three images of mixed sizes; every sixth prompt has no image."""
    dice, made = np.random.default_rng(seed), []
    for number in range(count):
        images = []
        for _ in range(0 if number % 6 == 5 else 1 + number % 3):
            width, height = dice.choice(SIDES, 2)
            pixels = dice.integers(0, 256, (height, width, 3), dtype=np.uint8)
            images.append(Image.fromarray(pixels))
        data = {"multi_modal_data": {"image": images}} if images else {}
        made.append({"prompt": IMAGE * len(images) + f"Request {number}.", **data})
    return made


def answers(engine: Engine, prompts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Send all requests at once; return the greedy ``tokens`` of each, and the ``gaps`` per token.

    A token's gap is its log-probability minus the log-probability of the second best token.
    """
    outputs = [output.outputs[0] for output in engine.answer(prompts, TOKENS, logprobs=2)]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "gaps": [[gap(token) for token in output.logprobs] for output in outputs],
    }


def gap(logprobs: Mapping[int, Any]) -> float:
    """Return the largest of the log-probabilities at one position minus the second largest."""
    best, second, *_ = sorted((one.logprob for one in logprobs.values()), reverse=True)
    return round(best - second, 6)


def tower_stats(model: Any) -> dict[str, Any]:
    """Return the graph statistics of our tower in vLLM; {} if vLLM runs its own tower."""
    if not getattr(model, "vision_tower_ours", False):
        return {}
    stats = model.our_tower.capture().stats().to_dict()
    return {name: value for name, value in stats.items() if name != "budgets"}


def check(
    model: str,
    part: str,
    layers: int | None,
    runner: str,
    record: Callable[[dict[str, Any]], None],
    *,
    start: Callable[..., Engine] = Engine,
    place: Path = Path("/tmp/vitgraph_check"),
    device: str = "cuda",
) -> None:
    """Run one engine, and record its tokens, its KV blocks and the memory of our tower.

    Args:
        model: name of the model.
        part: name of the engine, a key of :data:`OPTIONS`.
        layers: number of layers of the language model; None takes all.
        runner: "1" for vLLM's V2 model runner, else "0".
        record: writes a result.
        start: creates the engine.
        place: folder for the checkpoint.
        device: device on which the random weights are made.
    """
    os.environ |= {
        "VLLM_USE_V2_MODEL_RUNNER": runner,
        "VITGRAPH_VLLM_OPTIONS": json.dumps(OPTIONS[part]),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    folder = write_checkpoint(place / f"{model}-{layers}", model, layers, device)
    mode = "stock" if part == "stock" else "ours"
    engine = start(
        folder,
        mode,
        compiled=False,
        load_format="auto",
        enable_mm_processor_stats=False,
        max_num_seqs=64,
    )
    cache = engine.llm.llm_engine.vllm_config.cache_config
    row = {
        "model": model,
        "layers": layers or "all",
        "runner": runner,
        "part": part,
        "kv_blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        **answers(engine, requests(COMPARED, 0)),
    }
    record(row)
    if part == "reference":
        opposite = answers(engine, requests(COMPARED, 0)[::-1])
        row["tokens_in_opposite_order"] = opposite["tokens"][::-1]
    if part == "ours":
        row["mixed_requests_answered"] = len(answers(engine, requests(MIXED, 1))["tokens"])
    row["tower"] = engine.llm.apply_model(tower_stats)[0]
    record(row)


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the engines' tokens with the reference's, and our KV blocks with vLLM's.

    ``rows`` are results of :func:`check`; there is one comparison per model and model runner.
    """
    found = []
    groups = {(row["model"], row["layers"], row["runner"]) for row in rows}
    for group in sorted(groups, key=str):
        parts = {
            row["part"]: row
            for row in rows
            if (row["model"], row["layers"], row["runner"]) == group
        }
        if set(parts) != set(PARTS):
            continue
        ours, stock, reference = parts["ours"], parts["stock"], parts["reference"]
        wanted, again = reference["tokens"], reference["tokens_in_opposite_order"]
        tower = ours.get("tower", {})
        sizes = ("arena_bytes", "pool_bytes", "cache_bytes", "derived_bytes")
        found.append(
            {
                **dict(zip(("model", "layers", "runner"), group, strict=True)),
                "requests_equal_to_reference": _equal(ours["tokens"], wanted),
                "requests_equal_to_ours_without_graphs": _equal(
                    ours["tokens"], parts["eager"]["tokens"]
                ),
                "stock_requests_equal_to_reference": _equal(stock["tokens"], wanted),
                "reference_requests_equal_in_opposite_order": _equal(again, wanted),
                "median_gap": statistics.median(chain(*reference["gaps"])),
                "gaps_where_ours_differs": gaps_at(ours["tokens"], reference),
                "gaps_where_stock_differs": gaps_at(stock["tokens"], reference),
                "gaps_where_opposite_order_differs": gaps_at(again, reference),
                "requests": len(wanted),
                "kv_blocks": ours["kv_blocks"],
                "stock_kv_blocks": stock["kv_blocks"],
                "tower_mib": round(sum(tower.get(size, 0) for size in sizes) / 2**20),
                "mixed_requests_answered": ours.get("mixed_requests_answered", 0),
            }
        )
    return found


def gaps_at(tokens: Sequence[Sequence[int]], reference: dict[str, Any]) -> list[float]:
    """Return, for each request with other tokens than the reference, the gap at the first of them.

    The gap is the reference's: how much more probable its best token was than its second best.
    """
    rows = zip(tokens, reference["tokens"], reference["gaps"], strict=True)
    parted = [
        [gap for one, other, gap in zip(*row, strict=True) if one != other][:1] for row in rows
    ]
    return sorted(gap for row in parted for gap in row)


def _equal(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    return sum(list(a) == list(b) for a, b in zip(one, other, strict=True))


def main() -> None:
    """Run the engine that ``benchmarks.engines`` names; print the comparison of all engines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", type=json.loads, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    check(**options.one, record=recorder(options.json, describe))
    if options.json:
        for verdict in verdicts(json.loads(options.json.read_text())["rows"]):
            print("verdict", json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
