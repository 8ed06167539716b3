"""Encoders inside other libraries; each of these libraries is imported by one module only.

See ``docs/integrations.md``. A module is imported when it is first used, so that only the library
in use must be installed.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import dynamo, export, sentence_transformers, transformers, vllm

__all__ = ["dynamo", "export", "sentence_transformers", "transformers", "vllm"]


if not TYPE_CHECKING:  # else a type checker would accept any misspelt name

    def __getattr__(name: str) -> ModuleType:
        """Import one of the integration modules when it is first used (PEP 562).

        Raises:
            AttributeError: there is no such integration.
        """
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return __all__
