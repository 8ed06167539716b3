"""Every Python block of the README and the docs runs as it stands, and every command in ``sh``.

Tests are offline, so what stands behind a repo id is a small seeded checkpoint in that repo's
layout: its path in place of the id, or a hub on loopback where the page is about fetching. The
photographs and the clip that the examples name lie in the working folder.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitgraph
from encoders.inputs.intake import to_rgb
from tests.support.hub.server import HubServer
from tests.support.hub.two_towers import write_two_towers
from vitgraph.cli import main
from vitgraph.commands.demo_pictures import panned_clip, sample_photographs
from vitgraph.seeded import write_seeded_checkpoint
from vitgraph.video import write_video
from weights import FAMILIES, load_encoder

ROOT = Path(__file__).parents[2]
REPO_ID = "Qwen/Qwen3-VL-2B-Instruct"
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
DOCS = tuple(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))
PAGES = ("README.md", *DOCS)
OPTIONAL = ("faiss", "lancedb", "nnsight", "overcomplete")
"""What a block may need that the tests' own environment has not: it runs where they are."""
OF_TWO_BLOCKS = {"blocks.12": "blocks.1", "blocks.6": "blocks.0"}
"""Blocks of the small checkpoint in place of those of a published one."""
HUB_REPO_ID = "Qwen/Qwen3-VL-235B-A22B-Instruct"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def commands(page: str) -> list[str]:
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("vitgraph ")]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> Iterator[Path]:
    photographs = sample_photographs()
    (tmp_path / "photos").mkdir()
    for folder in (tmp_path, tmp_path / "photos"):
        (folder / "street.jpg").symlink_to(photographs["pavilion"])
        (folder / "flower.jpg").symlink_to(photographs["dahlia"])
    write_video(tmp_path / "clip.mp4", panned_clip(to_rgb(photographs["pavilion"])), 8)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.compiler.reset()


def run_page(page: str, names: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Run the Python blocks of a page one after another, then its commands.

    Args:
        page: its path.
        names: what to put in place of a repo id.
        capsys: for what a command that fails has said.
    """

    def offline(text: str) -> str:
        for repo_id, place in names.items():
            text = text.replace(repo_id, place)
        return text

    scope: dict[str, object] = {}
    for block in blocks(page, "python"):
        imported = re.findall(r"^(?:import|from) (\w+)", block, re.M)
        if any(name in OPTIONAL and not find_spec(name) for name in imported):
            continue
        exec(compile(offline(block), page, "exec"), scope)
    for line in commands(page):
        if line.startswith("vitgraph demo  # draws"):
            continue  # test_bare_environment.py runs it
        assert main(shlex.split(offline(line))[1:]) == 0, capsys.readouterr().err


def test_every_page_with_code_is_run_here() -> None:
    names = ("analysis", "checkpoints", "command_line", "embedding", "engines", "graphs")
    names += ("inner_blocks", "scale", "search", "speed")
    elsewhere = {"docs/integrations.md"}  # by test_integrations_docs.py
    run = {"README.md", *(f"docs/{name}.md" for name in names)}
    assert {page for page in PAGES if blocks(page, "python") or commands(page)} == run | elsewhere


def test_readme_runs_from_top_to_bottom(
    workplace: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert REPO_ID in blocks("README.md", "python")[0]
    run = [shlex.split(line)[1] for line in commands("README.md")]
    assert run == ["demo", "encode", "inspect", "extract", "embed", "list"]
    run_page("README.md", {REPO_ID: str(checkpoint)}, capsys)
    assert "# torch.Size([260, 2048])" in blocks("README.md", "python")[0]  # width of the 2B model
    assert capsys.readouterr().out.startswith("torch.Size([260, 96])\n" * 2)
    assert (workplace / "maps.png").stat().st_size > 10_000
    for path in map(workplace.joinpath, ("street.pt", "flower.pt")):
        assert torch.load(path).ndim == 1
    assert (workplace / "tower" / "model.safetensors").exists()


def test_documented_way_to_read_a_features_file_works(
    workplace: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["encode", str(checkpoint), "street.jpg", "--out", "features.safetensors"])
    run_page("docs/command_line.md", {}, capsys)


@pytest.mark.slow
def test_documented_graphs_run(
    workplace: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page("docs/graphs.md", {REPO_ID: str(checkpoint)}, capsys)


def test_documented_embedding_runs(
    workplace: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("pandas")
    names = {REPO_ID: str(checkpoint), **OF_TWO_BLOCKS}
    for job in commands("docs/embedding.md"):  # the page reads what they write
        for name, place in names.items():
            job = job.replace(name, place)
        assert main(shlex.split(job)[1:]) == 0
    run_page("docs/embedding.md", names, capsys)


def test_documented_searches_run(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_two_towers(tmp_path / "siglip", "siglip")
    run_page("docs/search.md", {"google/siglip2-base-patch16-224": str(model)}, capsys)
    for name in ("answer.html", "pairs.html", "pairs.csv"):
        assert (workplace / name).stat().st_size


def test_documented_analysis_runs(
    workplace: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_seeded_checkpoint(workplace / "other", "qwen3_vl", depth=1, width=32)
    for label, name in (("garden", "flower"), ("town", "street")):
        (workplace / "labelled" / label).mkdir(parents=True)
        for number in range(5):
            Image.open(f"{name}.jpg").resize((64, 64 + 8 * number)).save(
                workplace / "labelled" / label / f"{number}.png"
            )
    names = {REPO_ID: str(checkpoint), "[0, 8, 16, -1]": "[0, -1]", **OF_TWO_BLOCKS}
    names["google/siglip2-base-patch16-224"] = str(other)
    run_page("docs/analysis.md", names, capsys)
    assert (workplace / "attention.png").stat().st_size > 10_000


def test_documented_features_of_inner_blocks_run(
    workplace: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {REPO_ID: str(checkpoint), "[6, 12, -1]": "[0, 1, -1]", "blocks[6]": "blocks[1]"}
    names |= {"indices=[6]": "indices=[1]", **OF_TWO_BLOCKS}
    run_page("docs/inner_blocks.md", names, capsys)


def test_documented_feature_store_is_written_and_read(
    workplace: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job,) = commands("docs/engines.md")
    assert main(shlex.split(job.replace(REPO_ID, str(checkpoint)))[1:]) == 0
    run_page("docs/engines.md", {REPO_ID: str(checkpoint)}, capsys)
    assert "True" in capsys.readouterr().out
    assert len(list((workplace / "store").glob("*/encoder_cache.safetensors"))) == 3


def test_documented_job_of_many_workers_runs(
    workplace: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page("docs/scale.md", {REPO_ID: str(checkpoint)}, capsys)
    assert "(2, 96) ['', 'nowhere.jpg: there is no such file" in capsys.readouterr().out


def test_documented_speed_runs(
    workplace: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page("docs/speed.md", {REPO_ID: str(checkpoint)}, capsys)


def test_documented_fetching_runs_against_a_hub(
    workplace: Path, checkpoint: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert HUB_REPO_ID in blocks("docs/checkpoints.md", "python")[0]
    hub.push(HUB_REPO_ID, checkpoint)
    run_page("docs/checkpoints.md", {}, capsys)
    assert (workplace / "tower" / "model.safetensors").exists()


def test_the_first_screen_says_version_and_licence() -> None:
    first = " ".join((ROOT / "README.md").read_text().partition("![")[0].split())
    assert f"Version {vitgraph.__version__} · Apache-2.0 · Python >= 3.10" in first


def test_the_readme_counts_the_families_and_names_those_not_verified() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{len(FAMILIES)}<!-- end --> [families](#families)" in text
    unverified = [family.facts.title for family in FAMILIES.values() if not family.facts.verified]
    assert f"{' and '.join(unverified)} are not verified" in text


@pytest.mark.parametrize("page", PAGES)
def test_links_to_sections_lead_to_a_heading(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", (ROOT / page).read_text()):
        if "://" in target:
            continue
        text = ((ROOT / page).parent / target if target else ROOT / page).read_text()
        headings = re.findall(r"^#+ (.+)", text, re.M)
        slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings]
        assert anchor in slugs, f"{target}#{anchor}"


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_and_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target
    for path in re.findall(r"`((?:tests|benchmarks|notebooks|docs|vitgraph)/[\w./]+\.\w+)`", text):
        assert (ROOT / path).exists(), path


def test_readme_names_every_encoder() -> None:
    import encoders

    bases = (encoders.Encoder, encoders.PatchEncoder, encoders.PathsEncoder, encoders.VisionEncoder)
    text = (ROOT / "README.md").read_text()
    for name in encoders.__all__:
        exported = getattr(encoders, name)
        if isinstance(exported, type) and issubclass(exported, torch.nn.Module):
            assert exported in bases or f"`{name}`" in text, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_tower_class_finds_tensors_only_with_a_key_mapping(
    checkpoint: Path,
) -> None:
    """docs/checkpoints.md says so of transformers; should it change, the page has to."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    tower, report = Qwen3VLVisionModel.from_pretrained(checkpoint, output_loading_info=True)
    assert set(report["missing_keys"]) == set(tower.state_dict())
    names = {r"^model\.visual\.": ""}
    tower, report = Qwen3VLVisionModel.from_pretrained(
        checkpoint, output_loading_info=True, key_mapping=names
    )
    assert not report["missing_keys"]
    ours = load_encoder(checkpoint)
    assert tower.merger.linear_fc1.weight.equal(ours.merger.linear_fc1.weight)
