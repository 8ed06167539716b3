"""A vLLM that nobody changed reads our features: from a store, from requests, and from Dynamo.

One engine answers the same questions in every way, and counts the calls of its own tower.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_models import write_tiny

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines
HERE = Path(__file__).parent
SIZES = [(96, 64), (64, 96), (160, 128)]
OTHERS = (
    *("glm4v", "glm_ocr", "gemma3", "gemma4", "mistral3", "llava", "idefics3", "paddleocr_vl"),
    "lfm2_vl",
)
"""Models of ``tiny_towers`` that are run by hand, ``pytest -m "engines and slow"``."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("store")
    model, photos, store = (
        write_tiny(folder / "model", "qwen3_vl"),
        folder / "photos",
        folder / "store",
    )
    images = write_photos(photos)
    job = ["embed", model, photos, "--out", store, "--format", "vllm", "--dtype", "float32"]
    run("-m", "vitgraph", *job)
    request = {"model": str(model), "store": str(store), "images": images}
    (folder / "request.json").write_text(json.dumps(request))
    run(HERE / "feed.py", folder / "request.json", folder / "answers.json")
    return json.loads((folder / "answers.json").read_text())


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Answers of the models of :data:`OTHERS`, each with a store of three images."""
    from tiny_towers import MODELS, write_tower

    folder = tmp_path_factory.mktemp("others")
    photos = write_photos(folder / "photos")
    requests = {}
    for name in OTHERS:
        model, store = write_tower(folder / name, name), folder / f"{name}-store"
        job = ["embed", model, folder / "photos", "--out", store, "--format", "vllm"]
        run("-m", "vitgraph", *job, "--dtype", "float32")
        requests[name] = {
            "model": str(model),
            "store": str(store),
            "images": photos,
            "mark": MODELS[name].mark,
        }
    (folder / "requests.json").write_text(json.dumps(requests))
    run(HERE / "feed_others.py", folder / "requests.json", folder / "answers.json")
    return json.loads((folder / "answers.json").read_text())


def write_photos(folder: Path) -> list[str]:
    """Write pictures of noise, and return their paths."""
    dice = np.random.default_rng(1)
    folder.mkdir()
    for number, (width, height) in enumerate(SIZES):
        pixels = dice.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return [str(folder / f"{number}.png") for number in range(len(SIZES))]


def run(*command: object) -> None:
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def assert_same(found: Any, wanted: Any, names: tuple[str, ...]) -> None:
    assert set(found) == set(names)
    for name in names:
        (tokens, logprob), (theirs, their_logprob) = found[name], wanted[name]
        assert tokens == theirs
        assert abs(logprob - their_logprob) < 1e-3


def test_features_of_the_store_give_the_tokens_of_vllms_tower(answers: Any) -> None:
    own, store = answers["its own tower"], answers["the store"]
    assert_same(store["answers"], own["answers"], ("one", "two"))
    assert own["calls"] > 0
    assert store["calls"] == 0


def test_a_grid_may_take_the_place_of_an_image_in_the_store(answers: Any) -> None:
    own, grids = answers["its own tower"], answers["grids alone"]
    assert_same(grids["answers"], own["answers"], ("one", "two"))
    assert grids["calls"] == 0


def test_vllm_encodes_the_image_whose_file_is_missing_itself(answers: Any) -> None:
    own, missing = answers["its own tower"], answers["one file missing"]
    assert_same(missing["answers"], own["answers"], ("one", "two"))
    assert missing["calls"] == 1


def test_other_features_under_a_key_give_other_tokens(answers: Any) -> None:
    blank = answers["a blank image"]
    assert blank["calls"] == 0
    assert blank["answers"]["one"][0] != answers["its own tower"]["answers"]["one"][0]


def test_multi_modal_data_gives_the_tokens_of_vllms_tower(answers: Any) -> None:
    own, made = answers["its own tower"], answers["multi_modal_data"]
    assert_same(made["answers"], own["answers"], ("one", "two", "clip"))
    assert made["calls"] == 0


def test_prompts_of_dynamo_give_the_tokens_of_vllms_tower(answers: Any) -> None:
    own, made = answers["its own tower"], answers["Dynamo's prompts"]
    assert_same(made["answers"], own["answers"], ("one", "two"))
    assert made["calls"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_stored_features_of_newer_towers_give_vllms_tokens(others: Any, name: str) -> None:
    own, store, blank = (others[name][way] for way in ("own", "store", "blank"))
    assert_same(store["answers"], own["answers"], ("one", "two"))
    assert (own["calls"] > 0, store["calls"], blank["calls"]) == (True, 0, 0)
    for question, (_, logprob) in own["answers"].items():
        assert abs(blank["answers"][question][1] - logprob) > 0.01  # so the features matter
