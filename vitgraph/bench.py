"""``vitgraph bench``: prints the figures that the scripts in ``benchmarks/`` measured.

The scripts and their results are part of a source checkout, not of the wheel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .tables import format_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
"""Where a source checkout has them."""
GRAPHS = "graphs_h200.json"
_TITLES = ("workload", "rows", "tokens", "transformers", "eager", "graphed", "bare replay")
_IN_README = ("1x224", "8x448", "mix8", "1 tile", "13 tiles")
_TIMES = ("hf_eager_ms", "eager_ms", "graphed_ms", "bare_replay_ms")


def list_results() -> str:
    """A line a results file: its name, and the script that printed it.

    Raises:
        ValueError: there is no such folder: this is not a source checkout.
    """
    if not RESULTS.is_dir():
        raise ValueError(f"{RESULTS}: {_NO_CHECKOUT}; see `vitgraph bench graphs --results FILE`")
    rows = [
        (path.stem, _script(path), _measured_on(path)) for path in sorted(RESULTS.glob("*.json"))
    ]
    return format_table(("results", "printed by", "measured on"), rows)


_NO_CHECKOUT = "the figures are part of a source checkout, which this is not"


def _script(path: Path) -> str:
    """The script of the same name, or of the name before the device's."""
    names = (path.stem, path.stem.rpartition("_")[0])
    scripts = [path.parents[1] / f"{name}.py" for name in names if name]
    return next((f"benchmarks/{script.name}" for script in scripts if script.is_file()), "-")


def _measured_on(path: Path) -> str:
    body = json.loads(path.read_text())
    about = {**body, **body["about"]} if isinstance(body.get("about"), Mapping) else body
    device = about.get("gpu") or about.get("cpu")
    if not isinstance(device, str):
        return "-"  # arithmetic, the same everywhere
    return f"{device}, torch {about['torch']}" if "torch" in about else device


def read_graphs(path: Path | None = None) -> dict[str, Any]:
    """The results of ``benchmarks/graphs.py``.

    Args:
        path: a results file; by default the source checkout's.

    Raises:
        ValueError: no such file, or a file of another kind.
    """
    given, path = path is not None, path or RESULTS / GRAPHS
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file" + ("" if given else _missing()))
    try:
        body = json.loads(path.read_text())
        table(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: not what `python benchmarks/graphs.py --json FILE` writes ({error!r})"
        ) from error
    return body


def _missing() -> str:
    if RESULTS.is_dir():
        return (
            f"; on a CUDA device, `python benchmarks/graphs.py --json {RESULTS / GRAPHS}` makes it"
        )
    return f"; {_NO_CHECKOUT}: pass a results file with --results"


def table(body: Mapping[str, Any]) -> str:
    """What was measured on what; then a table a tower, with what capture took."""
    about = body["about"]
    head = (
        f"{about['gpu']}, torch {about['torch']}, transformers {about['transformers']}, "
        f"{about['dtype']}, {about['date']}: milliseconds, medians of {about['runs']}"
    )
    return "\n\n".join([head, *map(_tower, body["towers"])])


def markdown(body: Mapping[str, Any]) -> str:
    """The README's table: a small load of each tower, a middling one and a mixed one."""
    header = ("tower", "workload", "transformers eager", "vitgraph eager", "vitgraph graphs")
    rows = [
        (tower["tower"], row["workload"], *(f"{row[name]:.1f}" for name in _TIMES[:3]))
        for tower in body["towers"]
        for row in tower["workloads"]
        if row["workload"] in _IN_README
    ]
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells).replace(" --- ", "---")


def _tower(tower: Mapping[str, Any]) -> str:
    rows = [_row(row) for row in tower["workloads"]]
    gains = ("vs transformers", "vs eager")
    header = (*_TITLES, *gains, "host us", "padding", "path")
    return (
        f"{tower['tower']}: {tower['budgets']} budgets captured in {tower['capture_seconds']:.1f} s"
        f", arena {tower['arena_mib']:,.0f} MiB, pool {tower['pool_mib']:,.0f} MiB\n"
        + format_table(header, rows)
    )


def _row(row: Mapping[str, Any]) -> list[str]:
    return [
        row["workload"],
        f"{row['rows']}",
        f"{row['tokens']}",
        *(_number(row[name], ".2f") for name in _TIMES),
        f"{row['hf_eager_ms'] / row['graphed_ms']:.2f}",
        f"{row['eager_ms'] / row['graphed_ms']:.2f}",
        _number(row["host_us"], ".0f"),
        f"{row['padding']:.1%}",
        row["path"],
    ]


def _number(value: float | None, form: str) -> str:
    """A dash where nothing was measured: no graph ran, or none could be captured by hand."""
    return "-" if value is None else f"{value:{form}}"
