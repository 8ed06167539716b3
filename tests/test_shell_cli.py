"""The command line: what it writes, and one clear line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitgraph
from command_line import Cli, Run
from vitgraph.cli import main
from vitgraph.features import load_features
from vitgraph.seeded import write_seeded_checkpoint
from vitgraph.video import write_video
from weights import load_encoder

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeded_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_vl")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    frames = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 3, 64, 96) * 30
    write_video(tmp_path / "clip.mp4", frames.contiguous(), 3)
    return tmp_path / "clip.mp4"


def assert_one_line(run: Run, *parts: object) -> None:
    assert run.code == 2
    assert run.out == ""
    assert run.err.count("\n") == 1, run.err
    assert run.err.startswith("vitgraph: error: ")
    for part in parts:
        assert str(part) in run.err


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
    header, _, first, second, wrote = run.out.splitlines()
    assert header.split() == ["item", "size", "grid_thw", "tokens", "pooler_output", "ms"]
    assert first.split()[:2] == second.split()[:2] == [str(photo), "300x200"]
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
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
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


def test_missing_image_is_one_line(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    run = cli("encode", checkpoint, tmp_path / "nope.jpg", "--out", tmp_path / "f.safetensors")
    assert_one_line(run, tmp_path / "nope.jpg", "there is no such file")


def test_text_is_not_an_image(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("hello")
    run = cli("encode", checkpoint, tmp_path / "photo.jpg", "--out", tmp_path / "f.safetensors")
    assert_one_line(run, tmp_path / "photo.jpg", "cannot be read as an image")


def test_image_of_a_kind_that_has_no_rgb_form_is_named(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    grey = tmp_path / "depth.tiff"
    Image.new("F", (40, 30)).save(grey)
    run = cli("encode", checkpoint, photo, grey, "--out", tmp_path / "f.safetensors")
    assert_one_line(run, f"{grey}: ", "mode F", "0..255")


def test_folder_of_images_is_said_to_be_a_folder(
    cli: Cli, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.safetensors"
    assert_one_line(cli("encode", checkpoint, tmp_path, "--out", out), f"{tmp_path}: is a folder")
    run = cli("encode", checkpoint, "--video", tmp_path, "--out", out)
    assert_one_line(run, f"{tmp_path}: is a folder")


def test_truncated_image_is_one_line_and_writes_nothing(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.png"
    cut.write_bytes(photo.read_bytes()[:2000])
    out = tmp_path / "f.safetensors"
    assert_one_line(cli("encode", checkpoint, photo, cut, "--out", out), cut)
    assert not out.exists()


def test_nothing_to_encode_is_one_line(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    run = cli("encode", checkpoint, "--out", tmp_path / "f.safetensors")
    assert_one_line(run, "name at least one image")


def test_unknown_dtype_is_one_line(cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.safetensors"
    run = cli("encode", checkpoint, photo, "--out", out, "--dtype", "int8")
    assert_one_line(run, "--dtype int8", "float32, float16, bfloat16, float64")


def test_absent_cuda_is_one_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    out = tmp_path / "f.safetensors"
    run = cli("encode", checkpoint, photo, "--out", out, "--device", "cuda")
    assert_one_line(run, "--device cuda", "use --device cpu")


@pytest.mark.parametrize("device", ["hpu", "mps", "xpu", "meta", "banana", "cuda:x"])
def test_a_device_that_is_not_here_is_one_short_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path, device: str
) -> None:
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has one")
    out = tmp_path / "f.safetensors"
    run = cli("encode", checkpoint, photo, "--out", out, "--device", device)
    assert_one_line(run, f"--device {device}: ", "cpu")
    assert len(run.err) < 200, run.err


def test_plot_without_matplotlib_is_one_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ("--out", tmp_path / "f.safetensors", "--plot", tmp_path / "maps.png")
    assert_one_line(
        cli("encode", checkpoint, photo, *arguments),
        "'vitgraph[plots]', or in a clone pip install '.[plots]'",
    )


def test_plot_in_an_unknown_format_is_one_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    arguments = ("--out", tmp_path / "f.safetensors", "--plot", tmp_path / "maps.xyz")
    assert_one_line(cli("encode", checkpoint, photo, *arguments), "maps.xyz", "png")


def test_item_that_cannot_be_encoded_is_named(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    good, line = tmp_path / "good.png", tmp_path / "line.png"
    Image.new("RGB", (64, 64)).save(good)
    Image.new("RGB", (900, 2)).save(line)
    run = cli("encode", checkpoint, good, line, "--out", tmp_path / "f.safetensors")
    assert_one_line(run, f"{line}: ", "200")
    assert "image 0" not in run.err


def test_option_of_another_family_is_one_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.safetensors"
    run = cli("encode", checkpoint, photo, "--out", out, "--max-tiles", 6)
    assert_one_line(run, "max_tiles=6", "max_pixels")


def test_video_without_av_is_one_line(
    cli: Cli, checkpoint: Path, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    run = cli("encode", checkpoint, "--video", clip, "--out", tmp_path / "f.safetensors")
    assert_one_line(run, "'vitgraph[video]', or in a clone pip install '.[video]'")


def test_sampling_without_a_video_is_one_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    run = cli("encode", checkpoint, photo, "--out", tmp_path / "f.safetensors", "--fps", 2)
    assert_one_line(run, "--fps samples videos")


def test_output_folder_that_is_not_there_is_one_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    out = tmp_path / "nowhere" / "f.safetensors"
    assert_one_line(cli("encode", checkpoint, photo, "--out", out), out, "folder that exists")


def test_what_is_no_features_file_is_never_written_over(
    cli: Cli, checkpoint: Path, photo: Path, clip: Path
) -> None:
    targets = (photo, clip, *checkpoint.iterdir())
    before = [path.read_bytes() for path in targets]
    for target in targets:
        run = cli("encode", checkpoint, photo, "--video", clip, "--out", target)
        assert_one_line(run, f"--out {target}", "no features file", "another name")
    assert [path.read_bytes() for path in targets] == before


def test_picture_is_never_drawn_over_a_photograph(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    (tmp_path / "alias.png").symlink_to(photo)
    before = photo.read_bytes()
    for target in (photo, tmp_path / "alias.png"):
        out = tmp_path / "f.safetensors"
        run = cli("encode", checkpoint, photo, "--out", out, "--plot", target)
        assert_one_line(run, f"--plot {target}", photo, "another name")
    assert photo.read_bytes() == before


def test_features_and_picture_in_one_file_is_one_line(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    both, alias = tmp_path / "both.safetensors", tmp_path / "both.png"
    alias.symlink_to(both)
    run = cli("encode", checkpoint, photo, "--out", both, "--plot", alias)
    assert_one_line(run, f"--plot {alias}", "another name")


def test_features_and_pictures_may_be_written_again(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path
) -> None:
    out, plot = tmp_path / "f.safetensors", tmp_path / "maps.png"
    out.touch()  # as mktemp leaves it
    for _ in range(2):
        assert cli("encode", checkpoint, photo, "--out", out, "--plot", plot).code == 0


def test_folder_without_a_checkpoint_is_one_line(cli: Cli, photo: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run = cli("encode", tmp_path / "empty", photo, "--out", tmp_path / "f.safetensors")
    assert_one_line(run, tmp_path / "empty")


def test_misspelt_option_is_one_line(cli: Cli, checkpoint: Path) -> None:
    assert_one_line(cli("encode", checkpoint, "--outt", "x"), "vitgraph encode --help")


def test_stray_argument_is_one_line(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    run = cli("extract", checkpoint, tmp_path / "tower", "stray")
    assert_one_line(run, "unrecognized arguments: stray")
    assert not (tmp_path / "tower").exists()


def test_no_command_is_one_line(cli: Cli) -> None:
    assert_one_line(cli(), "COMMAND")


def test_debug_shows_the_traceback(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.safetensors"
    run = cli("encode", checkpoint, tmp_path / "nope.jpg", "--out", out, "--debug")
    assert run.code == 2
    assert "Traceback" in run.err
    assert run.err.splitlines()[-1].startswith("vitgraph: error: ")
