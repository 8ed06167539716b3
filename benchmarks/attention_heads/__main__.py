"""Attention kernels for head sizes 72 and 80 on one GPU: the library's, and candidates.

    python -m benchmarks.attention_heads --json benchmarks/results/attention_heads_h200.json
    python -m benchmarks.attention_heads --table benchmarks/results/attention_heads_h200.json

The first command takes under three minutes. It measures flash-attn-4 if the ``flash`` extra is
installed; on a machine without a network, unpack its wheels and put their folders into
``PYTHONPATH``. ``benchmarks/attention_heads/measure.py`` lists the candidates.

Each family of candidates runs in a process of its own, so that a kernel that hangs or reads out of
bounds does not end the others. ``us`` is the time of one call inside a CUDA graph, the median of
replays in random order. ``tflops`` does not count columns of padding. ``relative_l2`` is the
relative error against attention in float64, on sampled rows. ``products_us`` is the time of the
matrix products before and after attention, which are larger if heads are padded. With
``--device cpu`` and ``TRITON_INTERPRET=1`` only the errors are meaningful, not the times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention_heads.measure import CORRECT, FAMILIES, cells, measure_family
from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown

WINS = 1.03
"""The speedup over the library's fastest kernel from which a candidate is marked as winning."""


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the library's fastest kernel and the fastest candidate.

    There are two rows per cell (attention call) and family of candidates. A candidate's gain takes
    into account how much its padding of heads slows down the matrix products around attention.
    """
    head = ("cell", "size", "kernel", "us", "TF/s", "products, us", "error", "gain")
    shown, wrong = [], []
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "error" in row or not row["relative_l2"] <= CORRECT:
            why = row.get("error") or f"its error is {row['relative_l2']:.1e}"
            wrong.append(f"\n{row['cell']}, {row['size']}, {row['candidate']}: {why}")
        else:
            groups.setdefault((row["cell"], row["size"], row["family"]), []).append(row)
    for (name, size, _), ours in groups.items():
        ours.sort(key=lambda row: row["us"] + row["products_us"])
        mine = [row for row in ours if row["candidate"].startswith("library")]
        theirs = [row for row in ours if row not in mine]
        for row in (*mine[:1], *theirs[:1]):
            more = row["products_us"] - mine[0]["products_us"] if mine else 0.0
            gain = mine[0]["us"] / (row["us"] + more) if mine else 1.0
            figures = (f"{row['us']:.1f}", f"{row['tflops']:.0f}", f"{row['products_us']:.1f}")
            last = (f"{row['relative_l2']:.1e}", f"{gain:.2f}x{', wins' * (gain >= WINS)}")
            shown.append((name, str(size), row["candidate"], *figures, *last))
    return "\n".join((markdown(head, shown), *dict.fromkeys(wrong)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each family of candidates in a process of its own, or print the table of a file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_heads", description=__doc__
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cells", nargs="*", help="only cells whose name has one of these in it")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--table", type=Path, help="print the table of a results file")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())["rows"]))
        return
    todo = [cell for cell in cells() if any(x in cell.name for x in options.cells or [""])]
    body: dict[str, Any] = {"about": about(options.runs), "rows": [], "ended": []}
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows.json")
            job = (family, todo, options.device, options.runs, path)
            process = multiprocessing.get_context("spawn").Process(target=measure_family, args=job)
            process.start()
            process.join(FAMILIES[family])
            if process.exitcode != 0:
                body["ended"].append(f"{family} was ended: exit code {process.exitcode}")
                process.kill()
                process.join()
            body["rows"] += json.loads(path.read_text()) if path.exists() else []
        if options.json is not None:
            write_results(options.json, body)
    print(table(body["rows"]), *body["ended"], sep="\n")


if __name__ == "__main__":
    main()
