"""The command line: what it writes and prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitgraph
from tests.support.commands.command_line import Cli
from vitgraph.cli import build_parser, main
from vitgraph.commands.arguments import parse
from vitgraph.features import load_features
from weights import load_encoder

ROOT = Path(__file__).parents[3]


def test_encode_writes_what_the_encoder_gives(
    cli: Cli, checkpoint: Path, photo: Path, clip: Path, tmp_path: Path
) -> None:
    out = tmp_path / "features.safetensors"
    run = cli("encode", checkpoint, photo, "--video", clip, "--out", out)
    assert run.code == 0, run.err
    features = load_features(out)
    encoder = load_encoder(checkpoint)
    (expected,) = encoder.encode(images=[Image.open(photo)])
    torch.testing.assert_close(features.outputs[0], expected, rtol=0, atol=0)
    assert [item.kind for item in features.items] == ["image", "video"]
    assert features.items[0].size == (300, 200)
    assert features.items[1].frames == 6
    assert features.items[1].grid_thw[0] == 3


def test_encode_prints_a_line_an_item(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    run = cli("encode", checkpoint, photo, photo, "--out", tmp_path / "f.safetensors")
    header, _, first, second, device, wrote = run.out.splitlines()
    assert header.split() == ["item", "size", "grid_thw", "tokens", "pooler_output", "ms"]
    assert first.split()[:2] == second.split()[:2] == [str(photo), "300x200"]
    assert device.startswith("encoded on ")
    assert wrote == f"wrote {tmp_path / 'f.safetensors'}"


def test_images_may_stand_before_between_and_after_options(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.safetensors"
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(photo.read_bytes())
    a, b = tmp_path / "a.png", tmp_path / "b.png"
    run = cli("encode", checkpoint, photo, "--out", out, a, "--dtype", "float32", b)
    assert run.code == 0, run.err
    names = [item.name for item in load_features(out).items]
    assert names == [str(photo), str(a), str(b)]


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("embed repo --out dir photos", {"repo": "repo", "out": "dir", "files": "photos"}),
        ("embed --out dir repo --pool max photos", {"repo": "repo", "files": "photos"}),
        ("embed repo --out dir -", {"repo": "repo", "files": "-"}),
        ("search dir --top 5 street.jpg", {"vectors": "dir", "query": "street.jpg"}),
    ],
)
def test_a_folder_and_a_query_may_follow_options(arguments: str, values: dict[str, str]) -> None:
    options = vars(parse(build_parser(), arguments.split()))
    assert {name: options[name] for name in values} == values


def test_one_argument_too_many_is_refused_after_options(cli: Cli) -> None:
    run = cli("search", "dir", "--top", "5", "street.jpg", "flower.jpg")
    assert run.code == 2
    assert "unrecognized arguments: flower.jpg" in run.err


@pytest.mark.slow
def test_reader_that_stops_early_is_no_error() -> None:
    command = [sys.executable, "-m", "vitgraph", "list"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_encode_turns_a_photograph_by_its_exif_orientation(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    turned = tmp_path / "turned.png"
    Image.open(photo).save(turned, exif=exif)
    cli("encode", checkpoint, turned, "--out", tmp_path / "f.safetensors")
    assert load_features(tmp_path / "f.safetensors").items[0].size == (200, 300)


def test_encode_takes_dtype_and_draws(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    out, plot = tmp_path / "f.safetensors", tmp_path / "maps.png"
    run = cli("encode", checkpoint, photo, "--out", out, "--plot", plot, "--dtype", "float64")
    assert run.code == 0, run.err
    assert load_features(out).outputs[0].pooler_output.dtype == torch.float64
    with Image.open(plot) as picture:
        assert picture.size[0] > 400


def test_encode_samples_a_video_only_when_asked(
    cli: Cli, checkpoint: Path, clip: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.safetensors"
    cli("encode", checkpoint, "--video", clip, "--out", out, "--num-frames", 4)
    assert load_features(out).items[0].grid_thw[0] == 2


def test_list_names_every_family_and_repo(cli: Cli) -> None:
    run = cli("list")
    assert run.code == 0
    for name in ("InternViT", "Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Qwen/Qwen3-VL-8B-Instruct"):
        assert name in run.out


@pytest.mark.slow
def test_module_runs_like_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "vitgraph", "list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OpenGVLab/InternVL" in result.stdout
    assert result.stderr == ""


def test_inspect_says_family_and_size(cli: Cli, checkpoint: Path) -> None:
    run = cli("inspect", checkpoint)
    assert run.code == 0, run.err
    assert "qwen3_vl" in run.out


def test_inspect_speaks_json_to_programs(cli: Cli, checkpoint: Path) -> None:
    report = json.loads(cli("inspect", checkpoint, "--json").out)
    assert report["family"] == "qwen3_vl"


def test_extracted_tower_gives_the_same_features(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    run = cli("extract", checkpoint, tmp_path / "tower")
    assert run.code == 0, run.err
    images = [Image.open(photo)]
    whole, alone = (load_encoder(p).encode(images) for p in (checkpoint, tmp_path / "tower"))
    torch.testing.assert_close(whole, alone, rtol=0, atol=0)


def test_version_is_the_one_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"vitgraph {vitgraph.__version__}\n"


def test_features_and_pictures_may_be_written_again(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    out, plot = tmp_path / "f.safetensors", tmp_path / "maps.png"
    out.touch()  # as mktemp leaves it
    for _ in range(2):
        assert cli("encode", checkpoint, photo, "--out", out, "--plot", plot).code == 0
