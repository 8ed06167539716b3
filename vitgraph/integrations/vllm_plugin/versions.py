"""The versions of vLLM that the plug-in knows, and what differs between them.

Source: ``model_executor/models/{qwen2_vl,qwen2_5_vl,qwen3_vl,internvl}.py``, ``utils/mem_utils.py``
and ``v1/worker/gpu_worker.py`` of the releases 0.26.0 to 0.33.0.
"""

from __future__ import annotations

import re

OLDEST, NEWEST = (0, 26), (0, 33)
"""The oldest and newest releases of vLLM, (major, minor), in which the plug-in replaces towers."""
COUNTS_POOLS = (0, 27)
"""The first release whose memory profile counts memory that torch reserved without using it."""


def read_version(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as "0.33.0"; (0, 0) for a text that is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def refusal(version: str) -> str:
    """Return why the plug-in replaces no towers in a version of vLLM; empty if it replaces them."""
    if OLDEST <= read_version(version) <= NEWEST:
        return ""
    oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    return f"this is vLLM {version}, and vitgraph knows {oldest} to {newest}"


def counts_pools(version: str) -> bool:
    """Return whether a version's memory profile counts the memory pool of captured graphs."""
    return read_version(version) >= COUNTS_POOLS
