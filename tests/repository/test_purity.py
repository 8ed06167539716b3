"""Private names of others have few homes, and no module keeps what it was called with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.source_trees import tree_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("encoders", "graphwrap", "weights", "vitgraph")
PRIVATE = re.compile(
    r"torch\.(?:ops\.\w+\.)?_[a-z]|torch\._C|_current_level|_global_forward|_get_backend|\._version\b"
    r"|(?<!self)\._(?:modules|parameters|buffers|(?:for|back)ward_(?:pre_)?hooks)\b"
)
"""Names of torch that it does not promise, and those by which a module keeps what is in it."""
HOMES = {
    "graphwrap/torch_internals.py": "captures, streams, and the modules that graphs guard",
    "encoders/layers/torch_internals.py": "dicts of modules, autograd, attention, and products",
    "encoders/inputs/torch_internals.py": "views of several shapes in one call",
    "vitgraph/parallel/torch_internals.py": "how long a process group waits",
}
"""The files that use such names, and what for."""
HOME_OF_FLASH_ATTN = "encoders/accelerated/attention/flash_attn_4.py"
"""The file that imports private names of flash-attn: a kernel that writes to a given tensor, and
its cache of compiled kernels."""
KEPT = {
    "graphwrap/torch_internals.py": ["_unended"],
    "encoders/inputs/intake.py": ["_FAILED"],
}
"""The collections of modules that functions change: graphs that live as long as the process, and
the images, held weakly, that PIL could not decode."""
CHANGES = {"append", "add", "update", "extend", "insert", "setdefault"}
CHANGES |= {"pop", "popitem", "remove", "discard", "clear"}
"""The methods by which a list, a dict or a set is changed."""


def sources() -> list[Path]:
    return sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))


def test_private_names_of_torch_stand_in_their_homes_alone() -> None:
    used = {path for path in sources() if PRIVATE.search(path.read_text())}
    assert {str(path.relative_to(ROOT)) for path in used} == set(HOMES)


def imports_private_names(tree: ast.Module) -> bool:
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 0]
    names = [alias.name for node in imports for alias in node.names]
    return any(name.startswith("_") for name in names)


def test_one_file_imports_private_names_of_another_package() -> None:
    found = [path for path in sources() if imports_private_names(tree_of(path))]
    assert {str(path.relative_to(ROOT)) for path in found} - {*HOMES} == {HOME_OF_FLASH_ATTN}


def module_names(tree: ast.Module) -> set[str]:
    """The names that a module assigns outside of its functions and classes."""
    targets = [
        target
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def changed_names(tree: ast.Module) -> Iterator[str]:
    """The names whose value a function changes in place, or assigns as a global."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.value, ast.Name):
            method = isinstance(node, ast.Attribute) and node.attr in CHANGES
            entry = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
            if method or entry:
                yield node.value.id


def test_no_function_changes_a_list_or_dict_of_its_module() -> None:
    for path in sources():
        tree = tree_of(path)
        found = sorted(module_names(tree) & set(changed_names(tree)))
        assert found == KEPT.get(str(path.relative_to(ROOT)), []), path


def test_no_module_adds_names_to_itself_when_it_runs() -> None:
    assert [path for path in sources() if "globals()[" in path.read_text()] == []
