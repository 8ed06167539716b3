"""Makes pages of the site that are not written as they stand.

Pages from outside of ``docs`` join the site, whose root stands for the repository and for ``docs``.
In the repository, the README links to ``docs/graphs.md`` and that page to ``../README.md``; in the
site, the links lose ``docs/`` and ``../``. The reference lists what the packages export.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
TAKEN = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/*.md",
    "benchmarks/results/*.json",
    "examples/*",
    "notebooks/*.ipynb",
)
"""Patterns of the files outside of ``docs`` that pages link to."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files that lie outside of ``docs``."""
    for pattern in TAKEN:
        for path in filter(Path.is_file, sorted(ROOT.glob(pattern))):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(text: str, *, page: Any, config: Any, files: Files) -> str:
    """Rewrite links from the folders of the repository to that of the site, and fill the lists."""
    name = page.file.src_uri
    if (ROOT / name).is_file():  # a page from outside of docs
        return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", text)
    if "/" not in name:
        return re.sub(r"\]\(\.\./", "](", text)
    return re.sub("<!-- names: (.*) -->", lambda mark: listed(mark[1]), text)


def on_page_content(html: str, *, page: Any, config: Any, files: Files) -> str:
    """Drop the roles of reStructuredText that docstrings put before a name."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):\s*(?=<code>)", "", html)


def listed(package: str) -> str:
    """Return the entries of the names of a package, as attributes of ``vitgraph``.

    Encoders and checkpoints have pages of their own, and the page of ``vitgraph`` has all others.
    The methods that all encoders share are listed with the base classes.
    """
    module = import_module(package)
    offered = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
    # Modules have entries of their own on the page.
    names = {name for name, value in offered.items() if not isinstance(value, ModuleType)}
    if package == "vitgraph":
        names -= {*import_module("encoders").__all__, *import_module("weights").__all__}
    return "\n\n".join(map(entry, sorted(names, key=last_configs)))


def last_configs(name: str) -> tuple[bool, str]:
    """Sort key: configs come after everything else."""
    return name.endswith("Config"), name


def entry(name: str) -> str:
    """Return the entry of one public name, with inherited methods unless it is a family."""
    family = f"{name.removesuffix('Encoder')}Config" in import_module("encoders").__all__
    return f"::: vitgraph.{name}\n    options: {{inherited_members: {str(not family).lower()}}}"
