"""Writes the skeleton of a new family: a copy of the nearest one under new names, which runs.

``python -m tests.support.families.new MAKER NAME CLASS --like FAMILY``, for example ``... acme
acme_vl AcmeVL --like idefics3``, copies the tower, its pixels, the record, the facts and the
reference of ``FAMILY``, and adds a line wherever families are listed. From then on, each edit of
the copy can be tested. ``docs/add_an_encoder.md`` says what to edit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .json_files import formatted

ROOT = Path(__file__).parents[3]
LISTS = (
    "encoders/__init__.py",
    "weights/families/__init__.py",
    "vitgraph/__init__.py",
    "vitgraph/types.py",
)
"""The files that have lines for each family."""
REFERENCES = "tests/oracles/references"
"""The folder with a module per family: its reference, and all else that tests know of it."""
_MODEL_TYPES = re.compile(r"model_types=(with_vision\([^()]*\)|\(([^()]|\([^()]*\))*\)),")


def write_skeleton(root: Path, maker: str, name: str, prefix: str, like: str) -> list[Path]:
    """Copy the family ``like`` of the source tree ``root`` under new names.

    Args:
        root: the root of the repository.
        maker: name of the maker's folder, such as "acme"; it is made if it is not there.
        name: name of the family and of its file, such as "acme_vl".
        prefix: what the names of its classes begin with, such as "AcmeVL".
        like: name of the family to copy, whose maker must have no other family.

    Returns:
        The files that were written or changed.

    Raises:
        ValueError: a name that is no identifier or is taken, or a family that cannot be copied.
    """
    for word in (maker, name, prefix):
        if not word.isidentifier():
            raise ValueError(f"{word!r}: must be a name of Python, such as acme_vl")
    towers = list(root.glob(f"encoders/*/{like}.py"))
    if len(towers) != 1:
        raise ValueError(f"--like {like}: no file encoders/*/{like}.py; name the file of a tower")
    tower = towers[0]
    their_maker = tower.parent.name
    facts = json.loads((root / f"weights/families/facts/{like}.json").read_text("utf-8"))
    record = root / f"weights/families/{their_maker}.py"
    their_prefix = facts["encoder"].removesuffix("Encoder")
    if record.read_text("utf-8").count("= Family(") != 1 or their_prefix == facts["encoder"]:
        raise ValueError(
            f"--like {like}: {record.name} has several records, or a class whose name does not end "
            "in Encoder; copy another family, such as idefics3 (tiles) or minimax_m3 (patches)"
        )
    reference = root / f"{REFERENCES}/{like}.py"
    row_repo = _repo_of_row(reference, like)
    words = {like.replace("_", "-"): name.replace("_", "-")} if "_" in like else {}
    words |= {their_prefix: prefix, like.upper(): name.upper(), like: name}

    def renamed(text: str) -> str:
        for old, new in words.items():
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(old)}(?![a-z0-9])", new, text)
        text = text.replace(f'.published("{name}"', f'.published("{like}"')  # rules that exist
        return re.sub(rf"(?<=\bfrom \.){their_maker}(?=[. ])", maker, text)

    new_files = {
        root / f"encoders/{maker}/{path.name.replace(like, name)}": renamed(path.read_text("utf-8"))
        for path in (tower, tower.with_name(f"{like}_pixels.py"))
        if path.exists()
    }
    new_files[root / f"weights/families/{maker}.py"] = _MODEL_TYPES.sub(
        f'model_types=with_vision("{name}"),', renamed(record.read_text("utf-8"))
    )
    new_files[root / f"weights/families/facts/{name}.json"] = renamed(
        _few_checkpoints(facts, like, maker, row_repo)
    )
    if taken := [path for path in new_files if path.exists()]:
        raise ValueError(f"{taken[0]} is there already: choose other names, or edit it by hand")
    package = root / f"encoders/{maker}/__init__.py"
    if not package.exists():
        new_files[package] = f'"""The tower of {prefix}: ``{name}``."""\n'
        layers = root / "pyproject.toml"
        new_files[layers] = _with_maker(layers.read_text("utf-8"), their_maker, maker)
    repo_id = renamed(_moved(row_repo, maker))
    new_files[root / f"{REFERENCES}/{name}.py"] = (
        reference.read_text("utf-8").replace(f'"{like}"', f'"{name}"').replace(row_repo, repo_id)
    )
    for path in (root / file for file in LISTS):
        new_files[path] = "".join(
            _with_copies(path.read_text("utf-8"), renamed, (their_prefix, like.upper()))
        )
    for path, text in new_files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    return [*new_files]


def _few_checkpoints(facts: Any, like: str, maker: str, row_repo: str) -> str:
    """Return the facts of a family, as JSON, with the checkpoints that tests take: one or two.

    They are that of the first small checkpoint, and that of the row of references, ``row_repo``.
    """
    small = next(iter(facts["small"].values()))
    groups = []
    for group in facts["checkpoints"]:
        models = [
            {**model, "repo_id": _moved(model["repo_id"], maker)}
            for model in group["models"]
            if model["repo_id"] in (small["repo_id"], row_repo)
        ]
        config = {**group["config"], "model_type": like}
        if "model_type" in (vision := config.get("vision_config", {})):
            config["vision_config"] = {**vision, "model_type": f"{like}_vision"}
        groups += [{**group, "config": config, "models": models}] if models else []
    small = {like: {**small, "repo_id": _moved(small["repo_id"], maker)}}
    return formatted({**facts, "small": small, "checkpoints": groups}) + "\n"


def _moved(repo_id: str, maker: str) -> str:
    return f"{maker}/{repo_id.partition('/')[2]}"


def _with_maker(text: str, their_maker: str, maker: str) -> str:
    """Return ``pyproject.toml`` with a maker in the line of makers of the layers of encoders."""
    (line,) = [x for x in text.splitlines() if f"| {their_maker} |" in x]
    makers = sorted({*line.strip(' ",').split(" | "), maker})
    return text.replace(line, f'  "{" | ".join(makers)}",')


def _repo_of_row(reference: Path, like: str) -> str:
    """Return the repo id in the row of a family, which its module of references has."""
    row = reference.exists() and re.search(
        rf'make_row\(\s+"{like}",\s+"([^"]+)"', reference.read_text("utf-8")
    )
    if not row:
        raise ValueError(f"--like {like}: has no module in {REFERENCES}; copy another family")
    return row[1]


def _with_copies(text: str, renamed: Callable[[str], str], names: tuple[str, str]) -> Iterator[str]:
    """Yield the lines of a list of families, and after each of one family its renamed copy."""
    for line in text.splitlines(keepends=True):
        yield line
        if any(re.search(rf"\b{name}(Encoder|Config)?\b", line) for name in names):
            yield renamed(line)


def main() -> None:
    """Write the skeleton, sort the imports, and print the files and the next command."""
    parser = ArgumentParser(
        "python -m tests.support.families.new",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("maker", help="folder of the maker, such as acme")
    parser.add_argument("name", help="name of the family and its file, such as acme_vl")
    parser.add_argument("prefix", help="beginning of the names of its classes, such as AcmeVL")
    parser.add_argument("--like", required=True, help="the family to copy, such as idefics3")
    arguments = parser.parse_args()
    try:
        files = write_skeleton(ROOT, **vars(arguments))
    except ValueError as error:
        parser.error(str(error))
    sources = [path for path in files if path.suffix == ".py"]
    # Imports alone are checked, because longer names make lines too long.
    for command in (("check", "--quiet", "--fix", "--select=I"), ("format", "--quiet")):
        subprocess.run([sys.executable, "-m", "ruff", *command, *sources], cwd=ROOT, check=True)
    print(*(path.relative_to(ROOT) for path in files), sep="\n")
    print(f"next: .venv/bin/vitgraph list '{arguments.maker}/*'")


if __name__ == "__main__":
    main()
