"""Optional packages: an error that says how to install one that is missing."""

from __future__ import annotations

from importlib import import_module


def require_matplotlib() -> None:
    """Raise unless matplotlib is installed.

    Raises:
        ValueError: matplotlib is not installed; the message says how to install it.
    """
    _require("matplotlib", "plots need matplotlib", "plots")


def require_av() -> None:
    """Raise unless PyAV is installed.

    Raises:
        ValueError: PyAV is not installed; the message says how to install it.
    """
    _require("av", "reading video files needs PyAV", "video")


def _require(module: str, need: str, extra: str) -> None:
    try:
        import_module(module)
    except ImportError:
        raise ValueError(
            f"{need}: pip install 'vitgraph[{extra}]', or in a clone pip install '.[{extra}]'"
        ) from None
