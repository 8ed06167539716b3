"""The JSON files of the families: their form, what they say, and what reading them costs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from encoders import ClipConfig, CRadioConfig
from tests.support.families.json_files import formatted
from weights import FAMILIES, Family, published
from weights.configs import build_config
from weights.published import PUBLISHED
from weights.strict_json import parse_json

FILES = sorted(published.FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_of_a_family_is_formatted(path: Path) -> None:
    text = path.read_text("utf-8")
    wanted = formatted(parse_json(text.encode(), path.name)) + "\n"
    assert text == wanted, "run: python tests/support/families/json_files.py"


def test_the_formatter_keeps_values_and_lines_short() -> None:
    model = {"repo_id": "owner/" + "x" * 96, "parameters": 1}
    value = {"lists": [[n, n] for n in range(60)], "empty": {}, "é": None, "models": [model, model]}
    text = formatted(value)
    assert json.loads(text) == value
    assert formatted(json.loads(text)) == text
    lines = [line for line in text.splitlines() if "repo_id" not in line]
    assert max(map(len, lines)) <= 100
    assert sum("repo_id" in line for line in text.splitlines()) == 2  # one line per model


def test_each_family_has_one_record_and_one_file() -> None:
    assert published.family_names() == tuple(sorted(FAMILIES)) == tuple(p.stem for p in FILES)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_the_file_of_a_family_agrees_with_its_record(family: Family) -> None:
    facts = published.family_facts(family.name)
    assert facts.encoder == family.encoder.__name__
    assert facts.images_only == {x.name: x.images_only for x in family.layouts if x.images_only}
    used = [layout.processor_files for one in FAMILIES.values() for layout in one.layouts]
    assert all(files in used for files in facts.processors.values())
    assert {small.repo_id for small in facts.small.values()} <= {
        model.repo_id for model in family.facts.published
    }


def test_published_models_are_listed_once() -> None:
    repos = [model.repo_id for model in PUBLISHED]
    assert len(set(repos)) == len(repos)


def test_parameter_counts_tell_towers_apart_as_configs_do() -> None:
    """A list that imports no torch, and so builds no configs, groups checkpoints by the counts.

    Towers of CLIP that differ in their activation only are one size of it, and so are towers of
    C-RADIO that differ in the size of images only.
    """
    by_config: dict[object, list[str]] = {}
    by_count: dict[object, list[str]] = {}
    for model in PUBLISHED:
        config = build_config(FAMILIES[model.family], model.config, None, model.repo_id)
        counts = (model.family, model.parameters, model.projector_parameters)
        if isinstance(config, ClipConfig):
            config = replace(config, activation="gelu")
        if isinstance(config, CRadioConfig):
            config = replace(config, image_size=(1, 1))
        by_config.setdefault((model.family, config), []).append(model.repo_id)
        by_count.setdefault(counts, []).append(model.repo_id)
    assert [*by_config.values()] == [*by_count.values()]


def test_published_checkpoints_are_read_without_torch_and_file_by_file() -> None:
    code = """
import sys
from weights import published
assert published.family_facts("qwen3_vl").title == "Qwen3-VL"
assert published.family_facts.cache_info().misses == 1
assert len(published.PUBLISHED) > 100
assert not {"torch", "numpy", "encoders", "huggingface_hub"} & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[4])
