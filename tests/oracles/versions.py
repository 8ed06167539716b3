"""Skips of tests that hold from a certain version of a package on."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

STEP_ROTATION = ("transformers", "5.23", "its Step3-VL tower swaps rows and columns as it rotates")
"""Why Step3-VL is not compared with an older reference."""
UNLIMITED_OCR = ("transformers", "5.18", "it has no UnlimitedOcrModel")
"""Why DeepSeek-OCR is not compared with an older transformers."""


DEEPSEEK_OCR2 = ("transformers", "5.19", "it has no DeepseekOcr2VisionModel")
"""Why DeepSeek-OCR-2 is not compared with an older transformers."""


MINICPM_V = ("transformers", "5.23", "it has no MiniCPM-OCR")
"""Why MiniCPM-V is not compared with an older transformers."""


def needs(package: str, than: str, otherwise: str) -> pytest.MarkDecorator:
    """Skip a test where a package is older than a version; ``otherwise`` says what that does."""
    reason = f"{package} {version(package)} is older than {than}: {otherwise}"
    return pytest.mark.skipif(Version(version(package)) < Version(than), reason=reason)


def skip_without(package: str, than: str, otherwise: str) -> None:
    """Skip the test that runs, where ``needs`` skips a whole function."""
    mark = needs(package, than, otherwise)
    if mark.args[0]:
        pytest.skip(mark.kwargs["reason"])
