"""Mistakes in arguments and files: each is answered in one line, before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import pytest
from PIL import Image

from encoders.accelerated import CHOICES
from encoders.accelerated.attention.candidates import KERNELS
from encoders.contract import EncoderOutput, Precision
from encoders.streams.pooling import Pool
from tests.support.commands.command_line import Cli, refusal
from vitgraph.commands.arguments import DTYPE_NAMES, FETCHES, POOLS, PRECISIONS
from vitgraph.commands.bench_speed import KERNEL_NAMES
from vitgraph.devices import DTYPES
from vitgraph.features import Features, Item, save_features
from vitgraph.plots import write_figure
from vitgraph.seeded import write_seeded_checkpoint
from weights.hub.repo import Fetch
from weights.load import DtypeName

RUN = """
import contextlib, io, json, sys
from vitgraph.cli import main
answers = []
for arguments in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(arguments)
    answers.append([code, said.getvalue(), "torch" in sys.modules])
print(json.dumps(answers))
"""
OUT = ["--out", "f.safetensors"]
MISTAKES = {
    "a missing image": (["encode", "tower", "nope.jpg", *OUT], "nope.jpg: there is no such file"),
    "text as an image": (["encode", "tower", "text.jpg", *OUT], "text.jpg: cannot be read as an"),
    "a folder of images": (
        ["encode", "tower", "photos", *OUT],
        "photos: is a folder; pass the paths of the images in it, or encode all of them: "
        "`vitgraph embed tower photos --out DIR`",
    ),
    "a video among images": (
        ["encode", "tower", "a.jpg", "my clip.mp4", *OUT],
        "my clip.mp4: is a video: `vitgraph encode tower --video 'my clip.mp4' --out f.safe",
    ),
    "the address of an image": (
        ["encode", "tower", "https://example.org/a.jpg", *OUT],
        "https://example.org/a.jpg: is a URL, and files are encoded here: download it and give the "
        "path; in Python, encoder.encode(images=[vitgraph.load_image(URL)])",
    ),
    "the address of a video": (
        ["encode", "tower", "--video", "s3://bucket/a.mp4", *OUT],
        "s3://bucket/a.mp4: is a URL",
    ),
    "a missing video": (["encode", "tower", "--video", "no.mp4", *OUT], "no.mp4: there is no such"),
    "a folder of videos": (["encode", "tower", "--video", "photos", *OUT], "photos: is a folder"),
    "an image without a checkpoint": (
        ["encode", "a.jpg", *OUT],
        "a.jpg: is not a checkpoint; the first argument is a repo id or the folder of a "
        "checkpoint: vitgraph encode REPO_OR_FOLDER a.jpg --out f.safetensors",
    ),
    "a video without a checkpoint": (
        ["encode", "my clip.mp4", *OUT],
        "vitgraph encode REPO_OR_FOLDER --video 'my clip.mp4' --out f.safetensors",
    ),
    "a folder of images without a checkpoint": (
        ["encode", "photos", *OUT],
        "photos: is a folder without a checkpoint, and nothing else is named; its images are "
        "encoded by `vitgraph embed REPO_OR_FOLDER photos --out DIR`",
    ),
    "a folder without a checkpoint": (
        ["encode", "photos", "a.jpg", *OUT],
        "photos: no safetensors files (a.jpg)",
    ),
    "a photograph in the place of the checkpoint": (
        ["encode", "a.jpg", "a.jpg", *OUT],
        "a.jpg: is not a checkpoint; the first argument is a repo id or the folder of a checkpoint",
    ),
    "no command": ([], "arguments are required: COMMAND"),
    "a misspelt option": (["encode", "tower", "--outt", "x"], "vitgraph encode --help"),
    "a stray argument": (["extract", "tower", "out", "stray"], "unrecognized arguments: stray"),
    "a rate without a video": (["encode", "tower", "a.jpg", *OUT, "--fps", "2"], "samples videos"),
    "a folder that is not there": (
        ["encode", "tower", "a.jpg", "--out", "no/f.safetensors"],
        "no/f.safetensors: must be a file in a folder that exists",
    ),
    "no image": (["encode", "tower", *OUT], "name at least one image"),
    "another suffix": (
        ["encode", "no", "no.jpg", "--out", "f.pt"],
        "--out f.pt: the features file is a safetensors file; let its name end in .safetensors, as "
        "f.safetensors",
    ),
    "no suffix": (["encode", "no", "no.jpg", "--out", "f"], "--out f: the features file is a "),
    "another kind of picture": (
        ["encode", "tower", "a.jpg", *OUT, "--plot", "m.xyz"],
        "m.xyz: the suffix must name a picture format: ",
    ),
    "an unknown dtype": (
        ["encode", "tower", "a.jpg", *OUT, "--dtype", "int8"],
        "--dtype int8: must be one of auto, float32, float16, bfloat16, float64",
    ),
    "an unknown device": (["encode", "tower", "a.jpg", *OUT, "--device", "gpu"], "--device gpu: "),
    "a device without a number": (
        ["encode", "tower", "a.jpg", *OUT, "--device", "cuda:x"],
        "--device cuda:x: must be auto, cpu",
    ),
    "a family that is none": (["encode", "tower", "a.jpg", *OUT, "--family", "x"], "family='x'"),
    "too few pixels": (
        ["encode", "tower", "a.jpg", *OUT, "--max-pixels", "-3"],
        "--max-pixels -3: must be positive",
    ),
    "budgets without graphs": (["encode", "tower", "a.jpg", *OUT, "--budgets", "64"], "--graph"),
    "a misspelt repo id": (
        ["encode", "Qwen/Qwen3-VL-2B-Instrukt", "a.jpg", *OUT],
        "names like it: Qwen/Qwen3-VL-2B-Instruct",
    ),
    "a missing image of a published repo": (
        ["encode", "Qwen/Qwen3-VL-2B-Instruct", "nope.jpg", *OUT],
        "nope.jpg: there is no such file",
    ),
    "a revision of a folder": (["inspect", "tower", "--revision", "x"], "tower: revision='x'"),
    "a folder to inspect without a checkpoint": (["inspect", "photos"], "photos: no safetensors"),
    "a repo id to inspect that is none": (["inspect", "Qwen3-VL"], "Qwen3-VL: no such file"),
    "a family to inspect that is none": (["inspect", "tower", "--family", "x"], "family='x'"),
    "a folder to extract without a checkpoint": (["extract", "photos", "out"], "photos: no safe"),
    "a folder to replace": (["extract", "tower", "photos", "--force"], "photos: is not an"),
    "an unknown kernel": (["bench", "speed", "tower", "--kernels", "x"], "--kernels x: "),
    "no run": (["bench", "speed", "tower", "--runs", "0"], "--runs 0: "),
    "a folder to measure without a checkpoint": (["bench", "speed", "photos"], "photos: no safe"),
    "a demo without a checkpoint": (["demo", "photos"], "photos: no safetensors files"),
    "a demo in a file": (["demo", "--out", "a.jpg"], "--out a.jpg: is a file"),
    "nothing to embed": (["embed", "tower", "--out", "v"], "are required: FOLDER"),
    "a missing folder to embed": (
        ["embed", "tower", "nope", "--out", "v"],
        "nope: there is no such file or folder; give a folder",
    ),
    "a folder without images to embed": (["embed", "tower", "tower", "--out", "v"], "skipped"),
    "a video to embed": (
        ["embed", "tower", "my clip.mp4", "--out", "v"],
        "my clip.mp4: is a video: say which of its frames to take with --fps or --num-frames, or "
        "encode all of them: `vitgraph encode tower --video 'my clip.mp4' --out FILE.safetensors`",
    ),
    "frames of clips in a plan": (
        ["embed", "tower", "photos", "--plan", "--fps", "2"],
        "--fps 2.0: --plan takes only images",
    ),
    "a photograph as the checkpoint of a job": (
        ["embed", "a.jpg", "photos", "--out", "v"],
        "a.jpg: is not a checkpoint; the first argument is a repo id or the folder of a "
        "checkpoint: vitgraph embed REPO_OR_FOLDER a.jpg --out v",
    ),
    "a checkpoint of a job that is none": (["embed", "photos", "photos", "--out", "v"], "photos: "),
    "a job in a file": (["embed", "tower", "photos", "--out", "a.jpg"], "--out a.jpg: is a file"),
    "a job in another folder": (["embed", "tower", "photos", "--out", "photos"], "holds files"),
    "no thread": (["embed", "tower", "photos", "--out", "v", "--workers", "0"], "--workers 0: "),
    "a device of a job": (["embed", "tower", "photos", "--out", "v", "--device", "x"], "--device"),
    "fields beside a pool": (["embed", "tower", "photos", "--out", "v", "--fields", "x"], "--pool"),
    "a worker of no number": (["embed", "tower", "photos", "--out", "v", "--shard", "3"], "I/N"),
}
"""The arguments, and what is said."""
REQUIRED: dict[str, Sequence[str]] = {
    "encode": ("repo", "a.jpg", *OUT),
    "extract": ("repo", "tower"),
    "inspect": ("repo",),
    "list": (),
    "bench speed": ("repo",),
    "demo": (),
    "cache list": (),
    "cache remove": ("owner/name",),
    "embed": ("repo", "photos", "--out", "v"),
}
MISTAKES |= {
    f"an unknown option of {command}": (
        [*command.split(), *arguments, "--batchsize=3"],
        f"unrecognized arguments: --batchsize=3 (see `vitgraph {command} --help`)",
    )
    for command, arguments in REQUIRED.items()
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, bool]]:
    """Exit code, message and whether torch was imported, of each mistake; in one process."""
    folder = tmp_path_factory.mktemp("day")
    write_seeded_checkpoint(folder / "tower", "qwen3_vl", width=64)
    (folder / "photos").mkdir()
    for name in ("a.jpg", "photos/a.jpg"):
        Image.new("RGB", (64, 64)).save(folder / name)
    for name in ("text.jpg", "my clip.mp4"):
        (folder / name).write_text("hello")
    asked = json.dumps([arguments for arguments, _ in MISTAKES.values()])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    command = [sys.executable, "-c", RUN]
    run = subprocess.run(
        command, cwd=folder, env=environment, input=asked, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(MISTAKES, json.loads(run.stdout), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_one_line_before_torch_is_imported(
    answers: dict[str, tuple[int, str, bool]], mistake: str
) -> None:
    code, said, has_torch = answers[mistake]
    assert (code, said.count("\n"), has_torch) == (2, 1, False), said
    assert said.startswith("vitgraph: error: ")
    assert MISTAKES[mistake][1] in said


def test_what_is_checked_without_torch_is_what_torch_is_given() -> None:
    assert set(DTYPE_NAMES) == set(DTYPES) == {*get_args(DtypeName)} - {"auto"}
    assert KERNEL_NAMES == CHOICES == ("auto", "torch", *KERNELS)
    assert get_args(Precision) == PRECISIONS
    assert get_args(Pool) == POOLS
    assert get_args(Fetch) == FETCHES


def test_a_picture_larger_than_pil_opens_is_named_with_what_helps(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20_000)
    error = refusal(cli("encode", checkpoint, photo, "--out", tmp_path / "f.safetensors"))
    assert f"{photo}: is larger than PIL opens (Image size (60000 pixels)" in error
    assert "set PIL.Image.MAX_IMAGE_PIXELS = None in Python" in error


def test_a_photograph_of_a_phone_is_encoded_or_the_package_is_named(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    path, out = tmp_path / "phone.jpg", tmp_path / "f.safetensors"  # misnamed, as after a transfer
    pillow_heif.from_pillow(Image.new("RGB", (64, 64))).save(path.with_suffix(".heic"))
    path.with_suffix(".heic").rename(path)
    assert cli("encode", checkpoint, path, "--out", out).code == 0
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    # PIL as it is in a new process, which has not been told of HEIF.
    monkeypatch.setattr(Image, "OPEN", {k: v for k, v in Image.OPEN.items() if k != "HEIF"})
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    error = refusal(cli("encode", checkpoint, path, "--out", out))
    assert f"{path}: is a HEIF file" in error
    assert "pip install 'pillow-heif>=1.0'" in error


@pytest.mark.filterwarnings("default")
def test_a_very_large_picture_is_encoded_with_one_warning_that_names_it(
    cli: Cli, checkpoint: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
    run = cli("encode", checkpoint, photo, "--out", tmp_path / "f.safetensors")
    assert run.code == 0
    warning = f"vitgraph: warning: {photo}: is very large, 300 x 200 pixels"
    assert [line for line in run.err.splitlines() if "warning" in line] == [warning]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("target", ["features", "picture"])
def test_a_full_disk_is_named_with_the_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    write: Callable[[Path], None]
    if target == "features":
        full = Path("/dev/full").open("w+b")  # noqa: SIM115  # what writes into it closes it
        monkeypatch.setattr("vitgraph.features.TemporaryFile", lambda dir: full)
        item = Item("a.jpg", "image", (4, 4), 1, (1, 2, 2), None)
        nothing = Features("repo", None, "Toy", [item], [EncoderOutput(None, None, ())])
        path, write = tmp_path / "f.safetensors", lambda path: save_features(path, nothing)
    else:
        from matplotlib.figure import Figure

        path, write = tmp_path / "maps.png", lambda path: write_figure(Figure(), path)
        path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="the disk is full: free some space") as caught:
        write(path)
    assert caught.value.filename == str(path)
    assert target == "picture" or not any(tmp_path.iterdir())
