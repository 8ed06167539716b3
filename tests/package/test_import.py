"""``import vitgraph`` offers the library and imports its parts when they are used."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import encoders.data
import graphwrap
import vitgraph
import weights


@pytest.mark.parametrize("name", vitgraph.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert vars(vitgraph).get(name) is not None or getattr(vitgraph, name) is not None
    assert name in dir(vitgraph)


def test_completion_offers_the_public_names_alone() -> None:
    assert dir(vitgraph) == vitgraph.__all__
    assert vitgraph.__all__ == sorted(set(vitgraph.__all__))
    modules = {name for name in vitgraph.__all__ if isinstance(getattr(vitgraph, name), ModuleType)}
    assert modules == {"features", "integrations", "plots", "seeded", "video"}
    assert not [name for name in vitgraph.__all__ if name.startswith("_") if name != "__version__"]


def run(code: str) -> list[str]:
    """The words that a program prints which imports nothing but ``vitgraph``."""
    command = [sys.executable, "-c", f"import sys, vitgraph; {code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_modules_are_there_after_importing_vitgraph_alone() -> None:
    names = [
        "features.load_features",
        "features.load_embeddings",
        "plots.plot_feature_maps",
        "seeded.write_seeded_checkpoint",
        "video.write_video",
        "integrations.vllm",
    ]
    found = ", ".join(f"vitgraph.{name}.__name__" for name in names)
    before, *after = run(f"print('torch' in sys.modules, {found})")
    assert before == "False"
    assert [name.rpartition(".")[2] for name in after] == [x.rpartition(".")[2] for x in names]


def test_what_integrations_has_is_offered_without_importing_it() -> None:
    folder = Path(vitgraph.integrations.__file__ or "").parent
    modules = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    assert dir(vitgraph.integrations) == vitgraph.integrations.__all__ == modules
    assert run("vitgraph.integrations; print('torch' in sys.modules)") == ["False"]
    with pytest.raises(AttributeError, match=r"'vitgraph.integrations' has no attribute 'onnx'"):
        vitgraph.integrations.onnx  # noqa: B018


@pytest.mark.parametrize("package", [encoders, graphwrap, weights], ids=lambda one: one.__name__)
def test_every_public_name_of_the_packages_is_offered(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(vitgraph, name) is getattr(package, name)
        assert name in vitgraph.__all__


def test_types_that_methods_of_encoders_name_are_offered() -> None:
    bases = (vitgraph.Encoder, vitgraph.VisionEncoder, vitgraph.PathsEncoder)
    methods = [
        method
        for base in (*bases, vitgraph.GraphedEncoder, vitgraph.DataParallelEncoder)
        for method in vars(base).values()
        if inspect.isfunction(method)
    ]
    texts = " ".join(str(text) for method in methods for text in method.__annotations__.values())
    sources = (encoders.data, encoders.contract.Preprocessor)
    source = "".join(map(inspect.getsource, sources))
    defined = re.findall(r"^(?:class )?([A-Z][a-z]\w+)(?:\(|: TypeAlias)", source, re.M)
    named = set(defined) & set(re.findall(r"\w+", texts))
    assert {"EncoderOutput", "GridLike", "Metadata", "Preprocessor", "VisionInputs"} <= named
    assert named <= set(vitgraph.__all__)


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
