"""placeholder while the preprocessing is written"""

from typing import Any, Protocol


class Preprocessor(Protocol):
    def __call__(self, *a: Any, **k: Any) -> Any: ...


class PatchPreprocessor:
    @classmethod
    def qwen3_vl(cls, **k: Any) -> Any:
        return cls()

    @classmethod
    def qwen2_vl(cls, **k: Any) -> Any:
        return cls()
