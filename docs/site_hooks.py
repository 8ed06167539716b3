"""Makes pages of the site that are not written as they stand.

Pages from outside of ``docs`` join the site, whose root stands for the repository and for ``docs``.
In the repository, the README links to ``docs/graphs.md`` and that page to ``../README.md``; in the
site, the links lose ``docs/`` and ``../``. The reference lists what the packages export. A notebook
becomes a page that shows its outputs.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
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
    "CODE_OF_CONDUCT.md",
    "benchmarks/*.md",
    "benchmarks/results/*.json",
    "examples/*",
)
"""Patterns of the files outside of ``docs`` that pages link to."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files that lie outside of ``docs``."""
    for pattern in TAKEN:
        for path in filter(Path.is_file, sorted(ROOT.glob(pattern))):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        for name, content in notebook_files(path).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def notebook_files(path: Path) -> dict[str, str | bytes]:
    """Return the page of a notebook and the pictures among its outputs, by name."""
    found: dict[str, str | bytes] = {}
    page = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        page.append(source if cell["cell_type"] == "markdown" else fenced(source, "python"))
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(found) + 1}.png"
                found[name] = b64decode("".join(data["image/png"]))
                page.append(f"![Output of the cell above]({name})")
            else:
                page.append(fenced("".join(output.get("text") or data["text/plain"]), "text"))
    return found | {f"{path.stem}.md": "\n\n".join(page)}


def fenced(text: str, language: str) -> str:
    """Return a block of code or of text that was printed."""
    return f"```{language}\n{text.rstrip()}\n```"


def on_page_markdown(text: str, *, page: Any, config: Any, files: Files) -> str:
    """Rewrite links from the folders of the repository to that of the site, and fill the lists."""
    name = page.file.src_uri
    text = re.sub(r"(\.\./notebooks/\w+)\.ipynb\)", r"\1.md)", text)
    if name.startswith("notebooks/"):
        return re.sub(r"\]\(\.\./docs/", "](../", text)
    if (ROOT / name).is_file():  # a page from outside of docs
        return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", text)
    if "/" not in name:
        return re.sub(r"\]\(\.\./", "](", text)
    return re.sub("<!-- names: (.*) -->", lambda mark: listed(mark[1]), text)


def on_page_content(html: str, *, page: Any, config: Any, files: Files) -> str:
    """Drop the roles of reStructuredText that docstrings put before a name."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):\s*(?=<code>)", "", html)


def listed(name: str) -> str:
    """Return the entries of the public names of ``vitgraph`` or of one of its modules.

    Encoders and what loads checkpoints have pages of their own: ``encoders`` and ``weights`` stand
    for the names of ``vitgraph`` that these packages define. The page of ``vitgraph`` has all
    others. A name has one entry: a module does not repeat what ``vitgraph`` offers itself.
    """
    root = import_module("vitgraph")
    offered = {name for name in root.__all__ if not isinstance(getattr(root, name), ModuleType)}
    parts = {part: offered & {*import_module(part).__all__} for part in ("encoders", "weights")}
    if name in parts:
        return "\n\n".join(entry(name) for name in sorted(parts[name]))
    if name == "vitgraph":
        rest = offered - {"__version__"}.union(*parts.values())
        return "\n\n".join(entry(name) for name in sorted(rest))
    members = sorted({*import_module(name).__all__} - offered)
    if name == "vitgraph.types":
        return "\n\n".join(entry(f"types.{member}") for member in members)
    return f"::: {name}\n    options: {{heading_level: 3, members: [{', '.join(members)}]}}"


def entry(name: str) -> str:
    """Return the entry of one public name; a family leaves out the methods that all share."""
    family = f"{name.removesuffix('Encoder')}Config" in import_module("encoders").__all__
    return f"::: vitgraph.{name}\n    options: {{inherited_members: {str(not family).lower()}}}"
