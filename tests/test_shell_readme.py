"""Every code block of the README and the docs runs as it stands, but for one thing: the repo id.

Tests are offline, so ``Qwen/Qwen3-VL-2B-Instruct`` becomes the path of a small seeded checkpoint in
that repo's layout. The photographs and the clip that the examples name lie in the working folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from encoders.images import to_rgb
from vitgraph.cli import main
from vitgraph.demo import panned_clip, sample_photographs
from vitgraph.seeded import write_seeded_checkpoint
from vitgraph.video import write_video

ROOT = Path(__file__).parents[1]
REPO_ID = "Qwen/Qwen3-VL-2B-Instruct"
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
PAGES = ("README.md", "docs/command_line.md", "docs/graphs.md")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def commands(page: str) -> list[str]:
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("vitgraph ")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeded_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_vl")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> Iterator[Path]:
    photographs = sample_photographs()
    (tmp_path / "street.jpg").symlink_to(photographs["pavilion"])
    (tmp_path / "flower.jpg").symlink_to(photographs["dahlia"])
    write_video(tmp_path / "clip.mp4", panned_clip(to_rgb(photographs["pavilion"])), 8)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.compiler.reset()


def test_readme_code_runs_from_top_to_bottom(workplace: Path, checkpoint: Path) -> None:
    code = blocks("README.md", "python")
    assert len(code) >= 4
    assert REPO_ID in code[0]
    names: dict[str, object] = {}
    for block in code:
        exec(compile(block.replace(REPO_ID, str(checkpoint)), "README.md", "exec"), names)
    assert (workplace / "maps.png").stat().st_size > 10_000


def test_readme_commands_run(
    workplace: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = commands("README.md")
    assert [shlex.split(line)[1] for line in lines] == ["encode", "inspect", "extract", "list"]
    for line in lines:
        code = main(shlex.split(line.replace(REPO_ID, str(checkpoint)))[1:])
        assert code == 0, capsys.readouterr().err
    assert (workplace / "maps.png").exists()
    assert (workplace / "tower" / "model.safetensors").exists()


def test_documented_way_to_read_a_features_file_works(workplace: Path, checkpoint: Path) -> None:
    main(["encode", str(checkpoint), "street.jpg", "--out", "features.safetensors"])
    for block in blocks("docs/command_line.md", "python"):
        exec(compile(block, "docs/command_line.md", "exec"), {})


def test_documented_graphs_run(
    workplace: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    for block in blocks("docs/graphs.md", "python"):
        exec(compile(block.replace(REPO_ID, str(checkpoint)), "docs/graphs.md", "exec"), names)
    for line in commands("docs/graphs.md"):
        code = main(shlex.split(line.replace(REPO_ID, str(checkpoint)))[1:])
        assert code == 0, capsys.readouterr().err


def test_first_ten_lines_of_code_are_on_the_first_screen() -> None:
    text = (ROOT / "README.md").read_text()
    end = text.index("```", text.index("```python") + 3)
    assert text[:end].count("\n") <= 45


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_and_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target
    for path in re.findall(r"`((?:tests|benchmarks|notebooks|docs|vitgraph)/[\w./]+\.\w+)`", text):
        assert (ROOT / path).exists(), path


def test_readme_names_every_encoder() -> None:
    import encoders

    text = (ROOT / "README.md").read_text()
    for name in encoders.__all__:
        exported = getattr(encoders, name)
        if isinstance(exported, type) and issubclass(exported, torch.nn.Module):
            assert name == "VisionEncoder" or f"`{name}`" in text, name


@pytest.mark.parametrize("encoder", ["intern_vit", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_an_encoder_works_copied_out_with_the_files_that_the_readme_names(
    encoder: str, tmp_path: Path
) -> None:
    text = (ROOT / "README.md").read_text()
    (sentence,) = re.findall(r"can be copied out with ([^.]+)\.", text)
    named = re.findall(r"`(\w+)`", sentence)
    (tmp_path / "mine").mkdir()
    for name in [encoder, *named]:
        shutil.copy(ROOT / "encoders" / f"{name}.py", tmp_path / "mine")
    code = f"import sys, mine.{encoder}; assert 'encoders' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=CLEAN, check=True)


def test_readme_shows_the_committed_fetch_figures() -> None:
    """Measured anew? ``python benchmarks/fetch.py`` prints them."""
    report = json.loads((ROOT / "benchmarks" / "results" / "fetch.json").read_text())
    ranges, shards = report["first_load"]["ranges"], report["first_load"]["shards"]
    said = " ".join((ROOT / "README.md").read_text().split())
    assert f"{ranges['bytes'] / 1e6:.1f} MB in {ranges['seconds']:.2f} s" in said
    assert f"{shards['bytes'] / 1e6:,.0f} MB and take {shards['seconds']:.1f} s" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_tower_class_finds_nothing_in_a_full_checkpoint(checkpoint: Path) -> None:
    """The README says so of transformers; should it change, the README has to."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    tower, report = Qwen3VLVisionModel.from_pretrained(checkpoint, output_loading_info=True)
    assert set(report["missing_keys"]) == set(tower.state_dict())
