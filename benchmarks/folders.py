"""Images per second of ``vitgraph embed`` over a folder of JPEG files, beside other libraries.

    python -m benchmarks.folders --json benchmarks/results/folders_h100.json
    python -m benchmarks.folders --no-compile --repeats 1 --items 4096 --peer-items 1024

Small towers of published sizes with random weights in bfloat16, and photographs of seven sizes.
``replays`` are back-to-back graph replays with pixels on the GPU, and ``decoding`` decodes the same
files in as many threads: the job can be no faster than the slower of them. timm and open_clip run
their tower, compiled (but for ``--no-compile``), behind a DataLoader with as many workers and their
own transform. ``sentence_transformers`` is its ``encode`` of transformers' processor and tower, on
the main thread and in batches of 32, and on the first files only. ``--peers`` names the libraries
to run, and ``--peer-items`` the files that each gets. Figures are medians of repeats. A library
that is not installed is left out. A second ratio of the job (``steady``) leaves out its start and
end, which take as long for any number of files. The file is written after the job of a tower and
after each library; after ``--seconds`` nothing more begins. The second command above is the
shortest that has all towers and libraries: some 40 s for each tower on one GPU with 16 cores.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from benchmarks.encode_many import MIXED, cut_batches, images_per_second, rates
from benchmarks.gate import JOB, STEADY, Setup, compare_times, decode_in_threads, time_jobs
from benchmarks.image_towers import TINY_SIDE, is_late
from benchmarks.image_towers import TOWERS as IMAGE_TOWERS
from benchmarks.measuring.machine import about
from benchmarks.measuring.results import write_results
from benchmarks.speed.measure import empty_cache
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
LABELS = {
    "timm": "timm, DataLoader",
    "open_clip": "open_clip, DataLoader",
    "sentence_transformers": "sentence-transformers",
}
PEERS = tuple(LABELS)
DISTINCT = 490
"""The number of different files in the folder, which come again in turn."""
FIRST = 256
"""The number of files that a library without threads gets, and that begin a job untimed."""
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


def peers(
    name: str, checkpoint: Path, setup: Setup, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield the libraries that are installed, with functions that run them on a list of files."""
    builders: dict[str, Callable[[], Callable[[Any], None] | None]] = {
        "timm": partial(by_timm, name, setup, options),
        "open_clip": partial(by_open_clip, name, setup, options),
        "sentence_transformers": partial(by_sentence_transformers, checkpoint, name, setup),
    }
    count = 0
    for peer in options.peers:
        if count < options.most_peers and importlib.util.find_spec(peer):
            if is_late(options, f"{name}, {peer}"):
                continue
            run = builders[peer]()
            if run is not None:
                count += 1
                yield LABELS[peer], run


def by_timm(name: str, setup: Setup, options: argparse.Namespace) -> Callable[[Any], None]:
    """Return a function that runs timm's tower behind a DataLoader."""
    timm: Any = importlib.import_module("timm")
    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 2} if setup.tiny else {}
    given = {"img_size": SIDES[name]} if name in SIDES and not setup.tiny else {}
    tower = timm.create_model(TIMM[name], num_classes=0, **sizes, **given)
    data = timm.data.resolve_data_config({}, model=tower)
    if given:
        data["input_size"] = (3, SIDES[name], SIDES[name])
    transform = timm.data.create_transform(**data)
    return partial(by_loader, ready(tower, setup, options), transform, options)


def by_open_clip(
    name: str, setup: Setup, options: argparse.Namespace
) -> Callable[[Any], None] | None:
    """Return a function that runs open_clip's tower behind a DataLoader; None if it has none."""
    tower = IMAGE_TOWERS.get(name)
    if tower is None or tower.open_clip is None or setup.tiny:
        return None
    open_clip: Any = importlib.import_module("open_clip")
    model, _, transform = open_clip.create_model_and_transforms(tower.open_clip)
    return partial(by_loader, ready(model.visual, setup, options), transform, options)


def ready(tower: Any, setup: Setup, options: argparse.Namespace) -> Any:
    """Return a tower in bfloat16 on the device of ours; compiled on a GPU if asked for."""
    device = setup.encoder.device
    tower = tower.to(device, torch.bfloat16).eval().requires_grad_(False)
    if not options.no_compile and device.type == "cuda":
        return torch.compile(tower, mode="max-autotune")
    return tower


def by_sentence_transformers(checkpoint: Path, name: str, setup: Setup) -> Callable[[Any], None]:
    """Return a function that runs ``encode`` of sentence-transformers on the first files.

    Its module is transformers' processor and tower.
    """
    import transformers

    library: Any = importlib.import_module("sentence_transformers")
    modules: Any = importlib.import_module("sentence_transformers.base.modules")
    device = setup.encoder.device
    tower = AutoModel.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device).eval()
    side = TINY_SIDE if setup.tiny else SIDES.get(name, tower.config.image_size)
    kind, size = PROCESSORS[setup.tower.family]
    more = {"crop_size": {"height": side, "width": side}} if "shortest_edge" in size else {}
    processor = getattr(transformers, kind)(size=dict.fromkeys(size, side), **more)

    class Images(modules.InputModule):  # type: ignore[misc]
        """The processor and the tower, as the only module of a model."""

        modalities = ("image",)

        def preprocess(self, inputs: Any, prompt: Any = None, **settings: Any) -> Any:
            return processor(inputs, return_tensors="pt")

        def forward(self, features: Any, **settings: Any) -> Any:
            rows = tower(features["pixel_values"].to(torch.bfloat16)).last_hidden_state
            return {**features, "sentence_embedding": rows.mean(1).float()}

        def save(self, *arguments: Any, **settings: Any) -> None:
            raise NotImplementedError

    model = library.SentenceTransformer(modules=[Images()], device=str(device))

    def run(paths: Sequence[Path]) -> None:
        images = [open_image(path).convert("RGB") for path in paths]
        model.encode(images, batch_size=32, show_progress_bar=False)
        synchronize()

    return run


def write_photographs(folder: Path, options: argparse.Namespace) -> list[Path]:
    """Write the files of the folder, in seven sizes, and return their paths in order."""
    setup = Setup(TOWERS[options.towers[0]], options)
    count = min(options.items, DISTINCT)
    files = setup.files([MIXED[number % len(MIXED)] for number in range(count)])
    paths = [folder / f"{number:05d}.jpg" for number in range(options.items)]
    for number, path in enumerate(paths):
        path.write_bytes(files[number % count])
    return paths


def measure(
    name: str, paths: Sequence[Path], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure one tower, and yield its row after the job and after each of the other libraries."""
    setup = Setup(TOWERS[name], options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tower"
        write_checkpoint(checkpoint, name, options.tiny)
        encoder = load_encoder(checkpoint, dtype=torch.bfloat16, device=device, progress=False)
        assert isinstance(encoder, VisionEncoder)
        setup.encoder = encoder
        found = measure_limits(setup, paths, options)
        empty_cache()  # the job captures graphs of its own
        photos = paths[0].parent
        count, first = options.repeats, paths[:FIRST]
        jobs = time_jobs(checkpoint, photos, Path(folder), options, count, first=first)
        job = compare_times(len(paths), {JOB: jobs})
        yield row_of(name, job, found)
        for peer, run in peers(name, checkpoint, setup, options):
            most = FIRST if peer == LABELS["sentence_transformers"] else options.peer_items
            found[peer] = rates_of(run, paths[:most], options.repeats)
            yield row_of(name, job, found)


def rates_of(run: Callable[[Any], None], paths: Sequence[Path], repeats: int) -> list[float]:
    """Return the images per second of all repeats, after an untimed run on the first files."""
    run(paths[:FIRST])
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run(paths)
        found.append(len(paths) / (time.perf_counter() - began))
    return found


def row_of(name: str, job: dict[str, Any], found: dict[str, list[float]]) -> dict[str, Any]:
    """Return the row of a tower from its job and the images per second of all repeats so far."""
    shown = images_per_second(found)
    rate = shown["images per second"] | job["images per second"]
    slower = min(rate["replays"], rate["decoding"])
    return {
        "tower": name,
        **job,
        "images per second": rate,
        "range": shown["range"] | job["range"],
        "over the slower": rate[JOB] / slower,
        "steady over the slower": job[STEADY][JOB] / slower,
        "goal": GOAL,
    }


def measure_limits(
    setup: Setup, paths: Sequence[Path], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return images per second of replays and of decoding, which take turns."""
    encoder = setup.encoder
    graphed = setup.graphed
    sizes = [to_rgb(path).permute(1, 2, 0).numpy() for path in paths[: len(MIXED)]]
    arrays = [sizes[number % len(sizes)] for number in range(len(paths))]
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
        "decoding": lambda part: decode_in_threads(part, "cpu", options.workers, 1),
    }
    found = rates(runs, [paths], options.repeats)
    graphed.release()
    return found


def write_checkpoint(folder: Path, name: str, tiny: bool) -> None:
    """Write a tower with random weights in its published layout.

    Its processor file is written where the size of images is not that of the tower's facts.
    """
    tower = TOWERS[name]
    family = BY_NAME[tower.family]
    config: Any = edited(dict(tower.config), **family.tiny) if tiny else tower.config
    section = config.get("vision_config", config)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # drawn faster there
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
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per batch")
    parser.add_argument("--peer-items", type=int, help="files of a library; None for all")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin nothing after these"
    )
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument(
        "--most-peers",
        type=int,
        default=len(PEERS),
        help="most libraries per tower; the first that have it, in the order of --peers",
    )
    parser.add_argument("--no-compile", action="store_true", help="run the other towers eagerly")
    parser.add_argument("--tiny", action="store_true", help="small towers and files, for a test")
    options = parser.parse_args(arguments)
    options.end = time.perf_counter() + options.seconds
    body: dict[str, Any] = {"about": about(options.repeats), "towers": []}
    with tempfile.TemporaryDirectory() as photos:
        paths = write_photographs(Path(photos), options)
        for name in options.towers:
            if is_late(options, name):
                continue
            body["towers"].append({})
            for row in measure(name, paths, options):
                body["towers"][-1] = row
                print(json.dumps(row), flush=True)
                if options.json is not None:
                    write_results(options.json, body)


if __name__ == "__main__":
    main()
