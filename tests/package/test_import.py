"""``import vitgraph`` offers the library and imports its parts when they are used."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import encoders.streams
import graphwrap
import vitgraph
import weights.published

ROOT = Path(__file__).parents[2]
PUBLIC_MODULES = (
    vitgraph.features,
    vitgraph.plots,
    vitgraph.seeded,
    vitgraph.types,
    vitgraph.video,
)


@pytest.mark.parametrize("name", vitgraph.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert vars(vitgraph).get(name) is not None or getattr(vitgraph, name) is not None
    assert name in dir(vitgraph)


def test_completion_offers_the_public_names_alone() -> None:
    assert dir(vitgraph) == vitgraph.__all__
    assert vitgraph.__all__ == sorted(set(vitgraph.__all__))
    modules = {name for name in vitgraph.__all__ if isinstance(getattr(vitgraph, name), ModuleType)}
    assert modules == {"features", "integrations", "plots", "seeded", "types", "video"}
    assert not [name for name in vitgraph.__all__ if name.startswith("_") if name != "__version__"]


@pytest.mark.parametrize(
    "module",
    [encoders, encoders.streams, weights, weights.published, vitgraph.seeded],
    ids=lambda module: module.__name__,
)
def test_completion_offers_names_that_are_not_imported_yet(module: ModuleType) -> None:
    assert set(module.__all__) <= set(dir(module))


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
        vitgraph.integrations.onnx  # type: ignore[attr-defined]  # noqa: B018


def public_functions() -> Iterator[FunctionType]:
    """The public functions, and the public methods of public classes, in all public modules."""
    for module in (vitgraph, *PUBLIC_MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                for method, function in inspect.getmembers(value, inspect.isfunction):
                    if not method.startswith("_") or method in ("__init__", "__call__"):
                        yield function
            elif isinstance(value, FunctionType):
                yield value


def test_types_that_public_signatures_name_are_offered() -> None:
    defined = {
        name
        for package in ("encoders", "graphwrap", "weights", "vitgraph")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.ClassDef, ast.AnnAssign))  # an alias is annotated as one
        for name in [node.name if isinstance(node, ast.ClassDef) else ast.unparse(node.target)]
    }
    texts = [
        str(annotation)
        for function in public_functions()
        if function.__module__.split(".")[0] in ("encoders", "graphwrap", "weights", "vitgraph")
        for annotation in function.__annotations__.values()
    ]
    named = {name for text in texts for name in re.findall(r"\w+", text)} & defined
    assert {
        "EncoderOutput",
        "GridLike",
        "Kernels",
        "Metadata",
        "Preprocessor",
        "VectorPool",
    } <= named
    offered = {name for module in (vitgraph, *PUBLIC_MODULES) for name in module.__all__}
    # How an encoder's items are encoded, which its methods ask it for, and the totals that the
    # capacities of a graph are compared with.
    assert named - offered == {"Batch", "ItemEncoder", "SharedItemEncoder"}


@pytest.mark.parametrize("package", [encoders, graphwrap, weights], ids=lambda one: one.__name__)
def test_a_name_is_the_same_in_vitgraph_and_in_its_package(package: ModuleType) -> None:
    for offering in (vitgraph, vitgraph.types):
        shared = {*offering.__all__} & {*package.__all__}
        assert shared
        for name in shared:
            assert getattr(offering, name) is getattr(package, name)


def test_every_encoder_and_its_config_are_offered() -> None:
    for family in weights.FAMILIES.values():
        assert getattr(vitgraph, family.encoder.__name__) is family.encoder
        assert getattr(vitgraph.types, family.config.__name__) is family.config


@pytest.mark.parametrize("use", ["vitgraph.list_models", "from vitgraph import cli"])
def test_importing_vitgraph_imports_no_torch(use: str) -> None:
    code = f"import sys, vitgraph; {use}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_star_import_brings_every_encoder() -> None:
    names: dict[str, object] = {}
    exec("from vitgraph import *", names)
    families = weights.FAMILIES.values()
    assert names.keys() >= {"load_encoder", *(family.encoder.__name__ for family in families)}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'vitgraph' has no attribute 'load_model'"):
        vitgraph.load_model  # type: ignore[attr-defined]  # noqa: B018


def test_models_are_listed_by_a_pattern_without_case() -> None:
    every = vitgraph.list_models()
    assert every == sorted(set(every))
    found = vitgraph.list_models("QWEN3-VL-8B*")
    assert found == [name for name in every if "/Qwen3-VL-8B" in name] != []
    assert vitgraph.list_models("opengvlab/*") == [x for x in every if x.startswith("OpenGVLab/")]
    assert vitgraph.list_models("nothing") == []
