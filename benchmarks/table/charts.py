"""Draws the charts of speed from the files in benchmarks/results: ``python -m benchmarks.table``.

``docs/speed_bars.svg`` is the chart of the README; ``docs/speed.svg`` has every workload.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.table.results import Body, cells, graphed, median, read_floors, theirs, vllm_best

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[2] / "docs"
PICTURE, BARS = DOCS / "speed.svg", DOCS / "speed_bars.svg"
BAR_WORKLOADS = {"1x448": "1 image", "mix8": "8 images", "1 tile": "1 tile", "13 tiles": "13 tiles"}
"""The workloads in the bar chart, with their titles: a small and a large one of each tower."""
GREY = "#808890"
"""The colour of text; like the colours of the bars, it is readable on white and on black."""
BAR_COLOURS = ("#9aa2ab", "#d9822b", "#5b9bd5", "#2f74c0")


def picture_link() -> str:
    """Return the Markdown of ``benchmarks/RESULTS.md`` that shows the chart."""
    return (
        "![Milliseconds against tokens for four towers: transformers, the reference's graphs, the "
        f"accelerated graphs and the floor](../docs/{PICTURE.name})"
    )


def draw_picture(body: Body, path: Path = PICTURE) -> None:
    """Draw milliseconds against tokens, with a panel per tower, into an SVG file."""
    from matplotlib.figure import Figure

    floors, best = read_floors(), vllm_best()
    towers = [tower for tower in body["towers"] if tower["tower"] in best]
    with settings():
        figure = Figure(figsize=(16, 4.2))
        panels = figure.subplots(1, max(len(towers), 1), squeeze=False)
        for axes, tower in zip(panels[0], towers, strict=True):
            for name, point in series(floors[tower["tower"]]).items():
                points = sorted(
                    (row["tokens"], ms) for row in cells(tower) if (ms := point(row)) is not None
                )
                axes.plot(*zip(*points, strict=True), "o-", label=name) if points else None
            axes.set(title=tower["tower"], xscale="log", yscale="log", xlabel="output tokens")
        panels[0][0].set_ylabel("milliseconds per call")
        panels[0][0].legend()
        figure.suptitle(f"{body['about']['gpu']}, bfloat16")
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})
    describe(path, "Latency against tokens", picture_link()[2:].split("]")[0])


@contextmanager
def settings() -> Iterator[None]:
    """Configure matplotlib so that SVGs contain text, and equal charts give identical files."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "vitgraph", "svg.fonttype": "none"}):
        yield


def describe(path: Path, title: str, words: str) -> None:
    """Add a title and a description (``words``) to an SVG file, for screen readers."""
    said = rf"\1\n <title>{title}</title>\n<desc>{words}</desc>"
    path.write_text(re.sub(r"(<svg[^>]*>)", said, path.read_text(), count=1))


def series(floors: Mapping[str, float]) -> dict[str, Callable[[Body], float | None]]:
    """Return the lines of a panel: by name, a function from a workload's row to milliseconds.

    ``floors`` are the least milliseconds that the GPU's peak rates allow, by workload.
    """
    return {
        "transformers eager": theirs,
        "reference graphs": lambda row: median(row, "reference_graph_ms"),
        "accelerated graphs": graphed,
        "floor": lambda row: floors.get(row["workload"]),
    }


def draw_bars(body: Body, path: Path = BARS) -> None:
    """Draw the milliseconds of a small and a large workload as bars, with a panel per tower and
    workload.
    """
    from matplotlib.figure import Figure

    best = vllm_best()
    towers = [tower for tower in body["towers"] if tower["tower"] in best]
    with settings():
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        figure.set_layout_engine("constrained", hspace=0.08, w_pad=0.08)
        panels = figure.subplots(2, len(towers), squeeze=False)
        for column, tower in zip(panels.T, towers, strict=True):
            rows = [row for row in cells(tower) if row["workload"] in BAR_WORKLOADS]
            for axes, row in zip(column, rows, strict=True):
                name = f"{tower['tower']}, {BAR_WORKLOADS[row['workload']]}"
                fill_bars(axes, name, bars_of(row, best[tower["tower"]][row["workload"]]))
        for axes in panels[:, 1:].flat:
            axes.set_yticklabels([])
        figure.supxlabel(f"milliseconds per call, {body['about']['gpu']}", color=GREY, fontsize=9)
        figure.savefig(path, format="svg", metadata={"Date": None}, transparent=True)
    describe(path, "Milliseconds per call", "Bars of transformers, vLLM and vitgraph per tower")


def bars_of(row: Body, vllm: float) -> dict[str, float | None]:
    """Return the milliseconds of one workload, by the name of the bar; ``vllm`` is vLLM's time."""
    return {
        "transformers": theirs(row),
        "vLLM": vllm,
        "vitgraph, torch alone": graphed(row, "torch"),
        "vitgraph, flash extra": graphed(row),
    }


def fill_bars(axes: Axes, title: str, bars: Mapping[str, float | None]) -> None:
    """Draw the bars of one workload, each labelled with its milliseconds."""
    lengths = [ms or 0 for ms in bars.values()]
    drawn = axes.barh(list(bars), lengths, color=BAR_COLOURS)
    figures = [f"{ms:#.3g}".rstrip(".") for ms in lengths]
    axes.bar_label(drawn, figures, padding=3, color=GREY, fontsize=9)
    axes.set_xlim(0, 1.25 * max(lengths))
    axes.set_title(title, color=GREY, fontsize=9.5)
    axes.invert_yaxis()
    axes.tick_params(left=False, bottom=False, labelbottom=False, labelcolor=GREY, labelsize=9)
    axes.spines[:].set_visible(False)
