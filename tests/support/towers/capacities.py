"""Capacities that hold the grids of each tower of the table, by the kind of its rows."""

from __future__ import annotations

from tests.oracles import BY_NAME

CAPACITIES: dict[str, dict[str, int]] = {
    "tiles": {"max_frames_per_batch": 6, "max_input_size": 6, "max_seqlen_override": 65},
    "patches": {
        "max_frames_per_batch": 6,
        "max_input_size": 160,
        "max_seqlen_override": 120,
        "max_windows_per_batch": 20,
    },
}


def kind(name: str) -> str:
    return "tiles" if BY_NAME[name].tiled else "patches"
