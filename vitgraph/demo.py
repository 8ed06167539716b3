"""``make demo``: encode photographs with every family and draw the features.

The checkpoints are small and hold random weights, but they are written as on the Hub: published
``config.json``, shards, a language model beside the tower. Loading, preprocessing and encoding are
those of real checkpoints.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from weights import families, load_encoder
from weights.families.family import NO_VIDEO

from .encode import HEADER, Encoded, Media, encode_media, image_medium, row
from .plots import plot_feature_maps, require_matplotlib
from .seeded import RECIPES, write_seeded_checkpoint
from .terminal import format_table
from .video import read_video, require_av, write_video

FAMILIES = {
    small.title: name
    for family in families.FAMILIES.values()
    for name, small in family.small.items()
    if small.title
}
"""Title in the picture -> name that ``write_seeded_checkpoint`` takes."""

PHOTOGRAPHS = {
    "pavilion": ("sklearn", "datasets/images/china.jpg"),
    "dahlia": ("sklearn", "datasets/images/flower.jpg"),
    "portrait": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
}
"""Sample images that come with installed packages: name -> package and path inside it."""


def sample_photographs() -> dict[str, Path]:
    """Return the paths of the photographs that come with scikit-learn and matplotlib, by name.

    Raises:
        ValueError: one of the packages is not installed.
    """
    return {name: _package_file(*place) for name, place in PHOTOGRAPHS.items()}


def _package_file(package: str, path: str) -> Path:
    spec = find_spec(package)  # finds the folder without the second that importing would take
    if spec is None or spec.origin is None:
        raise ValueError(
            f"the demo's photographs need {package}: pip install 'vitgraph[demo]', or in a clone "
            "pip install '.[demo]'"
        )
    return Path(spec.origin).parent / path


def panned_clip(photograph: Tensor, *, frames: int = 8, side: int = 256) -> Tensor:
    """Make a clip of a square window that moves over a photograph from left to right.

    Args:
        photograph: uint8 [3, H, W] with H >= ``side`` and W > ``side``.
        frames: number of frames.
        side: side of the window in pixels.

    Returns:
        uint8 [frames, 3, side, side].
    """
    top = (photograph.shape[1] - side) // 2
    lefts = torch.linspace(0, photograph.shape[2] - side, frames).long().tolist()
    return torch.stack([photograph[:, top : top + side, left : left + side] for left in lefts])


def sample_media(folder: Path) -> list[Media]:
    """Return the photographs and a clip that was written to an H.264 file in ``folder``."""
    stills = [image_medium(name, path) for name, path in sample_photographs().items()]
    path = folder / "pan.mp4"
    write_video(path, panned_clip(stills[0].still), fps=8)
    return [*stills, Media(path.name, read_video(path), "video")]


def run_demo(out: Path) -> Path:
    """Encode the samples with every family, print a table and draw the feature maps.

    A family that takes no video encodes the middle frame of the clip.

    Args:
        out: folder for ``feature_maps.png``, made if it does not exist.

    Returns:
        The path of the picture.

    Raises:
        ValueError: an optional package is missing.
    """
    require_matplotlib()
    require_av()
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        media = sample_media(Path(folder))
        encoded = {
            title: _encode_family(Path(folder) / family, family, seed, media)
            for seed, (title, family) in enumerate(FAMILIES.items())
        }
    rows = [(title, *row(one)) for title, items in encoded.items() for one in items]
    print(format_table(("family", *HEADER), rows))
    picture = out / "feature_maps.png"
    _draw(media, encoded, picture)
    print(f"\n{len(encoded)} families in {time.perf_counter() - start:.0f} s; wrote {picture}")
    return picture


def _encode_family(folder: Path, family: str, seed: int, media: list[Media]) -> list[Encoded]:
    write_seeded_checkpoint(folder, family, depth=4, width=160, seed=seed)
    encoder = load_encoder(folder, progress=False, dtype=torch.float32)
    if RECIPES[family].family.video == NO_VIDEO:
        media = [image_medium(medium.name, medium.still) for medium in media]
    return list(encode_media(encoder, media, {}))


def _draw(media: list[Media], encoded: dict[str, list[Encoded]], picture: Path) -> None:
    figure = plot_feature_maps(
        [medium.still for medium in media],
        {title: [one.feature_map for one in items] for title, items in encoded.items()},
        titles=[medium.name for medium in media],
        title="Features of the last layer, coloured by their three principal components "
        "(small towers with seeded random weights)",
    )
    figure.savefig(picture, dpi=150)
