"""Helpers of the tests of fetching: the client pointed at a loopback hub, huge checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import huggingface_hub

from .server import HubServer

if TYPE_CHECKING:
    import pytest  # a notebook imports this file where pytest is not installed

REPO = "owner/tower"


def point_client_at(server: HubServer, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Point the Hub's client at ``server``; it has read its environment variables already."""
    constants = huggingface_hub.constants
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "ENDPOINT", server.endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HOME", str(folder / "home"))
    patch.setattr(constants, "HF_HUB_CACHE", str(folder / "home" / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)


def wait_no_longer(patch: pytest.MonkeyPatch) -> list[float]:
    """Make retries follow at once; return the list in which the seconds to wait are noted."""
    waits: list[float] = []
    patch.setattr("weights.hub.http.FIRST_WAIT", 0.001)
    patch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=waits.append))
    return waits


def environment(server: HubServer, home: Path) -> dict[str, str]:
    """Return the environment of a process whose client talks to ``server`` and caches in
    ``home``.
    """
    return dict(
        os.environ,
        HF_ENDPOINT=server.endpoint,
        HF_HOME=str(home),
        HF_HUB_DISABLE_XET="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        PYTHONPATH=str(Path(__file__).parents[3]),
    )


def sparse_around(folder: Path, size: int) -> int:
    """Grow the shards of a checkpoint to ``size`` bytes together, by holes that take no disk.

    Each shard gets one more tensor of the language model, a hole before all others. Returns the
    bytes of the headers.
    """
    shards = sorted(folder.glob("*.safetensors"))
    index_path = folder / "model.safetensors.index.json"
    index: dict[str, Any] = json.loads(index_path.read_text())
    headers = 0
    for number, path in enumerate(shards):
        name = f"model.language_model.layers.{100 + number}.mlp.gate_proj.weight"
        headers += insert_hole(path, name, size // len(shards) // 2 * 2)
        index["weight_map"][name] = path.name
    index_path.write_text(json.dumps(index))
    return headers


def insert_hole(path: Path, name: str, length: int) -> int:
    """Insert a tensor of ``length`` zero bytes before the others of a file; return header bytes."""
    raw = path.read_bytes()
    old = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + old])
    for key, entry in header.items():
        if key != "__metadata__":
            entry["data_offsets"] = [offset + length for offset in entry["data_offsets"]]
    header[name] = {"dtype": "BF16", "shape": [length // 2], "data_offsets": [0, length]}
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(length, os.SEEK_CUR)
        file.write(raw[8 + old :])
    return 8 + len(text)
