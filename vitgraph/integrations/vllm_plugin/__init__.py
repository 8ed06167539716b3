"""A plug-in that runs this library's vision towers inside vLLM: ``VITGRAPH_VLLM=1 vllm serve ...``.

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``). Without
the variable, nothing is imported beyond this module and nothing changes. With it, subclasses of
vLLM's model classes are registered under the names of these classes; each replaces its vision tower
after vLLM has built it.

- ``records``: vLLM's model classes, and how each uses its tower; ``models``: makes the subclasses
- ``replacing``: replaces the tower; ``tower``: an encoder with the interface of vLLM's towers
- ``inputs``: reads vLLM's batches as packed rows; ``engine_config``: types of vLLM's config
- ``raw_processor``: sends images as uint8; ``raw_images``: cuts them in the engine's process;
  ``raw_switch``: whether it is so
- ``options``: the user's settings; ``versions``: what differs between versions of vLLM

Source: vLLM 0.26.0 and 0.33.0, ``plugins/__init__.py`` and ``model_executor/models/registry.py``.
"""

from __future__ import annotations

import logging
import os

__all__ = ["register"]

LOGGER = logging.getLogger("vllm.vitgraph")
"""A child of vLLM's own logger, so that vLLM's handlers print the messages of this plug-in."""


def register() -> None:
    """Register model classes that replace vLLM's vision towers, if ``VITGRAPH_VLLM`` is 1.

    If the plug-in does not know the version of vLLM, it logs a warning instead.

    Raises:
        ValueError: ``VITGRAPH_VLLM`` is neither 0 nor 1, or ``VITGRAPH_VLLM_OPTIONS`` has an
            error.
    """
    setting = os.environ.get("VITGRAPH_VLLM", "") or "0"
    if setting not in ("0", "1"):
        raise ValueError(f"VITGRAPH_VLLM={setting}: set it to 1, or leave it out for vLLM's towers")
    if setting == "0":
        return
    import vllm

    from .options import read_options
    from .raw_switch import mark_configs
    from .records import MODELS
    from .versions import refusal

    if reason := refusal(vllm.__version__):
        LOGGER.warning("vitgraph: vLLM keeps its own vision towers: %s", reason)
        return
    read_options(None, os.environ)
    names = MODELS.keys() & vllm.ModelRegistry.get_supported_archs()
    for name in names:
        vllm.ModelRegistry.register_model(name, f"{__name__}.models:{name}")
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    sends = {name: MODELS[name].sends_images for name in names}
    mark_configs(MODELS_CONFIG_MAP, VerifyAndUpdateConfig, sends)
