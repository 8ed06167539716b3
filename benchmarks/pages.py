"""Writes the figures of all pages: the block between two markers is what a script prints.

    python -m benchmarks.pages    (rewrites every block, and draws the charts of speed)

A block begins with the comment ``<!-- begin: NAME -->`` and ends with ``<!-- end -->``, on lines of
their own or inside a sentence. :data:`BLOCKS` has the function of each name. All read committed
results and measure nothing.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from benchmarks import (
    budget_waste,
    clips,
    decoders,
    encode_many,
    family_speed,
    fetch,
    first_token,
    folders,
    fp8,
    gate,
    image_towers,
    starts,
)
from benchmarks.engines.table import drawn, load
from benchmarks.engines.table import speed as engine_times
from benchmarks.measuring.machine import ROOT
from benchmarks.measuring.tables import markdown
from benchmarks.scale.__main__ import generated_parts
from benchmarks.table import __main__ as speed
from benchmarks.table.charts import draw_bars, draw_picture
from benchmarks.table.results import graphed, median, over_vllm, theirs, vllm_best
from vitgraph.integrations.model_towers.records import CALLS, NO_MODEL, REFUSED
from weights import FAMILIES

MARKED = re.compile(r"(<!-- begin: (.+?) -->\s*).*?(\s*<!-- end -->)", re.S)
DOCS = tuple(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))
PAGES = ("README.md", "benchmarks/RESULTS.md", *DOCS)


@cache
def results(name: str) -> dict[str, Any]:
    """Return the committed results in ``benchmarks/results/<name>.json``."""
    return dict(json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8")))


def tower_classes() -> str:
    """Return two tables: the models of transformers that each encoder fits into, and the others."""
    rows = []
    for encoder, call in CALLS.items():
        kinds: dict[Any, list[str]] = {}
        for kind, place in call.models.items():
            kinds.setdefault(place, []).append(f"`{kind}`")
        for place, names in kinds.items():
            parts = " and ".join(f"`{part}`" for part in place if part)
            rows.append((f"`{encoder.__name__}`", ", ".join(names), parts))
    refused = [(f"`{encoder.__name__}`", reason) for encoder, reason in REFUSED.items()]
    refused.append(("all others", NO_MODEL))
    head = ("encoder", "models of transformers, by `model_type`", "replaced")
    return f"{markdown(head, rows)}\n\n{markdown(('not supported', 'why'), refused)}"


def families() -> str:
    """Return the table of encoder classes, and of checkpoints that each reads."""
    facts = [family.facts for family in FAMILIES.values()]
    rows = [(f"`{family.encoder}`", family.examples) for family in facts]
    return markdown(("class", "checkpoints, for example"), rows)


def speed_row(tower: str, workload: str) -> Mapping[str, Any]:
    """Return the results of one workload in the table of speed."""
    rows = speed.table_rows(results("speed_h100"))
    return next(row for of, row in rows if (of["tower"], row["workload"]) == (tower, workload))


def small_image() -> str:
    """Return the milliseconds of an image of 448x448, and those of vLLM and transformers."""
    row, number = speed_row("Qwen3-VL-8B", "1x448"), speed.number
    vllm = number(vllm_best()["Qwen3-VL-8B"]["1x448"])
    return f"{number(graphed(row))} ms (vLLM {vllm}, transformers {number(theirs(row))})"


def small_input() -> str:
    """Return the milliseconds of an image of 448x448, accelerated and with a graph."""
    row, number = speed_row("Qwen3-VL-8B", "1x448"), speed.number
    eager = number(median(row, "accelerated_ms"))
    return f"{eager} ms at 448x448 with `accelerated()` alone, and {number(graphed(row))} ms"


def windows(figure: str) -> str:
    """Return the milliseconds of eight images of 448x448 through the tower that has windows."""
    row = speed_row("Qwen2.5-VL-7B", "8x448")
    return speed.number(graphed(row) if figure == "graphed_ms" else median(row, figure))


def gains(kernels: str) -> str:
    """Return the least and the largest gain over vLLM, each with its workload."""
    found = over_vllm(results("speed_h100")["towers"], kernels)
    ends = sorted(found, key=lambda name: found[name])
    return " to ".join(f"{found[name]:.2f}x ({name})" for name in (ends[0], ends[-1]))


def cost_of_a_call() -> str:
    """Return the milliseconds that a call with one small image takes beyond a bare replay."""
    alone = [
        (graphed(row) or 0.0) - (median(row, "bare_ms") or 0.0)
        for _, row in speed.table_rows(results("speed_h100"))
        if row["workload"] in ("1x224", "1x448", "1 tile")
    ]
    return f"{min(alone):.2f} to {max(alone):.2f} ms"


BLOCKS: Mapping[str, Callable[[], str]] = {
    "families": families,
    "number of families": lambda: str(len(FAMILIES)),
    "speed": lambda: speed.page(results("speed_h100")),
    "small image": small_image,
    "small input": small_input,
    "gain with torch alone": partial(gains, "torch"),
    "gain with the extra": partial(gains, "auto"),
    "windows": partial(windows, "hf_ms"),
    "windows in one call": partial(windows, "hf_flash_ms"),
    "windows in graphs": partial(windows, "graphed_ms"),
    "cost of a call": cost_of_a_call,
    "fp8": lambda: fp8.table(results("fp8_h200")),
    "padding": lambda: budget_waste.table_of_choices(results("budget_waste")),
    "padding of other lists": lambda: budget_waste.table_of_lists(results("budget_waste")),
    "first load": lambda: fetch.table(results("fetch")),
    "streams": lambda: encode_many.sentence(results("encode_many_h200")),
    "starts": lambda: "\n\n".join(
        starts.table(results(f"starts_{gpu}")) for gpu in ("h200", "h100")
    ),
    "from bytes": lambda: gate.table(results("gate_h100")),
    "folders": lambda: folders.table(results("folders_h100")),
    "one image from bytes": lambda: gate.sentence(results("gate_h100")),
    "clips": clips.tables,
    "decoding on the GPU": lambda: decoders.sentence(results("decoders_h200")),
    "first token": lambda: first_token.table(results("first_token_h200")),
    "image towers": lambda: image_towers.table(results("image_towers_h100")),
    "large image towers": lambda: image_towers.table(results("image_towers_h200")),
    "newer families": lambda: family_speed.table(results("family_speed_h200")),
    "engines": drawn,
    "engines, raw images": lambda: "\n".join(engine_times(results("engines_raw_h200"))),
    "engines, load": lambda: load(results("engines_load_h200")),
    "models of transformers": tower_classes,
    **{name: partial(generated_parts().__getitem__, name) for name in generated_parts()},
}
"""What each block shows, by its name."""


def filled(page: str) -> str:
    """Return the text of a page with every block written anew."""
    return MARKED.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]().strip()}{match[3]}", page)


def main() -> None:
    """Rewrite all blocks, and draw the charts."""
    argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__).parse_args()
    for name in PAGES:
        path = ROOT / name
        path.write_text(filled(path.read_text("utf-8")), "utf-8")
    draw_picture(results("speed_h100"))
    draw_bars(results("speed_h100"))


if __name__ == "__main__":
    main()
