"""``vitgraph bench``: prints the figures that the scripts in ``benchmarks/`` measured.

The scripts and their results are part of a source checkout, not of the wheel. ``vitgraph bench
speed`` measures here and now instead: :mod:`vitgraph.bench_speed`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .bench_speed import add_speed
from .tables import format_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
"""Where a source checkout has the results."""
GRAPHS = "graphs_h200.json"
_SHORT = ("1x224", "8x448", "mix8", "1 tile", "13 tiles")
_TIMES = {
    "hf_eager_ms": "transformers",
    "eager_ms": "eager",
    "accelerated_ms": "accelerated",
    "graphed_ms": "graphed",
    "bare_replay_ms": "bare replay",
}
"""What was measured, and its column; results older than the accelerated towers lack one."""


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    _add_table_options(parser, None)
    figures = parser.add_subparsers(title="figures", metavar="NAME")
    for name, summary, add in (
        ("graphs", "Print what graphs gained on an H200 (source checkout).", _add_graphs),
        ("speed", "Measure your own checkpoint on this machine.", add_speed),
    ):
        figure = figures.add_parser(name, help=summary, description=summary)
        add(figure)
        figure.add_argument("--debug", action="store_true", help="show the traceback of an error")
        figure.set_defaults(parser=figure)


def _add_table_options(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument(
        "--results", type=Path, metavar="FILE", default=default, help="another results file"
    )
    parser.add_argument(
        "--markdown", action="store_true", default=default, help="a short table in Markdown"
    )


def _add_graphs(parser: argparse.ArgumentParser) -> None:
    _add_table_options(parser, argparse.SUPPRESS)  # they may stand before the name, too
    parser.set_defaults(command=print_graphs)


def print_list(options: argparse.Namespace) -> None:
    """Print which figures there are.

    Raises:
        ValueError: options of a table without its name.
    """
    if options.results or options.markdown:
        raise ValueError("--results and --markdown are for a table: vitgraph bench graphs")
    print(list_results())


def print_graphs(options: argparse.Namespace) -> None:
    """Print the figures on graphs."""
    print((markdown if options.markdown else table)(read_graphs(options.results)))


def list_results() -> str:
    """Return one line per results file: its name, and the script that printed it.

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
    """Return the script that the file names, or whose name the file's name starts with."""
    about = json.loads(path.read_text()).get("about")
    if isinstance(about, Mapping) and "printed_by" in about:
        return str(about["printed_by"])
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
    """Read the results of ``benchmarks/graphs.py``.

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
    """Return what was measured on which machine, and one table per tower."""
    about = body["about"]
    head = (
        f"{about['gpu']}, torch {about['torch']}, transformers {about['transformers']}, "
        f"{about['dtype']}, {about['date']}: milliseconds, medians of {about['runs']}"
    )
    return "\n\n".join([head, *map(_tower, body["towers"])])


def markdown(body: Mapping[str, Any]) -> str:
    """Return a short table with a small, a middling and a mixed workload per tower."""
    header = ("tower", "workload", "transformers eager", "vitgraph eager", "vitgraph graphs")
    names = ("hf_eager_ms", "eager_ms", "graphed_ms")
    rows = [
        (tower["tower"], row["workload"], *(f"{row[name]:.1f}" for name in names))
        for tower in body["towers"]
        for row in tower["workloads"]
        if row["workload"] in _SHORT
    ]
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells).replace(" --- ", "---")


def _tower(tower: Mapping[str, Any]) -> str:
    measured = [name for name in _TIMES if name in tower["workloads"][0]]
    rows = [_row(row, measured) for row in tower["workloads"]]
    titles = ("workload", "rows", "tokens", *(_TIMES[name] for name in measured))
    header = (*titles, "vs transformers", "vs eager", "host us", "padding", "path")
    return (
        f"{tower['tower']}: {tower['budgets']} budgets captured in {tower['capture_seconds']:.1f} s"
        f", arena {tower['arena_mib']:,.0f} MiB, pool {tower['pool_mib']:,.0f} MiB\n"
        + format_table(header, rows)
    )


def _row(row: Mapping[str, Any], measured: Sequence[str]) -> list[str]:
    return [
        row["workload"],
        f"{row['rows']}",
        f"{row['tokens']}",
        *(_number(row[name], ".2f") for name in measured),
        f"{row['hf_eager_ms'] / row['graphed_ms']:.2f}",
        f"{row['eager_ms'] / row['graphed_ms']:.2f}",
        _number(row["host_us"], ".0f"),
        f"{row['padding']:.1%}",
        row["path"],
    ]


def _number(value: float | None, form: str) -> str:
    """Return a number as text, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:{form}}"
