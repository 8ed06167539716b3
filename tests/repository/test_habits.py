"""House habits that a linter does not know."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.support.source_trees import nodes_of, tree_of

ROOT = Path(__file__).parents[2]
LIBRARY = ("encoders", "graphwrap", "weights")
PACKAGES = (*LIBRARY, "vitgraph")
THEIR_SIGNATURES = {
    ("transformers", "forward"),
    *(("sentence_transformers", name) for name in ("preprocess", "forward", "save", "load")),
    *((name, "embed_multimodal") for name in ("models", "replacing")),
    ("raw_processor", "get_hf_processor"),
}
"""Functions of ``integrations`` with another library's signature, by file and name."""

READS_ITEMS = {
    "encoders/inputs/gpu_decoding.py": ["_file"],
    "encoders/streams/preparing.py": ["_decoded", "_read"],
    "vitgraph/embedding/job.py": ["_estimate"],
    "vitgraph/embedding/large_images.py": ["warn", "_area"],
    "vitgraph/embedding/planning/sample.py": ["take_sample"],
}
"""Where an item is read, by code of the user's own: whatever that raises is the item's error."""


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def calls(path: Path, *names: str) -> list[int]:
    """Lines where one of the functions ``names`` is called by its bare name."""
    return [
        node.lineno
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def test_no_test_module_imports_another_test_module() -> None:
    """So pytest can collect each file alone: what tests share stands in ``tests/support``."""
    for path in sources("tests"):
        imported = {node.module for node in nodes_of(path) if isinstance(node, ast.ImportFrom)}
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        tests = [name for name in imported if name and name.split(".")[-1].startswith("test_")]
        assert tests == [], path


def test_library_never_prints_exits_or_probes() -> None:
    for path in sources(*LIBRARY):
        assert calls(path, "print", "exit", "hasattr", "breakpoint") == [], path


def test_no_blanket_except() -> None:
    for path in sources(*PACKAGES):
        blanket = []
        for handler, function in handlers(tree_of(path)):
            assert handler.type, f"{path}: line {handler.lineno}: bare except"
            names = {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
            raises_again = ast.unparse(handler.body[-1]) == "raise"
            if "Exception" in names and not raises_again:
                blanket.append(function)
        assert blanket == READS_ITEMS.get(str(path.relative_to(ROOT)), []), path


def handlers(node: ast.AST, function: str = "") -> Iterator[tuple[ast.ExceptHandler, str]]:
    """Every ``except``, with the name of the function that it stands in."""
    function = node.name if isinstance(node, ast.FunctionDef) else function
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler):
            yield child, function
        yield from handlers(child, function)


def test_weights_are_never_loaded_leniently() -> None:
    for path in sources(*PACKAGES):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) != "zip":
                arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert arguments.get("strict") != "False", f"{path}: line {node.lineno}"


def test_public_signatures_have_no_kwargs_and_no_mutable_default() -> None:
    for path in sources(*PACKAGES):
        for function in public_functions(path):
            if any(ast.unparse(decorator) == "overload" for decorator in function.decorator_list):
                continue  # what can be called is the implementation, which lists its keywords
            integrated = "integrations" in path.parts
            theirs = integrated and (path.stem, function.name) in THEIR_SIGNATURES
            assert theirs or function.args.kwarg is None, f"{path}: {function.name} takes **kwargs"
            defaults = [*function.args.defaults, *function.args.kw_defaults]
            mutable = [d for d in defaults if isinstance(d, (ast.List, ast.Dict, ast.Set))]
            assert not mutable, f"{path}: {function.name} has a mutable default"


def public_functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def test_type_checkers_do_not_see_imports_on_first_use() -> None:
    """A module with ``__getattr__`` would have every misspelt name for them."""
    made_for_vllm = ROOT / "vitgraph" / "integrations" / "vllm_plugin" / "models.py"
    for path in sources(*PACKAGES):
        names = {node.name for node in tree_of(path).body if isinstance(node, ast.FunctionDef)}
        assert "__getattr__" not in names or path == made_for_vllm, path


def test_every_argument_of_a_docstring_is_a_parameter() -> None:
    """A class documents the parameters of its ``__init__``, or else its fields."""
    entry = re.compile(r"^ {4}(\w+(?:, \w+)*): ", re.M)
    listed = 0
    for path in sources(*PACKAGES):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                section = (ast.get_docstring(node) or "").partition("\nArgs:\n")[2]
                section = re.split(r"^\S", section, maxsplit=1, flags=re.M)[0]
                names = {name for entries in entry.findall(section) for name in entries.split(", ")}
                listed += len(names)
                unknown = sorted(names - parameters(node))
                assert not unknown, f"{path}: line {node.lineno}: {node.name} lists {unknown}"
    assert listed > 1000


def parameters(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """The parameters of a function, or those that a class is made with."""
    if isinstance(node, ast.FunctionDef):
        return {found.arg for found in ast.walk(node.args) if isinstance(found, ast.arg)}
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return parameters(part)
    return {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_has_a_docstring(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        exported = getattr(module, name)
        if inspect.isclass(exported) or inspect.isfunction(exported):
            assert exported.__doc__, f"{package}.{name}"
            # A NamedTuple or dataclass without a docstring has one made of its fields.
            assert not exported.__doc__.startswith(f"{name}("), f"{package}.{name}"


@pytest.mark.parametrize("package", LIBRARY)
def test_every_public_method_of_an_exported_class_is_documented(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        exported = getattr(module, name)
        if not inspect.isclass(exported) or issubclass(exported, BaseException):
            continue
        if Protocol in exported.__mro__:  # says which methods; the class that has them says what
            continue
        for method, function in inspect.getmembers(exported, inspect.isfunction):
            ours = function.__module__.split(".")[0] in PACKAGES
            if ours and not method.startswith("_") and method != "forward":
                assert inspect.getdoc(function), f"{package}.{name}.{method}"
