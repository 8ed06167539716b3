"""Tokens of more models with our towers are those with vLLM's, in the real vLLM on a CPU.

Their published configs or processors are code, or vLLM does not run their language models on a CPU,
so :mod:`tiny_seeded` writes small models of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_jobs import ENGINE, STATIC, Answers, compare, drive

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

SEEDED = (
    *("dots_ocr", "deepseek_ocr2", "kimi_k3", "minicpm_v", "llava_onevision", "llava_next"),
    *("paligemma", "colpali", "step3", "step3_vl"),
)
"""Models of :mod:`tiny_seeded`."""
VIEWS = ("deepseek_ocr2", "step3", "step3_vl")
"""Some of them with many large views; padded to budgets, each of their batches takes seconds."""


def seeded_jobs(folder: Path, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Two engines per model of :mod:`tiny_seeded`: vLLM's towers first, then ours."""
    from tiny_seeded import SMALL, write_small

    jobs: dict[str, dict[str, Any]] = {}
    for side in ("stock", "ours"):
        for kind in kinds:
            small, place = SMALL[kind], folder / f"{kind}-{side}"
            if side == "stock":
                write_small(place, kind)
            else:  # vLLM takes a model that it has seen as it was
                place.symlink_to(folder / f"{kind}-stock")
            limits = {"image": small.images, **({"video": 1} if small.clip else {})}
            more = ["clip"] if small.clip else []
            options = {"backend": "eager"} if kind in VIEWS else STATIC
            jobs[f"{kind} {side}"] = {
                "family": kind,
                "ours": options if side == "ours" else None,
                "prompts": ["text", "image", *small.asked, *more],
                "marks": [small.mark, small.clip],
                "pooling": small.pooling,
                "sizes": small.sizes,
                "stand_ins": small.stand_ins,
                "engine": {
                    **ENGINE,
                    "model": str(place),
                    "limit_mm_per_prompt": limits,
                    "trust_remote_code": bool(small.code),
                    **small.engine,
                },
            }
    return jobs


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What the engines of :data:`SEEDED` say, in one process."""
    folder = tmp_path_factory.mktemp("seeded")
    return drive(folder, seeded_jobs(folder, SEEDED), VLLM_ENABLE_V1_MULTIPROCESSING="0")


@pytest.mark.parametrize("kind", SEEDED)
def test_tokens_of_newer_models_are_those_of_vllms_towers(seeded: Answers, kind: str) -> None:
    compare(seeded[f"{kind} ours"], seeded[f"{kind} stock"])
    assert (seeded[f"{kind} ours"]["about"]["raw"] >= 3) == (kind == "dots_ocr")
