"""Whether images are sent as uint8, as a mark on the config that all processes of an engine share.

vLLM checks and completes the config of an engine by a class per architecture, before it starts
other processes. The plug-in derives from these classes, and marks the config of every model that it
knows, and of those whose images are sent raw. Processes unpickle the config when they start; the
marks then check that the plug-in is there, too.

vLLM is not imported here. Source: ``VllmConfig.try_verify_and_update_config`` and
``model_executor/models/config.py`` of vLLM 0.26.0, 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import ClassVar

from .engine_config import EngineConfig, ModelSettings
from .options import read_options

PLUGIN = "vitgraph_plugin"
"""The attribute of a model's config (``hf_config``) that says that the plug-in is on."""
MARK = "vitgraph_raw_images"
"""The attribute of a model's config (``hf_config``) that says that images are sent raw."""


class Mark(str):
    """The value of the mark; a process that unpickles it must have the plug-in switched on."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[str], Mark], tuple[str]]:
        return require_plugin, (str(self),)


def require_plugin(text: str) -> Mark:
    """Return the mark, in a process that has the plug-in and knows how images are sent.

    Raises:
        ValueError: the plug-in is off in this process, or is of another version.
    """
    if os.environ.get("VITGRAPH_VLLM") != "1":
        raise ValueError(
            "VITGRAPH_VLLM=1 is not set in this process of vLLM, but in that which made its "
            "config: set it for every process (with Ray, VLLM_RAY_EXTRA_ENV_VARS_TO_COPY="
            "VITGRAPH_VLLM,VITGRAPH_VLLM_OPTIONS), or for none"
        )
    if text != FORM:
        raise ValueError(
            f"images are sent in form {text!r}, and vitgraph reads {FORM!r} in this process of "
            "vLLM: install one version of vitgraph on every machine"
        )
    return Mark(text)


FORM = "2"
"""The version of the form in which images are sent; it changes with ``raw_images``."""


def is_raw(model_config: ModelSettings) -> bool:
    """Return whether the images of a model are sent raw; ``model_config`` is vLLM's."""
    return MARK in vars(model_config.hf_config)


def mark_configs(
    known: MutableMapping[str, type], base: type, sends_images: Mapping[str, bool]
) -> None:
    """Let vLLM mark the configs of the architectures that the plug-in knows.

    Args:
        known: vLLM's classes that complete the config of an engine, by architecture; changed.
        base: vLLM's base class of these classes.
        sends_images: the architectures, and whether their images may be sent raw.
    """
    for name, sends in sends_images.items():
        theirs = known.get(name, base)
        if not issubclass(theirs, Marks):
            known[name] = type(theirs.__name__, (Marks, theirs), {"sends_images": sends})


class Marks:
    """Mixin for a class of vLLM that completes the config of an engine.

    Attributes:
        sends_images: whether images of the architecture may be sent raw.
    """

    sends_images: ClassVar[bool]

    @classmethod
    def verify_and_update_config(cls, vllm_config: EngineConfig) -> None:
        """Complete the config as vLLM does, and mark it; images are sent raw unless the option
        ``raw_images`` is off."""
        super().verify_and_update_config(vllm_config)  # type: ignore[misc]
        options, config = read_options(vllm_config.additional_config, os.environ), vllm_config
        setattr(config.model_config.hf_config, PLUGIN, Mark(FORM))
        if cls.sends_images and options.raw_images:
            setattr(config.model_config.hf_config, MARK, Mark(FORM))
