"""The plot of ``docs/speed.md``, drawn from committed results by ``benchmarks/table.py``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.targets import Body, cells, graphed, median, read_floors, vllm_best

PICTURE = Path(__file__).parents[1] / "docs" / "speed.svg"


def picture_link() -> str:
    """The plot, as the page shows it."""
    return (
        "![Milliseconds against tokens for four towers: transformers, the reference's graphs, the "
        f"accelerated graphs and the floor]({PICTURE.name})"
    )


def draw_picture(body: Body, path: Path = PICTURE) -> None:
    """Latency against tokens, a panel per tower, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    floors, best = read_floors(), vllm_best()
    towers = [tower for tower in body["towers"] if tower["tower"] in best]
    with matplotlib.rc_context({"svg.hashsalt": "vitgraph", "svg.fonttype": "none"}):
        figure, panels = plt.subplots(1, max(len(towers), 1), figsize=(16, 4.2), squeeze=False)
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
        plt.close(figure)
    words = "<title>Latency against tokens</title>\n<desc>" + picture_link()[2:].split("]")[0]
    path.write_text(re.sub(r"(<svg[^>]*>)", rf"\1\n {words}</desc>", path.read_text(), count=1))


def series(floors: Mapping[str, float]) -> dict[str, Callable[[Body], float | None]]:
    """The lines of a panel: a figure of each workload, by the line's name."""
    return {
        "transformers eager": lambda row: median(row, "hf_ms"),
        "reference graphs": lambda row: median(row, "reference_graph_ms"),
        "accelerated graphs": graphed,
        "floor": lambda row: floors.get(row["workload"]),
    }
