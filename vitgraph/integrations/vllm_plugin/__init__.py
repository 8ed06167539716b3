"""A plug-in that runs this library's vision towers inside vLLM: ``VITGRAPH_VLLM=1 vllm serve ...``.

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``). Without
the variable, nothing is imported beyond this module and nothing changes. With it, model classes are
registered by name: each is vLLM's own class, whose vision tower is replaced after it was built.

- ``records``: vLLM's model classes, and how each uses its tower; ``models`` makes the classes
- ``replacing``: the step that replaces the tower; ``tower``: an encoder as vLLM calls it
- ``inputs``: vLLM's batches read as packed rows; ``engine_config``: what is read of vLLM's config
- ``options``, ``versions``: what the user asks for, and what differs between versions

Source: vLLM 0.26.0 and 0.33.0, ``plugins/__init__.py`` and ``model_executor/models/registry.py``.
"""

from __future__ import annotations

import logging
import os

__all__ = ["register"]

LOGGER = logging.getLogger("vllm.vitgraph")
"""A logger below vLLM's own, whose handlers therefore print the messages of this plug-in."""


def register() -> None:
    """Register the model classes whose tower is replaced in vLLM, if ``VITGRAPH_VLLM`` is 1.

    A warning is logged instead if the version of vLLM is not known.

    Raises:
        ValueError: ``VITGRAPH_VLLM`` is neither 0 nor 1.
    """
    setting = os.environ.get("VITGRAPH_VLLM", "") or "0"
    if setting not in ("0", "1"):
        raise ValueError(f"VITGRAPH_VLLM={setting}: set it to 1, or leave it out for vLLM's towers")
    if setting == "0":
        return
    import vllm

    from .records import MODELS
    from .versions import refusal

    if reason := refusal(vllm.__version__):
        LOGGER.warning("vitgraph: vLLM keeps its own vision towers: %s", reason)
        return
    for name in MODELS.keys() & vllm.ModelRegistry.get_supported_archs():
        vllm.ModelRegistry.register_model(name, f"{__name__}.models:{name}")
