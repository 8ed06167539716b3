"""``vitgraph bench``: prints the figures that the scripts in ``benchmarks/`` measured.

Results and scripts are part of a clone of the repository, not of an installed package.
``vitgraph bench speed`` measures on this machine instead: ``bench_speed``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...terminal import counted, format_table
from .bench_accuracy import add_accuracy
from .bench_speed import add_speed

if TYPE_CHECKING:
    from weights.tensor_file import JsonDict, JsonObject

CLONE = Path(__file__).parents[3]
NO_RESULTS = (
    "measured figures are part of a clone of the repository, not of an installed vitgraph; "
    "`vitgraph bench speed REPO` measures a checkpoint on this machine"
)
_FIGURES = {
    "graphs": "Print what graphs gained on an H200.",
    "speed REPO": "Measure your own checkpoint on this machine.",
    "accuracy REPO PHOTO...": "Compare precisions and kernels with float32 on your photographs.",
}
"""The text that the command prints without arguments."""
GRAPHS = "graphs_h200.json"
_SHORT = ("1x224", "8x448", "mix8", "1 tile", "13 tiles")
_TIMES = {
    "hf_eager_ms": "transformers",
    "eager_ms": "eager",
    "accelerated_ms": "accelerated",
    "graphed_ms": "graphed",
    "bare_replay_ms": "bare replay",
}
"""The name of each measured time in a results file, and the title of its column. Results that are
older than the accelerated towers lack ``accelerated_ms``."""


def results_folder() -> Path:
    """Return the folder of the results files in a clone; an installed package has none."""
    return CLONE / "benchmarks" / "results"


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options and figures of the command to its parser."""
    _add_table_options(parser, None)
    figures = parser.add_subparsers(title="figures", metavar="NAME")
    for (usage, summary), add in zip(
        _FIGURES.items(), (_add_graphs, add_speed, add_accuracy), strict=True
    ):
        figure = figures.add_parser(usage.split()[0], help=summary, description=summary)
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
    # The options may stand before the name of the figure, too.
    _add_table_options(parser, argparse.SUPPRESS)
    parser.set_defaults(command=print_graphs)


def print_list(options: argparse.Namespace) -> None:
    """Print the list of results files.

    Raises:
        ValueError: an option of a table is given without the name of the table.
    """
    if options.results or options.markdown:
        raise ValueError("--results and --markdown are for a table: vitgraph bench graphs")
    print(list_results())


def print_graphs(options: argparse.Namespace) -> None:
    """Print how much faster CUDA graphs were."""
    print((markdown if options.markdown else table)(read_graphs(options.results)))


def list_results() -> str:
    """Return the text of the command: its subjects, and a table of results files and scripts.

    Without a clone, a sentence that says where the results are stands in place of the table.
    """
    paths = sorted(results_folder().glob("*.json"))
    rows = [(path.stem, _script(path), _measured_on(path)) for path in paths]
    commands = [f"vitgraph bench {name:24}{summary}" for name, summary in _FIGURES.items()]
    if not paths:
        return "\n".join([*commands, "", f"There are no results here: {NO_RESULTS}."])
    table = format_table(("results", "script", "measured on"), rows)
    return "\n".join([*commands, "", "Results, and the script of a clone that prints each:", table])


def _script(path: Path) -> str:
    """Return the script that a results file names, or else the one that its own name begins with.

    Of several such scripts, it is the one with the longest name. It is a dash where there is no
    clone to look for it.
    """
    about = json.loads(path.read_text()).get("about")
    if isinstance(about, Mapping) and "printed_by" in about:
        return str(about["printed_by"])
    words = path.stem.split("_")
    names = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    scripts = (f"benchmarks/{name}.py" for name in names)
    return next((script for script in scripts if (CLONE / script).is_file()), "-")


def _measured_on(path: Path) -> str:
    body = json.loads(path.read_text())
    about = {**body, **body["about"]} if isinstance(body.get("about"), Mapping) else body
    device = about.get("gpu") or about.get("cpu")
    if not isinstance(device, str):
        return "-"  # these figures are arithmetic and the same on every machine
    return f"{device}, torch {about['torch']}" if "torch" in about else device


def read_graphs(path: Path | None = None) -> JsonDict:
    """Read the results of ``benchmarks/graphs.py``.

    Args:
        path: a results file; by default the one that was measured on an H200.

    Returns:
        The results: ``about``, and per entry of ``towers`` its ``workloads``, ``latency`` and
        ``memory_by_budgets``, in milliseconds and MiB.

    Raises:
        ValueError: there is no such file, as outside a clone, or it is a file of another kind.
    """
    if path is None and not results_folder().is_dir():
        raise ValueError(f"{GRAPHS} is not here: {NO_RESULTS}")
    path = path or results_folder() / GRAPHS
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; pass a results file with --results")
    try:
        body = json.loads(path.read_text())
        table(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # `str`, because the `repr` of a UnicodeDecodeError holds the whole file.
        raise ValueError(
            f"{path}: is no file that `python -m benchmarks.graphs --json FILE` writes "
            f"({type(error).__name__}: {error})"
        ) from error
    return body


def table(body: JsonObject) -> str:
    """Return a line about the machine, then one table per tower with the cost of capture."""
    about = body["about"]
    head = (
        f"{about['gpu']}, torch {about['torch']}, transformers {about['transformers']}, "
        f"{about['dtype']}, {about['date']}: milliseconds, medians of {about['runs']}"
    )
    return "\n\n".join([head, *map(_tower, body["towers"])])


def markdown(body: JsonObject) -> str:
    """Return a short table in Markdown: a small, a medium and a mixed workload of each tower."""
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


def _tower(tower: JsonObject) -> str:
    measured = [name for name in _TIMES if name in tower["workloads"][0]]
    rows = [_row(row, measured) for row in tower["workloads"]]
    titles = ("workload", "rows", "tokens", *(_TIMES[name] for name in measured))
    header = (*titles, "vs transformers", "vs eager", "host us", "padding", "path")
    return (
        f"{tower['tower']}: {counted(tower['budgets'], 'budget')} captured in "
        f"{tower['capture_seconds']:.1f} s"
        f", arena {tower['arena_mib']:,.0f} MiB, pool {tower['pool_mib']:,.0f} MiB\n"
        + format_table(header, rows)
    )


def _row(row: JsonObject, measured: Sequence[str]) -> list[str]:
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
    """Return a number as text, and a dash for None, which stands for a workload without graphs."""
    return "-" if value is None else f"{value:{form}}"
