"""Data flows one way: weights know encoders, graphwrap only the contract, vitgraph all three."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.source_trees import nodes_of, tree_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("encoders", "graphwrap", "weights", "vitgraph")
# What may be imported besides the standard library; sub-packages included.
ALLOWED = {
    "encoders": {"torch", "einops", "encoders"},
    "graphwrap": {
        "torch",
        "einops",
        "numpy",
        "tqdm",
        "graphwrap",
        "encoders.contract",
        "encoders.grids",
        "encoders.streams",
    },
    "weights": {
        "torch",
        "safetensors",
        "huggingface_hub",
        "numpy",
        "tqdm",
        "weights",
        "encoders",
    },
    "vitgraph": {
        "torch",
        "fsspec",
        "safetensors",
        "numpy",
        "PIL",
        "tqdm",
        "matplotlib",
        "av",
        "pyarrow",
        *PACKAGES,
    },
}
# The modules that other packages may import, each with the names that it lists in ``__all__``.
FACES = {
    "encoders",
    "encoders.accelerated",
    "encoders.contract",
    "encoders.grids",
    "encoders.inputs",
    "encoders.internals",
    "encoders.streams",
    "graphwrap",
    "weights",
    "weights.files",
    "weights.published",
}
# What the files at the top of ``encoders`` are, besides the families.
COMMON = {
    "__init__",
    "block_parts",
    "contract",
    "data",
    "grids",
    "hf_config",
    "internals",
}
# The files and folders of ``encoders`` that each of its folders may import at the top of a file.
KNOWS = {
    "layers": {"data", "hf_config", "layers"},
    "base": {"contract", "data", "grids", "layers", "base", "streams.items"},
    "inputs": {"data", "inputs"},
    "streams": {"data", "grids", "inputs", "streams"},
    "accelerated": {"contract", "data", "block_parts", "layers", "accelerated"},
}
# What a family may import at the top of its file.
FAMILY_KNOWS = {"data", "grids", "hf_config", "base", "layers"}
# The most files and lines that the file of a family closes over, itself included.
CLOSURE = (14, 3000)
CLOSURE_OF_SEVERAL_TOWERS = (18, 3600)  # DeepSeek's
# The only files of ``encoders`` that know what an image, an array or a video file is.
INTAKE = {
    "image_files": {"PIL", "pillow_heif"},
    "intake": {"PIL", "numpy"},
    "clips": {"numpy"},
    "images": {"numpy", "PIL"},
    "video_files": {"av"},
}
# What type checkers alone import.
FOR_CHECKERS = {"typing_extensions", "_typeshed"}
# What the files of ``vitgraph.integrations`` import, and nothing else does.
INTEGRATED = {
    "dynamo": {"dynamo"},
    "export": {"onnxscript"},
    "transformers": {"transformers"},
    "sentence_transformers": {"sentence_transformers"},
    "vllm_plugin": {"vllm"},
}
# The only file of ``encoders`` that knows the Hub, and inside its functions alone.
SAVING = Path("encoders/base/saving.py")
# The only file of ``vitgraph`` that reads data sets and asks the Hub for their commit.
TABLES = Path("vitgraph/embedding/sources/tables.py")


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names that a file imports, relative ones resolved."""
    names: set[str] = set()
    parts = path.relative_to(ROOT).with_suffix("").parts
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names |= {module} if node.module else {f"{module}.{a.name}" for a in node.names}
    return frozenset(names)


def covers(allowed: str, name: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


def foreign(path: Path) -> set[str]:
    known = {*sys.stdlib_module_names, *FOR_CHECKERS}
    return {name for name in imports(path) if name.split(".")[0] not in known}


def extra(path: Path) -> set[str]:
    """What one file may import beyond its package."""
    if "integrations" in path.parts:
        inside = path.parts[path.parts.index("integrations") + 1]
        return INTEGRATED.get(inside.removesuffix(".py"), set())
    if "accelerated" in path.parts:
        return {"triton", "flash_attn"} if path.stem == "flash_attn_4" else {"triton"}
    if path.relative_to(ROOT) == SAVING:
        return {"safetensors", "huggingface_hub"}
    if path.parent.name == "streams":
        return {"tqdm"}
    if path.relative_to(ROOT) == TABLES:
        return {"datasets", "huggingface_hub"}
    return INTAKE.get(path.stem, set())


def imports_at_the_top(path: Path) -> set[str]:
    """Dotted names that a file imports outside of functions and of blocks for types alone."""
    names: set[str] = set()
    parts = path.relative_to(ROOT).with_suffix("").parts
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            # A name that is imported from a package may be a module.
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def neighbours(path: Path) -> set[str]:
    """Modules of ``encoders`` that a file of it imports at the top, without the package's name."""
    return {
        name.removeprefix("encoders.")
        for name in imports_at_the_top(path)
        if covers("encoders", name)
    }


def families() -> list[Path]:
    return [path for path in (ROOT / "encoders").glob("*.py") if path.stem not in COMMON]


def closure(path: Path) -> set[Path]:
    """The files of ``encoders`` that a file reaches by imports outside of functions."""
    found, left = {path}, [path]
    while left:
        for name in imports_at_the_top(left.pop()):
            file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
            if covers("encoders", name) and file.exists() and file not in found:
                found.add(file)
                left.append(file)
    return found


def files_imported(path: Path, in_functions: bool) -> set[Path]:
    """The files of our packages that a file imports; those for types alone only with functions."""
    parts = path.relative_to(ROOT).parts
    found = set()
    for node in nodes_of(path) if in_functions else tree_of(path).body:
        if isinstance(node, ast.ImportFrom):
            base = ROOT.joinpath(*parts[: len(parts) - node.level]) if node.level else ROOT
            module = base.joinpath(*filter(None, (node.module or "").split(".")))
            for place in (module / alias.name for alias in node.names):
                file = place if place.with_suffix(".py").exists() or place.is_dir() else module
                found |= {file.with_suffix(".py"), file / "__init__.py"}
    return {file for file in found if file.exists() and file != path}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_lies_before_it(package: str) -> None:
    for path in modules(package):
        strangers = {
            name
            for name in foreign(path)
            if not any(covers(allowed, name) for allowed in ALLOWED[package] | extra(path))
        }
        assert not strangers, f"{path.relative_to(ROOT)} imports {sorted(strangers)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_of_another_only_what_its_face_offers(package: str) -> None:
    for path in modules(package):
        for node in nodes_of(path):
            if not isinstance(node, ast.ImportFrom) or node.level:
                continue
            other = str(node.module)
            if other.split(".")[0] in set(PACKAGES) - {package}:
                assert other in FACES, f"{path}: {other} is private"
                offered = {*import_module(other).__all__}
                assert {alias.name for alias in node.names} <= offered, f"{path}: {other}"


@pytest.mark.parametrize("face", sorted(FACES))
def test_a_face_lists_its_names_and_no_name_that_is_not_there(face: str) -> None:
    module = import_module(face)
    assert len(module.__all__) == len({*module.__all__}) > 0
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_contributing_names_the_modules_that_other_packages_may_import() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (sentence,) = re.findall(r"Other packages import (.*?), each\s+with", text, re.S)
    assert set(re.findall(r"`([\w.]+)`", sentence)) == FACES


def test_a_family_imports_what_all_share_and_no_other_family() -> None:
    for path in families():
        for name in neighbours(path):
            assert name.split(".")[0] in FAMILY_KNOWS, f"{path.name} imports {name}"


@pytest.mark.parametrize("folder", KNOWS)
def test_a_folder_of_encoders_imports_only_what_lies_before_it(folder: str) -> None:
    for path in modules(f"encoders/{folder}"):
        for name in neighbours(path):
            assert any(covers(known, name) for known in KNOWS[folder]), f"{path}: {name}"


@pytest.mark.parametrize("package", [*PACKAGES, "benchmarks"])
def test_neither_files_nor_folders_import_one_another_in_a_circle(package: str) -> None:
    """In each folder, its files and the folders in it; a folder imports what any file in it does.

    In ``vitgraph``, imports inside functions count, too. Its ``__init__`` is left out: it imports
    inside a function whatever users name.
    """
    graphs: defaultdict[Path, dict[Path, set[Path]]] = defaultdict(lambda: defaultdict(set))
    for path in modules(package):
        if path != ROOT / "vitgraph" / "__init__.py":
            for other in files_imported(path, package == "vitgraph"):
                shared = Path(os.path.commonpath((path.parent, other.parent)))
                one, another = (shared / p.relative_to(shared).parts[0] for p in (path, other))
                graphs[shared][one].add(another)
    assert graphs[ROOT / package]
    for folder, graph in graphs.items():
        try:
            tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            circle = " -> ".join(path.name for path in error.args[1])
            pytest.fail(f"{folder.relative_to(ROOT)}: {circle}")


@pytest.mark.parametrize("path", families(), ids=lambda path: path.stem)
def test_a_family_closes_over_few_files(path: Path) -> None:
    files = closure(path)
    assert ROOT / "encoders" / "contract.py" not in files  # base classes name its types alone
    most, lines = CLOSURE_OF_SEVERAL_TOWERS if "deepseek" in path.stem else CLOSURE
    count = sum(len(file.read_text().splitlines()) for file in files)
    assert len(files) <= most, sorted(file.name for file in files)
    assert count <= lines, f"{count} lines in {len(files)} files"


def test_only_the_accelerated_method_imports_accelerated_towers() -> None:
    """In the libraries, that is; ``vitgraph`` may import whatever they have."""
    users = {
        path.relative_to(ROOT / package).parts[0]
        for package in ("encoders", "graphwrap", "weights")
        for path in modules(package)
        if any(covers("encoders.accelerated", name) for name in imports(path))
    }
    assert users <= {"accelerated", "base"}
    importers = [
        function.name
        for function in nodes_of(ROOT / "encoders" / "base" / "vision_encoder.py")
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.module == "accelerated"
    ]
    assert importers == ["accelerated"]


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_for_type_checkers_is_never_imported_when_code_runs(package: str) -> None:
    for path in modules(package):
        checked = [
            child
            for node in nodes_of(path)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for child in ast.walk(node)
        ]
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module in FOR_CHECKERS:
                assert node in checked, f"{path}: line {node.lineno}"


def test_saving_imports_the_hub_inside_functions_alone() -> None:
    lines = (ROOT / SAVING).read_text().splitlines()
    imports = [line for line in lines if "huggingface_hub" in line or "safetensors import" in line]
    assert imports
    assert all(line.startswith("    ") for line in imports)


def test_one_file_alone_imports_flash_attention() -> None:
    users = {
        path.stem
        for package in PACKAGES
        for path in modules(package)
        if any(covers("flash_attn", name) for name in imports(path))
    }
    assert users == {"flash_attn_4"}


QWEN_LIKE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paddleocr_vl", "glm4v", "glm_ocr")


@pytest.mark.parametrize(
    ("name", "families"),
    [
        ("rotary_cos_sin", QWEN_LIKE),
        ("rotate", (*QWEN_LIKE, "pixtral")),
        ("rotate", ("step3_vl", "llama4")),
        ("Head", ("siglip", "siglip2")),
        ("axis_weights", ("siglip2", "lfm2_vl")),
    ],
)
def test_copies_in_families_are_identical(name: str, families: tuple[str, ...]) -> None:
    texts = set()
    for family in families:
        text = (ROOT / "encoders" / f"{family}.py").read_text()
        (node,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == name]
        texts.add(ast.get_source_segment(text, node))
    assert len(texts) == 1


def test_contributing_says_what_graphwrap_may_import() -> None:
    (line,) = re.findall(
        r"^- `graphwrap` may import (.*?) only\.", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )
    known = {name for name in ALLOWED["graphwrap"] if name.startswith("encoders.")}
    assert set(re.findall(r"`([\w.]+)`", line)) == known


def test_graphwrap_names_no_model() -> None:
    names = {"qwen", "intern", *(path.stem.partition("_")[0] for path in families())}
    for path in modules("graphwrap"):
        text = path.read_text().lower()
        assert not [name for name in names if re.search(rf"\b{name}", text)], path


def test_importing_families_needs_no_image_library_and_the_library_no_model_zoo() -> None:
    names = ", ".join(f"encoders.{path.stem}" for path in families())
    code = (
        f"import sys, {names}\n"
        "print('PIL' in sys.modules)\n"
        "import encoders, weights, graphwrap\n"
        "heavy = {'transformers', 'torchvision', 'timm', 'jax', 'matplotlib', 'av', 'vitgraph',\n"
        "  'triton', 'flash_attn', 'encoders.accelerated'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "[]"]
