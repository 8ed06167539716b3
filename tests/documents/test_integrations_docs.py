"""Every example of docs/integrations.md runs, where the libraries that it imports are installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from tests.support.language_models.tiny import write_repo
from vitgraph.commands.demo_pictures import sample_photographs

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
REPO_ID = "Qwen/Qwen3-VL-2B-Instruct"
SECTIONS = {
    re.sub(r"\W+", "-", text.partition("\n")[0].lower()): re.findall(
        r"^```python\n(.*?)^```", text, re.M | re.S
    )
    for text in PAGE.read_text().split("\n## ")
}
NEEDED = {
    "sentence-transformers": ["sentence_transformers"],
    "torch-export-and-onnx": ["onnxscript", "onnx"],
    "fine-tune-save-load": ["peft"],
    "datasets-map": ["datasets"],
}


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repo(tmp_path_factory.mktemp("repo"))


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of the other libraries
@pytest.mark.parametrize("section", [name for name in SECTIONS if not name.startswith("-")])
def test_an_example_of_the_page_runs(
    section: str, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in NEEDED.get(section, []):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    photographs = sample_photographs()
    (tmp_path / "street.jpg").symlink_to(photographs["pavilion"])
    (tmp_path / "flower.jpg").symlink_to(photographs["dahlia"])
    monkeypatch.chdir(tmp_path)
    blocks = SECTIONS[next(iter(SECTIONS))] + SECTIONS[section]
    text = "\n".join(blocks).replace(REPO_ID, str(repo))
    exec(compile(text, str(PAGE), "exec"), {"__name__": "page"})
    torch.compiler.reset()
