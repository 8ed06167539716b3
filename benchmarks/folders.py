"""Images per second of ``vitgraph embed`` over a folder of JPEG files, beside other libraries.

    python -m benchmarks.folders --json benchmarks/results/folders_h100.json

Small towers of published sizes with random weights in bfloat16, and photographs of seven sizes.
``replays`` are back-to-back graph replays with pixels on the GPU, and ``decoding`` decodes the same
files in as many threads: the job can be no faster than the slower of them. timm and open_clip run
their tower, compiled (but for ``--no-compile``), behind a DataLoader with as many workers and their
own transform; ``transformers`` runs its processor and tower on the main thread in batches of 32, as
``encode`` of sentence-transformers does. ``--peers`` names the libraries to run. Figures are
medians of repeats. A library that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from benchmarks.encode_many import MIXED, cut_batches, images_per_second, rates
from benchmarks.gate import Setup, decode_in_threads, time_jobs
from benchmarks.image_towers import TINY_SIDE
from benchmarks.image_towers import TOWERS as IMAGE_TOWERS
from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.towers import Tower
from encoders.base.vision_encoder import VisionEncoder
from encoders.inputs.image_files import open_image
from encoders.inputs.intake import to_rgb
from tests.oracles import BY_NAME
from tests.oracles.configs import edited
from vitgraph.timing import synchronize
from weights import load_encoder
from weights.published import family_facts

TOWERS = {
    tower.name: tower
    for tower in (
        Tower("CLIP-L/14-336", "clip", "openai/clip-vit-large-patch14-336"),
        Tower("SigLIP2-B/16", "siglip", "google/siglip2-base-patch16-224"),
        Tower("SigLIP2-so400m-384", "siglip", "google/siglip2-so400m-patch14-384"),
        Tower("DINOv3-L/16 at 512", "dinov3", "facebook/dinov3-vitl16-pretrain-lvd1689m"),
    )
}
SIDES = {"DINOv3-L/16 at 512": 512}
"""The sides of images in pixels that differ from those of the checkpoint's processor."""
TIMM = {
    "CLIP-L/14-336": "vit_large_patch14_clip_quickgelu_336",
    "SigLIP2-B/16": "vit_base_patch16_siglip_224",
    "SigLIP2-so400m-384": "vit_so400m_patch14_siglip_384",
    "DINOv3-L/16 at 512": "vit_large_patch16_dinov3_qkvb",
}
PROCESSORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "clip": ("CLIPImageProcessor", ("shortest_edge",)),
    "siglip": ("SiglipImageProcessor", ("height", "width")),
    "dinov3": ("DINOv3ViTImageProcessorFast", ("height", "width")),
}
"""The processors of transformers, and the fields of their sizes, by family."""
PEERS = ("timm", "open_clip", "transformers")
GOAL = 0.90
"""The images per second of the job over the smaller of replays and decoding, at least."""


class Files(torch.utils.data.Dataset[Any]):
    """JPEG files, decoded by Pillow and transformed, as users write it."""

    def __init__(self, paths: Sequence[Path], transform: Callable[[Any], Any]) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB"))


@torch.no_grad()
def by_loader(tower: Any, transform: Any, options: argparse.Namespace, paths: Any) -> None:
    """Run a tower on files that the workers of a DataLoader decode and transform."""
    device = next(tower.parameters()).device
    loader = torch.utils.data.DataLoader(
        Files(paths, transform),
        batch_size=options.batch,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
    )
    for batch in loader:
        tower(batch.to(device, torch.bfloat16, non_blocking=True))
    synchronize()


def peers(name: str, setup: Setup, options: argparse.Namespace) -> dict[str, Callable[[Any], None]]:
    """Return the functions that run the libraries that are installed on a list of files."""
    runs: dict[str, Callable[[Any], None]] = {}
    device = setup.encoder.device
    prepare = partial(ready, device=device, compiles=not options.no_compile)
    if "timm" in options.peers and importlib.util.find_spec("timm"):
        timm: Any = importlib.import_module("timm")

        sizes = {"embed_dim": 64, "depth": 2, "num_heads": 2} if setup.tiny else {}
        given = {"img_size": SIDES[name]} if name in SIDES and not setup.tiny else {}
        tower = timm.create_model(TIMM[name], num_classes=0, **sizes, **given)
        data = timm.data.resolve_data_config({}, model=tower)
        if given:
            data["input_size"] = (3, SIDES[name], SIDES[name])
        transform = timm.data.create_transform(**data)
        runs["timm, DataLoader"] = partial(by_loader, prepare(tower), transform, options)
    open_clip_name = IMAGE_TOWERS[name].open_clip if name in IMAGE_TOWERS else None
    wanted = "open_clip" in options.peers and not setup.tiny
    if wanted and open_clip_name and importlib.util.find_spec("open_clip"):
        open_clip: Any = importlib.import_module("open_clip")

        model, _, transform = open_clip.create_model_and_transforms(open_clip_name)
        tower = prepare(model.visual)
        runs["open_clip, DataLoader"] = partial(by_loader, tower, transform, options)
    return runs


def ready(tower: Any, device: torch.device, compiles: bool) -> Any:
    """Return a tower in bfloat16 on a device; compiled on a GPU if asked for."""
    tower = tower.to(device, torch.bfloat16).eval().requires_grad_(False)
    if compiles and device.type == "cuda":
        return torch.compile(tower, mode="max-autotune")
    return tower


def by_transformers(checkpoint: Path, name: str, setup: Setup) -> Callable[[Any], None]:
    """Return a function that runs transformers' processor and tower in batches of 32.

    ``encode`` of sentence-transformers does the same with images.
    """
    import transformers

    device = setup.encoder.device
    tower = AutoModel.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device).eval()
    side = TINY_SIDE if setup.tiny else SIDES.get(name, tower.config.image_size)
    kind, size = PROCESSORS[setup.tower.family]
    more = {"crop_size": {"height": side, "width": side}} if "shortest_edge" in size else {}
    processor = getattr(transformers, kind)(size=dict.fromkeys(size, side), **more)

    @torch.no_grad()
    def run(paths: Sequence[Path]) -> None:
        for start in range(0, len(paths), 32):
            images = [open_image(path).convert("RGB") for path in paths[start : start + 32]]
            pixels = processor(images, return_tensors="pt")["pixel_values"]
            tower(pixels.to(device, torch.bfloat16))
        synchronize()

    return run


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one tower: replays, decoding, the job and the other libraries."""
    setup = Setup(TOWERS[name], options)
    files = setup.files([MIXED[number % len(MIXED)] for number in range(options.items)])
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, photos = Path(folder) / "tower", Path(folder) / "photos"
        write_checkpoint(checkpoint, name, setup.tiny)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        encoder = load_encoder(checkpoint, dtype=torch.bfloat16, device=device, progress=False)
        assert isinstance(encoder, VisionEncoder)
        setup.encoder = encoder
        graphed = setup.graphed
        photos.mkdir()
        for number, data in enumerate(files):
            (photos / f"{number:05d}.jpg").write_bytes(data)
        paths = sorted(photos.iterdir())
        arrays = [to_rgb(data).permute(1, 2, 0).numpy() for data in files]
        batches = cut_batches(encoder, arrays, options.batch_tokens)
        rows = [sum(spec.input_size for spec in encoder.item_specs(grids)) for grids in batches]
        pixels = torch.randn((max(rows), *encoder.row_shape), device=encoder.device)
        pixels = pixels.to(encoder.dtype)

        def replay(_: object) -> None:
            for grids, count in zip(batches, rows, strict=True):
                graphed(pixels[:count], grids)
            synchronize()

        runs: dict[str, Callable[[Any], None]] = {
            "replays": replay,
            "decoding": lambda part: decode_in_threads(part, "cpu", options.workers, None),
            **peers(name, setup, options),
        }
        if "transformers" in options.peers:
            runs["transformers"] = by_transformers(checkpoint, name, setup)
        found = rates(runs, [paths], options.repeats)
        seconds = time_jobs(checkpoint, photos, Path(folder), options)
        found["vitgraph embed"] = [len(files) / one for one in seconds]
    shown = images_per_second(found)
    rate = shown["images per second"]
    slower = min(rate["replays"], rate["decoding"])
    ratio = rate["vitgraph embed"] / slower
    return {"tower": name, "items": len(files), **shown, "over the slower": ratio, "goal": GOAL}


def write_checkpoint(folder: Path, name: str, tiny: bool) -> None:
    """Write a tower with random weights in its published layout.

    Its processor file is written where the size of images is not that of the tower's facts.
    """
    tower = TOWERS[name]
    family = BY_NAME[tower.family]
    config: Any = edited(dict(tower.config), **family.tiny) if tiny else tower.config
    section = config.get("vision_config", config)
    torch.manual_seed(0)
    theirs = AutoModel.from_config(AutoConfig.for_model(**section)).bfloat16()
    theirs.save_pretrained(folder)
    if name in SIDES:
        (processor,) = family_facts(tower.family).processors.values()
        side = TINY_SIDE if tiny else SIDES[name]
        settings = {**processor["preprocessor_config"], "size": {"height": side, "width": side}}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the towers that the command line names, and write the file after each tower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--towers", nargs="+", default=list(TOWERS), choices=tuple(TOWERS))
    parser.add_argument("--items", type=int, default=8192, help="files in the folder")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes over the folder")
    parser.add_argument("--workers", type=int, default=16, help="threads and processes that decode")
    parser.add_argument("--batch", type=int, default=128, help="images per batch of a DataLoader")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="tokens per batch")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--no-compile", action="store_true", help="run the other towers eagerly")
    parser.add_argument("--tiny", action="store_true", help="small towers and files, for a test")
    options = parser.parse_args(arguments)
    body: dict[str, Any] = {"about": about(options.repeats), "towers": []}
    for name in options.towers:
        body["towers"].append(measure(name, options))
        print(json.dumps(body["towers"][-1]), flush=True)
        if options.json is not None:
            write_results(options.json, body)


if __name__ == "__main__":
    main()
