"""``import vitgraph`` offers the library and imports its parts when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import encoders
import graphwrap
import vitgraph
import weights


@pytest.mark.parametrize("name", vitgraph.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert vars(vitgraph).get(name) is not None or getattr(vitgraph, name) is not None
    assert name in dir(vitgraph)


def test_names_are_those_of_the_packages() -> None:
    assert vitgraph.load_encoder is weights.load_encoder
    assert vitgraph.GraphedEncoder is graphwrap.GraphedEncoder
    assert vitgraph.Qwen3VLEncoder is encoders.Qwen3VLEncoder


def test_every_encoder_and_its_config_are_offered() -> None:
    configs = [family.config for family in weights.FAMILIES.values()]
    for offered in (*configs, *(family.encoder for family in weights.FAMILIES.values())):
        assert getattr(vitgraph, offered.__name__) is offered


@pytest.mark.parametrize("use", ["vitgraph.list_models", "from vitgraph import cli"])
def test_importing_vitgraph_imports_no_torch(use: str) -> None:
    code = f"import sys, vitgraph; {use}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_star_import_brings_every_encoder() -> None:
    names: dict[str, object] = {}
    exec("from vitgraph import *", names)
    assert names.keys() >= {"load_encoder", *encoders.__all__}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'vitgraph' has no attribute 'load_model'"):
        vitgraph.load_model  # noqa: B018


def test_models_are_listed_by_a_pattern_without_case() -> None:
    every = vitgraph.list_models()
    assert every == sorted(set(every))
    found = vitgraph.list_models("QWEN3-VL-8B*")
    assert found == [name for name in every if "/Qwen3-VL-8B" in name] != []
    assert vitgraph.list_models("opengvlab/*") == [x for x in every if x.startswith("OpenGVLab/")]
    assert vitgraph.list_models("nothing") == []
