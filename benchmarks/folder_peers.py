"""Other libraries over a folder of JPEG files, for ``benchmarks.folders``: how users write it.

timm and open_clip run their tower behind a DataLoader with their own transform. Its workers are
started once, before anything is timed, and batches are so small that each worker gets several.
sentence-transformers runs ``encode`` of transformers' processor and tower on the main thread. All
towers have random weights in bfloat16, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import AutoModel

from benchmarks.gate import Setup
from benchmarks.image_towers import TINY_SIDE
from encoders.inputs.image_files import open_image
from vitgraph.timing import synchronize

TIMM = {
    "CLIP-L/14-336": "vit_large_patch14_clip_quickgelu_336",
    "SigLIP2-B/16": "vit_base_patch16_siglip_224",
    "SigLIP2-so400m-384": "vit_so400m_patch14_siglip_384",
    "DINOv3-L/16 at 512": "vit_large_patch16_dinov3_qkvb",
}
OPEN_CLIP = {
    "CLIP-L/14-336": "ViT-L-14-336-quickgelu",
    "SigLIP2-B/16": "ViT-B-16-SigLIP2",
    "SigLIP2-so400m-384": "ViT-SO400M-14-SigLIP-384",  # its image tower is that of SigLIP2
}
PROCESSORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
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
LONGEST_WAIT = 60
"""The seconds after which a DataLoader that gets no batch from its workers raises an error."""
AT_ONCE = 32
"""The images per batch of sentence-transformers."""
TINY_OPEN_CLIP = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": TINY_SIDE, "layers": 2, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 64, "heads": 2, "layers": 1},
}
Run: TypeAlias = Callable[[Sequence[Path]], None]


class Task(NamedTuple):
    """What a library is to run."""

    name: str
    """The name of the tower."""
    checkpoint: Path
    """The folder with the tower in the layout of transformers."""
    paths: Sequence[Path]
    """All files. A run takes the first of them."""
    side: int | None
    """The side of the images in pixels, if it is not that of the tower's processor."""
    setup: Setup
    options: argparse.Namespace

    @property
    def device(self) -> torch.device:
        """The device of our encoder."""
        return self.setup.encoder.device


def find_peers(task: Task) -> Iterator[tuple[str, AbstractContextManager[Run]]]:
    """Yield the libraries that are installed and have the tower: their label, and what runs them.

    A library is built when its context is entered, and its workers end with the context.
    """
    count = 0
    for peer in task.options.peers:
        named = NAMES.get(peer)
        has_tower = named is None or task.name in named
        if has_tower and importlib.util.find_spec(peer) and count < task.options.most_peers:
            count += 1
            yield LABELS[peer], BUILDERS[peer](task)


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


def batch_of(options: argparse.Namespace, files: int) -> int:
    """Return the images per batch of a DataLoader, of which each worker gets four or more."""
    files = min(files, options.peer_items or files)
    return max(min(options.batch, files // (4 * options.workers)), 1)


@contextmanager
def by_loader(tower: Any, transform: Any, task: Task) -> Iterator[Run]:
    """Give a function that runs a tower on files that the workers of a DataLoader decode."""
    order: list[int] = []
    loaders = [
        torch.utils.data.DataLoader(
            Files(task.paths, transform),
            batch_size=batch_of(task.options, len(task.paths)),
            sampler=order,
            num_workers=task.options.workers,
            persistent_workers=True,
            pin_memory=task.device.type == "cuda",
            timeout=LONGEST_WAIT,
        )
    ]

    @torch.no_grad()
    def run(paths: Sequence[Path]) -> None:
        order[:] = range(len(paths))
        for batch in loaders[0]:
            tower(batch.to(task.device, torch.bfloat16, non_blocking=True))
        synchronize()

    try:
        yield run
    finally:
        loaders.clear()  # ends the workers


@contextmanager
def by_timm(task: Task) -> Iterator[Run]:
    """Give a function that runs timm's tower behind a DataLoader."""
    timm: Any = importlib.import_module("timm")
    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 2} if task.setup.tiny else {}
    given = {} if task.side is None or task.setup.tiny else {"img_size": task.side}
    with task.device:
        tower = timm.create_model(TIMM[task.name], num_classes=0, **sizes, **given)
    data = timm.data.resolve_data_config({}, model=tower)
    if given:
        data["input_size"] = (3, task.side, task.side)
    transform = timm.data.create_transform(**data)
    with by_loader(ready(tower, task), transform, task) as run:
        yield run


@contextmanager
def by_open_clip(task: Task) -> Iterator[Run]:
    """Give a function that runs open_clip's image tower behind a DataLoader."""
    open_clip: Any = importlib.import_module("open_clip")
    sizes = TINY_OPEN_CLIP if task.setup.tiny else {}
    with task.device:
        model, _, transform = open_clip.create_model_and_transforms(
            OPEN_CLIP[task.name], device=task.device, **sizes
        )
    with by_loader(ready(model.visual, task), transform, task) as run:
        yield run


def ready(tower: Any, task: Task) -> Any:
    """Return a tower in bfloat16 on the device of ours; compiled on a GPU if asked for."""
    tower = tower.to(task.device, torch.bfloat16).eval().requires_grad_(False)
    if task.options.compile and task.device.type == "cuda":
        return torch.compile(tower, dynamic=False)
    return tower


@contextmanager
def by_sentence_transformers(task: Task) -> Iterator[Run]:
    """Give a function that runs ``encode`` of sentence-transformers.

    Its module is transformers' processor and tower.
    """
    import transformers

    library: Any = importlib.import_module("sentence_transformers")
    modules: Any = importlib.import_module("sentence_transformers.base.modules")
    device = task.device
    tower = AutoModel.from_pretrained(task.checkpoint, dtype=torch.bfloat16).to(device).eval()
    side = TINY_SIDE if task.setup.tiny else task.side or tower.config.image_size
    kind, size = PROCESSORS[task.setup.tower.family]
    more = {"crop_size": {"height": side, "width": side}} if "shortest_edge" in size else {}
    processor = getattr(transformers, kind)(size=dict.fromkeys(size, side), **more)

    class Images(modules.InputModule):  # type: ignore[misc]
        """The processor and the tower, as the only module of a model."""

        modalities = ("image",)

        def __init__(self) -> None:
            super().__init__()
            self.tower = tower  # its parameters tell the library the device of the model

        def preprocess(self, inputs: Any, prompt: Any = None, **settings: Any) -> Any:
            return processor(inputs, return_tensors="pt")

        def forward(self, features: Any, **settings: Any) -> Any:
            rows = self.tower(features["pixel_values"].to(torch.bfloat16)).last_hidden_state
            return {**features, "sentence_embedding": rows.mean(1).float()}

        def save(self, *arguments: Any, **settings: Any) -> None:
            raise NotImplementedError

    model = library.SentenceTransformer(modules=[Images()], device=str(device))

    def run(paths: Sequence[Path]) -> None:
        images = [open_image(path).convert("RGB") for path in paths]
        model.encode(images, batch_size=AT_ONCE, show_progress_bar=False)
        synchronize()

    yield run


NAMES: Mapping[str, Mapping[str, str]] = {"timm": TIMM, "open_clip": OPEN_CLIP}
"""The names of the towers that a library has, if it does not run that of transformers."""
BUILDERS: Mapping[str, Callable[[Task], AbstractContextManager[Run]]] = {
    "timm": by_timm,
    "open_clip": by_open_clip,
    "sentence_transformers": by_sentence_transformers,
}
