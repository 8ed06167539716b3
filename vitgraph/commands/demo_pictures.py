"""``vitgraph demo`` and ``make demo``: encode photographs with towers and draw the features.

The default checkpoints are small and have random weights, but they have the same kinds of files as
repos on the Hub: a real ``config.json``, shards, and tensors of a language model beside the vision
tower. So loading, preprocessing and encoding run the same code as for real checkpoints.
``vitgraph demo REPO...`` draws the features of real checkpoints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import torch
from torch import Tensor

from encoders import Encoder
from encoders.inputs import read_video, to_rgb
from weights import FAMILIES, load_encoder

from ..plots import plot_feature_maps, plot_nearest_patches, write_figure
from ..seeded import write_seeded_checkpoint
from ..terminal import counted, format_table
from ..video import write_video
from .encode_items import HEADER, Encoded, Media, encode_items, row

SEEDED_NAMES = {
    small.title: name
    for family in FAMILIES.values()
    for name, small in family.facts.small.items()
    if small.title
}
"""The names of the small towers in ``write_seeded_checkpoint``, by their titles in the picture."""

README_TOWERS = ("InternViT-300M", "Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL")
"""The titles of the towers that are drawn without ``--all``, and at the top of the README."""

PHOTOGRAPHS = {
    "pavilion": ("sklearn", "datasets/images/china.jpg"),
    "dahlia": ("sklearn", "datasets/images/flower.jpg"),
    "portrait": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
}
"""Sample images inside installed packages: by name, the package and the file's path inside it."""

CHOSEN = ((0.22, 0.26), (0.45, 0.30), (0.62, 0.80), (0.83, 0.51))
"""Query points in the photograph of ``nearest_patches.jpg``: (y, x) as fractions of its size."""


def sample_photographs() -> dict[str, Path]:
    """Return the paths of sample photographs that come with scikit-learn and matplotlib, by name.

    Raises:
        ValueError: one of the packages is not installed.
    """
    return {
        name: _package_file(*package_and_file) for name, package_and_file in PHOTOGRAPHS.items()
    }


def _package_file(package: str, file: str) -> Path:
    spec = find_spec(package)  # importing scikit-learn to find its folder would take a second
    if spec is None or spec.origin is None:
        raise ValueError(
            f"the demo's photographs need {package}: pip install 'matplotlib>=3.8' "
            "'scikit-learn>=1.4'"
        )
    return Path(spec.origin).parent / file


def panned_clip(photograph: Tensor) -> Tensor:
    """Make a clip of 8 square crops whose window moves over a photograph from left to right.

    Args:
        photograph: uint8 [3, H, W] with H >= 256 and W > 256.

    Returns:
        The frames, uint8 [8, 3, 256, 256].
    """
    side = 256
    top = (photograph.shape[1] - side) // 2
    lefts = torch.linspace(0, photograph.shape[2] - side, 8).long().tolist()
    return torch.stack([photograph[:, top : top + side, left : left + side] for left in lefts])


def sample_media(folder: Path) -> list[Media]:
    """Return the sample photographs, followed by a short clip that pans over the first photograph.

    Args:
        folder: folder into which the clip is written as the H.264 file ``pan.mp4``.
    """
    stills = [Media(name, path) for name, path in sample_photographs().items()]
    path = folder / "pan.mp4"
    write_video(path, panned_clip(stills[0].still), fps=8)
    return [*stills, Media(path.name, read_video(path))]


def run_demo(out: Path, repos: Sequence[str] = (), every_family: bool = False) -> Path:
    """Encode sample photographs and a clip with several towers, and draw the features.

    The table of a tower is printed as soon as the tower has run. A family that takes no video
    encodes the middle frame of the clip.

    Args:
        out: folder for ``feature_maps.png``, made if it does not exist. With ``every_family`` it
            also gets the two pictures of the README: ``readme.jpg``, two of the photographs with
            the features of four towers, and ``nearest_patches.jpg``.
        repos: repo ids or folders of checkpoints; if empty, a small checkpoint with seeded random
            weights is used for each of four families.
        every_family: use a small checkpoint of every family. The picture then has one photograph.

    Returns:
        The path of ``feature_maps.png``.

    Raises:
        ValueError: an optional package is missing, or a checkpoint cannot be loaded.
    """
    names = [Path(repo).name for repo in repos]
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        media = sample_media(Path(folder))
        if not repos and not every_family:  # so that it is done within 20 seconds of CPU time
            media = [medium for medium in media if medium.name != "portrait"]
        loaded = (
            zip(names, map(_load, repos), strict=True)
            if repos
            else _seeded(Path(folder), SEEDED_NAMES if every_family else README_TOWERS)
        )
        encoded: dict[str, list[Encoded]] = {}
        for title, encoder in loaded:
            encoded[title] = list(encode_items(encoder, _media_for(encoder, media)))
            rows = [(title, *row(item)) for item in encoded[title]]
            print(format_table(("checkpoint" if repos else "family", *HEADER), rows) + "\n")
            sys.stdout.flush()
    picture = out / "feature_maps.png"
    heading = "Features of the last layer"
    if not repos:
        heading += " of small towers with seeded random weights"
    if every_family:
        four = {title: encoded[title][:2] for title in README_TOWERS}
        draw(media[:2], four, heading, out / "readme.jpg", dpi=130)
        draw_nearest(out / "nearest_patches.jpg")
        media, encoded = media[:1], {title: items[:1] for title, items in encoded.items()}
    draw(media, encoded, heading, picture, dpi=100 if every_family else 130)  # fits a screen
    summary = f"{counted(len(encoded), 'tower')} in {time.perf_counter() - start:.0f} s"
    print(f"{summary}; wrote {picture}")
    return picture


def draw_nearest(picture: Path) -> None:
    """Draw which patches of a cropped photograph are nearest to chosen patches of the full one.

    The patches are compared by the features of a small Qwen3-VL tower with seeded random weights.

    Args:
        picture: the file to write.
    """
    pavilion = to_rgb(sample_photographs()["pavilion"])
    media = [Media("whole", pavilion), Media("part", pavilion[:, 40:360, 48:496])]
    with TemporaryDirectory() as folder:
        encoder = _load(str(write_seeded_checkpoint(Path(folder) / "tower", "qwen3_vl")))
    photograph_map, crop_map = (item.feature_map for item in encode_items(encoder, media))
    _, height, width, _ = photograph_map.shape
    figure = plot_nearest_patches(
        (media[0].still, media[1].still),
        (photograph_map, crop_map),
        [(int(row * height), int(column * width)) for row, column in CHOSEN],
        title="Nearest patches by the features of a small tower with seeded random weights",
    )
    figure.savefig(picture, dpi=120)


def _media_for(encoder: Encoder, media: Sequence[Media]) -> list[Media]:
    """Return the images and videos in a form that an encoder accepts."""
    try:
        encoder.preprocess(videos=[medium.item for medium in media if medium.kind == "video"])
    except ValueError:
        return [Media(medium.name, medium.still) for medium in media]
    return list(media)


def _load(repo: str) -> Encoder:
    return load_encoder(repo, dtype=torch.float32, device="auto")


def _seeded(folder: Path, titles: Iterable[str]) -> Iterator[tuple[str, Encoder]]:
    """Yield the title and the encoder of small towers of several families, with random weights.

    The seed depends only on the title, so adding a family does not change the other towers.
    """
    for title in titles:
        family = SEEDED_NAMES[title]
        seed = crc32(title.encode())
        checkpoint = write_seeded_checkpoint(folder / family, family, depth=4, width=160, seed=seed)
        yield title, load_encoder(checkpoint, progress=False, dtype=torch.float32)


def draw(
    media: Sequence[Media],
    encoded: Mapping[str, Sequence[Encoded]],
    heading: str,
    picture: Path,
    *,
    dpi: int,
) -> None:
    """Draw images beside their feature maps, one column per tower, and write the figure to a file.

    Args:
        media: the images to draw; for a video, its middle frame is drawn.
        encoded: by column title, the results of one tower for ``media``, in the same order.
        heading: title of the figure.
        picture: the file to write.
        dpi: pixels per inch.
    """
    figure = plot_feature_maps(
        [medium.still for medium in media],
        {title: [item.feature_map for item in items] for title, items in encoded.items()},
        titles=[medium.name for medium in media],
        title=heading,
    )
    write_figure(figure, picture, dpi)
