"""Optional packages: an error that says how to install one that is missing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


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


def learn_heif(path: Path) -> None:
    """Let PIL read HEIF, as phones write photographs.

    Args:
        path: a photograph that needs it; named in the error.

    Raises:
        ValueError: pillow-heif is not installed; the message says how to install it.
    """
    _require("pillow_heif", f"{path}: is a HEIF file (.heic), which needs pillow-heif", "heif")
    import_module("pillow_heif").register_heif_opener()


def _require(module: str, need: str, extra: str) -> None:
    try:
        import_module(module)
    except ImportError:
        raise ValueError(
            f"{need}: pip install 'vitgraph[{extra}]', or in a clone pip install '.[{extra}]'"
        ) from None
