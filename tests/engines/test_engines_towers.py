"""The real vLLM on a CPU with our towers: the tokens that it has with its own.

``make engines`` runs this file in an environment of its own. Engines are started one after the
other in one process, because their imports take longer than they do; three more start an engine in
a process of its own, two of them on two ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_jobs import ENGINE, STATIC, Answers, compare, drive

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

EVERYTHING = ["text", "image", "images", "clip"]
RAW = [*EVERYTHING, "again", "sizes", "limits"]
"""With images of several sizes, limits of a request, and an image for the second time."""
CASES = {
    "qwen2_vl": RAW,
    "qwen2_5_vl": RAW,
    "qwen3_vl": RAW,
    "internvl": ["text", "image", "images"],
}
"""Model -> what it is asked."""
DRAWN = ("qwen3_vl_moe", "qwen3_5")
"""Models that run with the weights that vLLM draws, in bfloat16."""
READ = ("gemma3", "mistral3", "llava")
"""Models whose batches the plug-in reads, of tiles and of images; CI runs these."""
BY_HAND = (
    *("glm4v", "glm_ocr", "exaone4_5", "idefics3", "paddleocr_vl", "gemma4"),
    *("kimi_k25", "lfm2_vl", "llama4"),
)
"""Models that are run by hand, ``pytest -m "engines and slow"``: two engines start for each."""
RAW_BY_HAND = ("glm4v", "glm_ocr", "paddleocr_vl", "gemma4")
"""Some of them whose images are sent raw."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints by family; vLLM takes a model that it has seen as it was, so there are two
    links to each."""
    from tiny_models import MODELS, write_drawn, write_tiny, write_tiny_internvl

    folder = tmp_path_factory.mktemp("models")
    for family in MODELS:
        write_tiny(folder / family, family)
    write_tiny_internvl(folder / "internvl")
    for family in DRAWN:
        write_drawn(folder / family, family)
        (folder / f"{family}-ours").symlink_to(folder / family)
    for family in CASES:
        for use in ("ours", "dummy", "none", "pruned", "pruned-ours"):
            (folder / f"{family}-{use}").symlink_to(folder / family)
    broken = shutil.copytree(folder / "qwen3_vl", folder / "broken")
    _break(broken / "model.safetensors")
    return folder


def _break(file: Path) -> None:
    """Take one tensor of the tower away."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    del tensors["model.visual.blocks.1.attn.proj.bias"]
    save_file(tensors, file)


def job(family: str, folder: Path, ours: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """An engine and what it is asked; ``ours`` are the options of our tower, None for vLLM's."""
    limits = {"image": 4} if family == "internvl" else {"image": 4, "video": 1}
    asked = more.pop("prompts", None) or CASES[family]
    refused = ["too many", "too long"] if family == "qwen2_vl" else []
    engine = {**ENGINE, "model": str(folder), "limit_mm_per_prompt": limits}
    if family == "internvl":
        engine["trust_remote_code"] = True  # for the class of its config
    about = {"family": family, "ours": ours, "prompts": asked, "refused": refused}
    return {**about, "engine": {**engine, **more}}


def read_jobs(folder: Path, families: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Two engines per model of :mod:`tiny_towers`: vLLM's towers first, then ours."""
    from tiny_published import PUBLISHED, write_published
    from tiny_towers import MODELS, write_tower

    jobs: dict[str, dict[str, Any]] = {}
    for side in ("stock", "ours"):
        for number, family in enumerate(families):
            model, place = (MODELS | PUBLISHED)[family], folder / f"{family}-{side}"
            if side == "stock":
                write = write_published if family in PUBLISHED else write_tower
                write(place, family)
            else:  # vLLM takes a model that it has seen as it was
                place.symlink_to(folder / f"{family}-stock")
            limits = {"image": 4, "video": 1} if model.clip else {"image": 4}
            if family == "kimi_k25":
                limits = {"vision_chunk": 4}
            engine = {**ENGINE, "model": str(place), "limit_mm_per_prompt": limits}
            jobs[f"{family} {side}"] = {
                "family": family,
                "chunks": family == "kimi_k25",
                "ours": (STATIC if number % 2 else {}) if side == "ours" else None,
                "prompts": EVERYTHING if model.clip else EVERYTHING[:-1],
                "marks": [model.mark, model.clip],
                "engine": engine,
            }
    return jobs


@pytest.fixture(scope="module")
def answers(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What engines in one process say: vLLM's towers first, then ours."""
    dummy = {"load_format": "dummy", "prompts": ["text", "image"]}
    none = {"limit_mm_per_prompt": {"image": 0, "video": 0}, "prompts": ["text"]}
    jobs = {f"{family} stock": job(family, models / family, None) for family in CASES}
    drawn = {"load_format": "dummy", "dtype": "bfloat16", "prompts": EVERYTHING}
    for family in DRAWN:
        jobs[f"{family} stock"] = job(family, models / family, None, **drawn)
    pruned = {"video_pruning_rate": 0.5, "prompts": ["image", "clip"]}
    jobs["pruned stock"] = job("qwen2_5_vl", models / "qwen2_5_vl-pruned", None, **pruned)
    jobs["pruned ours"] = job("qwen2_5_vl", models / "qwen2_5_vl-pruned-ours", STATIC, **pruned)
    jobs["dummy stock"] = job("qwen3_vl", models / "qwen3_vl-dummy", None, **dummy)
    (models / "qwen3_vl-dummies").symlink_to(models / "qwen3_vl")
    jobs |= {
        f"{family} ours": job(family, models / f"{family}-ours", STATIC if number % 2 else {})
        for number, family in enumerate(CASES)
        if family != "qwen3_vl"
    }
    for family in DRAWN:
        jobs[f"{family} ours"] = job(family, models / f"{family}-ours", {}, **drawn)
    jobs["qwen2_vl ours"]["engine"]["mm_processor_cache_gb"] = 0
    patches = {"raw_images": False}
    jobs["dummy ours"] = job("qwen3_vl", models / "qwen3_vl-dummies", patches, **dummy)
    jobs["none ours"] = job("qwen3_vl", models / "qwen3_vl-none", {}, **none)
    jobs["broken ours"] = job("qwen3_vl", models / "broken", {})
    read = read_jobs(models, READ)
    stock = {name: one for name, one in [*jobs.items(), *read.items()] if one["ours"] is None}
    jobs = stock | jobs | read
    folder = tmp_path_factory.mktemp("jobs")
    return drive(folder, jobs, VLLM_ENABLE_V1_MULTIPROCESSING="0")


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What the engines of :data:`BY_HAND` say, in one process."""
    folder = tmp_path_factory.mktemp("by_hand")
    return drive(folder, read_jobs(folder, BY_HAND), VLLM_ENABLE_V1_MULTIPROCESSING="0")


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_HAND)
def test_tokens_of_other_towers_are_those_of_vllms_own(by_hand: Answers, family: str) -> None:
    compare(by_hand[f"{family} ours"], by_hand[f"{family} stock"])
    assert family not in RAW_BY_HAND or by_hand[f"{family} ours"]["about"]["raw"] >= 3


@pytest.mark.parametrize("family", [*READ, *(one for one in CASES if one != "qwen3_vl")])
def test_tokens_are_those_of_vllms_own_tower(answers: Answers, family: str) -> None:
    compare(answers[f"{family} ours"], answers[f"{family} stock"])


@pytest.mark.parametrize("model", ["dummy", *DRAWN])
def test_weights_that_vllm_draws_give_the_same_tokens(answers: Answers, model: str) -> None:
    compare(answers[f"{model} ours"], answers[f"{model} stock"])


def test_images_are_sent_raw_unless_that_is_switched_off(answers: Answers) -> None:
    for family in ("qwen2_vl", "qwen2_5_vl", "internvl", "mistral3", "llava", *DRAWN):
        assert answers[f"{family} ours"]["about"]["raw"] >= 3
        assert answers[f"{family} stock"]["about"]["raw"] == 0
    assert answers["dummy ours"]["about"]["raw"] == 0


def test_requests_that_vllm_refuses_have_vllms_errors(answers: Answers) -> None:
    ours, stock = (answers[f"qwen2_vl {side}"]["about"]["errors"] for side in ("ours", "stock"))
    assert len(stock) == 2
    assert ours == stock


def test_pruning_of_video_tokens_follows_our_tower(answers: Answers) -> None:
    """Half of a clip's tokens are dropped; with Qwen3-VL vLLM 0.32 fails on a CPU by itself."""
    compare(answers["pruned ours"], answers["pruned stock"])
    clip = answers["pruned ours"]["clip"]
    assert clip["tokens"] != answers["qwen2_5_vl ours"]["clip"]["tokens"]


def test_an_engine_without_images_keeps_no_tower(answers: Answers) -> None:
    compare(answers["none ours"], {"text": answers["qwen3_vl stock"]["text"]})


def test_a_missing_tensor_is_named(answers: Answers) -> None:
    assert "blocks.1.attn.proj.bias" in answers["broken ours"]["error"]


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"},
        {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "weights"},
    ],
    ids=["one rank", "two ranks data", "two ranks weights"],
)
def test_tokens_are_equal_in_engines_of_their_own_process(
    answers: Answers, models: Path, tmp_path: Path, ranks: dict[str, Any]
) -> None:
    jobs = {"ours": job("qwen3_vl", models / "qwen3_vl-ours", STATIC, **ranks)}
    found = drive(tmp_path, jobs, VLLM_ENABLE_V1_MULTIPROCESSING="1", VITGRAPH_VLLM="1")
    compare(found["ours"], answers["qwen3_vl stock"])
