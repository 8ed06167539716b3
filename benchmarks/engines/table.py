"""Makes the tables of ``docs/engines.md`` from the results of ``benchmarks/engines``.

python -m benchmarks.engines.table --merge A.json B.json      (rows of several runs into one file)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.check import verdicts
from benchmarks.engines.measure import CELLS, MODES, key, write_rows
from benchmarks.measuring.tables import markdown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "engines_h200.json"
CHECKS = ROOT / "benchmarks" / "results" / "engines_check_h200.json"
NOT_RUN = "Not run on a GPU yet."
TOWERS = {"stock": "vLLM eager", "graphs": "vLLM graphs", "ours": "vitgraph", "raw": "raw"}
"""The name in the table of each of :data:`MODES`."""


def drawn() -> str:
    """Return both tables as Markdown; a sentence instead if there are no results."""
    parts = []
    if RESULTS.exists():
        parts += speed(json.loads(RESULTS.read_text()))
    if CHECKS.exists():
        parts += checks(json.loads(CHECKS.read_text()))
    return "\n".join(parts or [NOT_RUN])


def speed(body: dict[str, Any]) -> list[str]:
    """Return the table of times per model and workload: to the first token, and of the tower."""
    about = body["about"]
    runs = {str(row.get("runs", about["runs"])) for row in body["rows"]}
    lines = [
        f"vLLM {about['vllm']}, {about['gpu']}, torch {about['torch']}, bfloat16, random weights "
        f"and images, one request at a time, medians of {' or '.join(sorted(runs))} requests "
        f"in milliseconds ({about['date']}):",
        "",
    ]
    figures = {"encoder_ms": "tower", "first_token_ms": "first token"}
    head = ("model, layers of its language model", "images", "preprocessing")
    shown = []
    rows = {key(row): row for row in body["rows"]}
    modes = [mode for mode in MODES if mode in {row["mode"] for row in body["rows"]}]
    groups = dict.fromkeys((row["model"], row["layers"], row["compiled"]) for row in body["rows"])
    for model, layers, compiled in groups:
        for cell in CELLS:
            of = [rows.get((model, layers, mode, compiled, cell, None, None)) for mode in modes]
            if not any(of):
                continue
            before = next(row["preprocess_ms"] for row in of if row)
            cells = [f"{row[figure]:.1f}" if row else "-" for figure in figures for row in of]
            name = f"{model}, {layers}" + ("" if compiled else ", not compiled")
            name += "" if all(row["flash"] for row in of if row) else ", without flash-attn-4"
            shown.append((name, cell, f"{before:.1f}", *cells))
    titles = [f"{what}: {TOWERS[mode]}" for what in figures.values() for mode in modes]
    lines.append(markdown((*head, *titles), shown))
    return [*lines, "", *[f"- {TOWERS[mode]}: {MODES[mode]}." for mode in modes]]


def load(body: dict[str, Any]) -> str:
    """Return the table of requests per second and first tokens under load, with its caption."""
    about, rows = body["about"], {(row["cell"], row["mode"]): row for row in body["rows"]}
    modes = [mode for mode in MODES if mode in {row["mode"] for row in body["rows"]}]
    first = body["rows"][0]
    caption = (
        f"vLLM {about['vllm']}, {about['gpu']}, {first['model']} with {first['layers']} layers, "
        f"images of six sizes from 224x224 to 1920x1080 in random order, medians and 99th "
        f"percentiles of {first['requests']} first tokens ({about['date']}):"
    )
    units = {"requests_per_second": "requests/s", "p50_ms": "p50, ms", "p99_ms": "p99, ms"}
    head = [f"{TOWERS[mode]}, {unit}" for unit in units.values() for mode in modes]
    shown = [
        (cell.split()[0], *(f"{rows[cell, mode][unit]:.4g}" for unit in units for mode in modes))
        for cell in dict.fromkeys(row["cell"] for row in body["rows"])
    ]
    return f"{caption}\n\n{markdown(('clients', *head), shown)}"


def checks(body: dict[str, Any]) -> list[str]:
    """Return the table of ``--check`` per model and model runner: equal answers, and KV blocks."""
    found, compared, graphs = verdicts(body["rows"]), [], []
    for one in found:
        name = (f"{one['model']}, {one['layers']}", f"V{int(one['runner']) + 1}")
        for what, equal, gaps in (
            ("our tower", "requests_equal_to_reference", "ours"),
            ("vLLM's tower", "stock_requests_equal_to_reference", "stock"),
            (
                "itself, requests in the opposite order",
                "reference_requests_equal_in_opposite_order",
                "opposite_order",
            ),
        ):
            listed = ", ".join(f"{gap:.3f}" for gap in one[f"gaps_where_{gaps}_differs"])
            compared.append((*name, what, f"{one[equal]} of {one['requests']}", listed or "-"))
        cells = (
            f"{one['requests_equal_to_ours_without_graphs']} of {one['requests']}",
            f"{one['median_gap']:.3f}",
            f"{one['kv_blocks']} ({one['stock_kv_blocks']})",
            str(one["tower_mib"]),
            str(one["mixed_requests_answered"]),
        )
        graphs.append((*name, *cells))
    if not found:
        return []
    first = ("model, layers", "model runner")
    reference = ("compared with the reference tower", "equal tokens", "gaps where they differ")
    same = "our tower with graphs and without: equal tokens"
    memory = ("KV blocks (vLLM's tower)", "MiB of our tower")
    head = (*first, same, "median gap", *memory, "mixed requests answered")
    return ["", markdown((*first, *reference), compared), "", markdown(head, graphs)]


def merge(files: Sequence[Path]) -> dict[str, Any]:
    """Join the results of several files; of results with the same key the last one is kept."""
    bodies = [json.loads(file.read_text()) for file in files]
    rows = {key(row): row for body in bodies for row in body["rows"]}
    return {"about": bodies[-1]["about"], "rows": list(rows.values())}


def main() -> None:
    """Merge the result files that the command line names into the file in benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--merge", nargs="+", type=Path, required=True)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    merged = merge(options.merge)
    write_rows(options.json, merged["about"], merged["rows"])


if __name__ == "__main__":
    main()
