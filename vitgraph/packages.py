"""Checks that optional packages are installed, before torch is imported or anything is fetched."""

from __future__ import annotations

from importlib import import_module


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        ValueError: matplotlib is not installed; the message says how to install it.
    """
    _require("matplotlib", "plots need matplotlib: pip install 'matplotlib>=3.8'")


def require_pyarrow() -> None:
    """Check that pyarrow is installed.

    Raises:
        ValueError: pyarrow is not installed; the message says how to install it.
    """
    _require("pyarrow", "parquet files need pyarrow: pip install 'pyarrow>=15'")


def require_sklearn() -> None:
    """Check that scikit-learn is installed.

    Raises:
        ValueError: scikit-learn is not installed; the message says how to install it.
    """
    _require("sklearn", "probes need scikit-learn: pip install 'scikit-learn>=1.4'")


def require_transformers() -> None:
    """Check that transformers is installed.

    Raises:
        ValueError: transformers is not installed; the message says how to install it.
    """
    _require(
        "transformers",
        "texts need the extra `text`: pip install 'transformers>=5.20.2' 'sentencepiece>=0.2' "
        "'protobuf>=4'",
    )


def _require(module: str, message: str) -> None:
    try:
        import_module(module)
    except ImportError:
        raise ValueError(message) from None
