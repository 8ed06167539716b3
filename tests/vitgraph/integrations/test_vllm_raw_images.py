"""Images that vLLM's processor sends as uint8: the patches that the engine's process makes of them,
and the mark on the config that switches this on and finds processes without the plug-in."""

from __future__ import annotations

import logging
import pickle
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from vitgraph.integrations.vllm_plugin import raw_images, raw_processor, raw_switch
from vitgraph.integrations.vllm_plugin.raw_images import IMAGE, LEVELS, PIXELS, with_patches

ON_DEVICE = {"do_rescale": False, "do_normalize": False}
"""The settings of a vLLM that normalises pixels in its tower."""
SETTINGS: dict[str, dict[str, Any]] = {
    "published": {},
    "normalised by the tower": ON_DEVICE,
    "bilinear": {"resample": 2},
    "not resized": {"do_resize": False},
    "rescaled alone": {"do_normalize": False},
}
QWEN: dict[str, dict[str, Any]] = {
    "small limits": {"size": {"shortest_edge": 3136, "longest_edge": 20_000}},
    "other patches": {"patch_size": 16, **ON_DEVICE},
}
SMALL: dict[str, dict[str, Any]] = {
    "MiniMaxM3VLImageProcessor": {"size": {"shortest_edge": 3136, "longest_edge": 20_000}},
    "PaddleOCRVLImageProcessor": {"size": {"shortest_edge": 784, "longest_edge": 20_000}},
    "PixtralImageProcessor": {"size": {"longest_edge": 150}},
    "Gemma4ImageProcessor": {"max_soft_tokens": 140},
}
"""Limits with which images of the other classes shrink."""
CASES = [
    (name, {**SMALL.get(name, {}), **settings})
    for name in raw_processor.IMAGE_PROCESSORS
    for settings in (SETTINGS if name in SMALL else SETTINGS | QWEN).values()
]
SIZES = ([(64, 96)], [(97, 61), (200, 300), (97, 61)], [(30, 30), (1200, 44)], [(56, 112)])
"""Height and width of the images of a call; the largest shrink to less than half."""


def images(sizes: Any, seed: int = 0) -> list[Image.Image]:
    dice = np.random.default_rng(seed)
    return [Image.fromarray(dice.integers(0, 256, (*hw, 3), dtype=np.uint8)) for hw in sizes]


def processors(name: str) -> tuple[Any, Any]:
    """An image processor of transformers, and the one in its place that sends images."""
    stock = getattr(pytest.importorskip("transformers"), name)()
    whole = SimpleNamespace(image_processor=stock)
    return stock, sending(whole).image_processor


def sending(processor: Any) -> Any:
    """What takes the place of a processor, without vLLM's cache of it."""
    return raw_processor.sending_images.__wrapped__(processor)


def answer(processor: Any, given: list[Any], settings: dict[str, Any]) -> Any:
    """What a processor returns, or the text of its error."""
    try:
        return dict(processor(given, return_tensors="pt", **settings))
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def by_engine(sent: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What the engine makes of the inputs that vLLM sends, under the names of transformers."""
    kept = {name: sent[name] for name in sent if name not in raw_processor.REPLACED}
    made = with_patches(kept, dtype)
    if "pixel_position_ids" in made:
        made["image_position_ids"] = made.pop("pixel_position_ids")
    return made


def check(name: str, sizes: Any, settings: dict[str, Any]) -> None:
    """What the engine makes of images is what the processor makes of them."""
    stock, raw = processors(name)
    wanted, sent = (answer(one, images(sizes), settings) for one in (stock, raw))
    if isinstance(wanted, str):  # sides that are not whole patches, and are not resized
        assert sent == wanted
        return
    assert IMAGE in sent
    assert not any(value.is_meta for value in sent.values() if isinstance(value, Tensor))
    found = by_engine(sent)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if key == "pixel_values" and "image_sizes" in wanted:  # vLLM takes the padding away
            value = [
                image[:, :h, :w] for image, (h, w) in zip(value, sizes_of(wanted), strict=True)
            ]
        elif key == "pixel_values" and not isinstance(found[key], Tensor):
            value = value.split(wanted["image_grid_thw"].prod(-1).tolist())  # as vLLM does
        elif found[key].shape != value.shape:
            value = value.view(found[key].shape)
        assert len(found[key]) == len(value), (key, sizes)
        for one, other in zip(found[key], value, strict=True):
            assert torch.equal(one, other), (key, sizes)
            assert one.dtype == other.dtype


def sizes_of(made: Any) -> list[list[int]]:
    return torch.as_tensor(made["image_sizes"]).tolist()


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_patches_cut_by_the_engine_are_the_processors_to_the_bit(
    name: str, settings: dict[str, Any]
) -> None:
    for sizes in SIZES:
        check(name, sizes, settings)


@pytest.mark.parametrize("name", raw_processor.IMAGE_PROCESSORS)
def test_images_of_many_sizes_are_the_processors_to_the_bit(name: str) -> None:
    dice = np.random.default_rng(1)
    check(name, [tuple(dice.integers(30, 180, 2)) for _ in range(12)], SMALL.get(name, {}))


def test_tiles_cut_by_the_engine_are_those_of_pillow() -> None:
    dice = np.random.default_rng(2)
    levels = torch.rand(3, 256)
    for _ in range(12):
        (height, width), (rows, columns) = dice.integers(8, 90, 2), dice.integers(1, 4, 2)
        (image,) = images([(height, width)], int(dice.integers(9)))
        views = [image.resize((16 * int(columns), 16 * int(rows)))]
        views += [image.resize((16, 16))] if rows * columns > 1 else []
        wanted = [
            np.array(view.crop((x, y, x + 16, y + 16)))
            for view in views
            for y in range(0, view.height, 16)
            for x in range(0, view.width, 16)
        ]
        layout = raw_images.LAYOUTS.index(raw_images.as_tiles)
        sent = (layout, height, width, 16 * rows, 16 * columns, 16, 1, rows * columns > 1)
        found = with_patches(
            {
                PIXELS: torch.from_numpy(np.array(image)).flatten(),
                IMAGE: torch.tensor([[int(value) for value in sent]]),
                LEVELS: raw_images.describe_levels(levels, 1),
            },
            torch.float32,
        )["pixel_values_flat"]
        assert isinstance(found, Tensor)
        numbers = torch.from_numpy(np.stack(wanted)).permute(0, 3, 1, 2).long()
        assert torch.equal(
            found,
            levels.gather(1, numbers.movedim(1, 0).flatten(1))
            .view(3, *numbers.movedim(1, 0).shape[1:])
            .movedim(0, 1),
        )


def test_frames_of_gemma4_keep_the_old_path() -> None:
    stock, raw = processors("Gemma4ImageProcessor")
    wanted, sent = (
        answer(one, images([(64, 96)]), {"max_soft_tokens": 70}) for one in (stock, raw)
    )
    assert sent.keys() == wanted.keys()
    assert torch.equal(sent["pixel_values"], wanted["pixel_values"])


def test_an_image_is_never_sent_in_more_bytes_than_its_patches() -> None:
    stock, raw = processors("Qwen2VLImageProcessor")
    limits = {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}, **ON_DEVICE}
    for sizes in ([(112, 112)], [(150, 150)], [(170, 170)], [(900, 500)]):
        sent, patches = (one(images(sizes), return_tensors="pt", **limits) for one in (raw, stock))
        assert sent[PIXELS].nbytes <= patches["pixel_values"].nbytes


def test_floats_and_grey_arrays_keep_the_old_path() -> None:
    stock, raw = processors("Qwen2VLImageProcessor")
    for image in (torch.rand(3, 64, 96) * 255, np.zeros((64, 96), np.uint8)):
        wanted, sent = (answer(one, [image], {}) for one in (stock, raw))
        if isinstance(wanted, str):
            assert sent == wanted
            continue
        assert IMAGE not in sent
        assert torch.equal(sent["pixel_values"], wanted["pixel_values"])


def test_an_image_that_the_processor_refuses_has_the_processors_error() -> None:
    for given in (images([(64, 64), (3000, 4)]), [*images([(64, 64)]), "no such file"]):
        stock, raw = processors("Qwen2VLImageProcessor")
        (wanted, found) = (_raised(one, given) for one in (stock, raw))
        assert found == wanted


def _raised(processor: Any, given: Any) -> tuple[str, str]:
    with pytest.raises(Exception) as caught:
        processor(given, return_tensors="pt")
    return type(caught.value).__name__, str(caught.value)


def test_processors_that_are_not_known_stay_as_they_are() -> None:
    class Qwen2VLImageProcessor:
        """A class that a repo brings under a known name."""

    for own in (Qwen2VLImageProcessor(), object()):
        whole = SimpleNamespace(image_processor=own)
        assert sending(whole) is whole
        assert whole.image_processor is own


def test_normalised_patches_have_the_dtype_of_the_model() -> None:
    stock, raw = processors("Qwen2VLImageProcessor")
    sent = dict(raw(images([(64, 96)]), return_tensors="pt"))
    kept = [value for name, value in sent.items() if name not in raw_processor.REPLACED]
    assert not any(value.is_floating_point() for value in kept)  # vLLM rounds floats
    found = by_engine(sent, torch.bfloat16)["pixel_values"]
    wanted = stock(images([(64, 96)]), return_tensors="pt")["pixel_values"]
    assert isinstance(found, Tensor)
    assert torch.equal(found, wanted.bfloat16())


# --- vLLM's classes around them ------------------------------------------------------------------


@dataclass(frozen=True)
class Factories:
    """The classes from which vLLM builds the processor of a model."""

    info: Any
    processor: Any
    dummy_inputs: type = object


class Info:
    """vLLM's processing info, whose processor is always the same."""

    def __init__(self, *, marked: bool) -> None:
        hf_config = SimpleNamespace(**({raw_switch.MARK: "1"} if marked else {}))
        self.ctx = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config))
        images = pytest.importorskip("transformers").Qwen2VLImageProcessor()
        self.processor = Whole(images)

    def get_hf_processor(self, **settings: Any) -> Any:
        return self.processor


class Whole:
    """A processor of transformers for text and images."""

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor


class Processor:
    """vLLM's multi-modal processor."""

    def __init__(self, info: Any) -> None:
        self.info = info

    def _get_mm_fields_config(self, inputs: Any, settings: Any) -> dict[str, Any]:
        return {"pixel_values": "patches", "image_grid_thw": "grids"}


@pytest.fixture
def fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's class of fields."""
    for name in ("vllm", "vllm.multimodal", "vllm.multimodal.inputs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    config = SimpleNamespace(
        flat_from_sizes=lambda modality, sizes: (modality, sizes.tolist()),
        batched=lambda modality, keep_on_cpu: (modality, keep_on_cpu),
    )
    vars(sys.modules["vllm.multimodal.inputs"])["MultiModalFieldConfig"] = config


def make_info(*, marked: bool) -> Info:
    """vLLM has a function in place of the class for Pixtral, whose config says what it is."""
    return Info(marked=marked)


@pytest.mark.usefixtures("fields")
@pytest.mark.parametrize("made_by", [Info, make_info])
def test_bytes_are_divided_among_images_by_their_sizes(made_by: Any) -> None:
    factories: Any = raw_processor.raw_factories(Factories(made_by, Processor))
    info = factories.info(marked=True)
    image_processor = info.get_hf_processor().image_processor
    assert info.get_hf_processor().image_processor is image_processor  # made once
    assert image_processor is not info.processor.image_processor
    sizes = [(64, 96), (300, 200)]
    sent = dict(image_processor(images(sizes), return_tensors="pt"))
    found = factories.processor(info)._get_mm_fields_config(sent, {})
    assert found[PIXELS] == ("image", [3 * 64 * 96, 3 * 300 * 200])
    assert found["image_grid_thw"] == "grids"
    assert "pixel_values" not in found
    assert found[IMAGE] == found[LEVELS] == ("image", True)
    old = factories.processor(info)._get_mm_fields_config({"pixel_values": 0}, {})
    assert old == Processor(info)._get_mm_fields_config({}, {})


def test_a_config_without_the_mark_keeps_vllms_processor() -> None:
    factories: Any = raw_processor.raw_factories(Factories(Info, Processor))
    info = factories.info(marked=False)
    assert info.get_hf_processor() is info.processor


# --- the mark ------------------------------------------------------------------------------------


class Completes:
    """vLLM's class that completes configs."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        vllm_config.done = [*vllm_config.done, "theirs"]


def marked(monkeypatch: pytest.MonkeyPatch, options: str = "", sends: bool = True) -> Any:
    """The config of a model, as vLLM completes it with the plug-in."""
    monkeypatch.setenv("VITGRAPH_VLLM", "1")
    monkeypatch.setenv("VITGRAPH_VLLM_OPTIONS", options)
    known: dict[str, type] = {"Known": Completes}
    for _ in range(2):  # vLLM registers plug-ins more than once
        raw_switch.mark_configs(known, Completes, {"Known": sends, "New": sends})
    model = SimpleNamespace(hf_config=SimpleNamespace())
    config = SimpleNamespace(model_config=model, additional_config={}, done=[])
    for kind in known.values():
        kind.verify_and_update_config(config)  # type: ignore[attr-defined]
    assert config.done == ["theirs", "theirs"]
    return model


def test_the_mark_says_that_images_are_sent_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert raw_switch.is_raw(marked(monkeypatch))
    assert not raw_switch.is_raw(marked(monkeypatch, '{"raw_images": false}'))
    assert not raw_switch.is_raw(marked(monkeypatch, sends=False))


@pytest.mark.parametrize("sends", [True, False])
def test_a_process_without_the_plug_in_fails_at_start(
    monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    sent = pickle.dumps(marked(monkeypatch, sends=sends))
    assert raw_switch.is_raw(pickle.loads(sent)) == sends
    monkeypatch.delenv("VITGRAPH_VLLM")
    with pytest.raises(ValueError, match="VITGRAPH_VLLM=1 is not set in this process of vLLM"):
        pickle.loads(sent)


def test_a_process_with_another_version_fails_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_switch, "FORM", "2")
    sent = pickle.dumps(marked(monkeypatch))
    monkeypatch.setattr(raw_switch, "FORM", "3")
    with pytest.raises(ValueError, match="images are sent in form '2', and vitgraph reads '3'"):
        pickle.loads(sent)


# --- the engine's process ------------------------------------------------------------------------


@pytest.fixture
def replacing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the base class, imported beside a fake vLLM."""
    from tests.support.fakes.vllm import fake_vllm

    for name, module in fake_vllm("0.32.0").items():
        monkeypatch.setitem(sys.modules, name, module)
    name = "vitgraph.integrations.vllm_plugin.replacing"
    yield import_module(name)
    del sys.modules[name]  # it has read the fakes


def test_vllms_model_gets_patches_in_place_of_bytes(replacing: Any) -> None:
    from tests.support.fakes.vllm import StageMissingLayer
    from vitgraph.integrations.vllm_plugin.records import Record

    class Theirs(torch.nn.Module):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.visual = StageMissingLayer()

        def embed_multimodal(self, **inputs: Any) -> Any:
            return inputs

    class Model(replacing.ReplacesTower, Theirs):  # type: ignore[misc]
        record = Record("qwen2_vl", "qwen2_vl")

    hf_config = SimpleNamespace(**{raw_switch.MARK: "1"})
    model_config = SimpleNamespace(hf_config=hf_config, dtype=torch.float32)
    graphs = SimpleNamespace(cudagraph_mm_encoder=True)
    model = Model(vllm_config=SimpleNamespace(model_config=model_config, compilation_config=graphs))
    assert not graphs.cudagraph_mm_encoder  # vLLM's graphs would read bytes, also of its own tower
    stock, raw = processors("Qwen2VLImageProcessor")
    given = images([(64, 96), (40, 30)])
    wanted = dict(stock(given, return_tensors="pt"))
    for sent in (dict(raw(given, return_tensors="pt")), wanted):
        found = model.embed_multimodal(**sent)
        assert found.keys() == wanted.keys()
        assert torch.equal(found["pixel_values"], wanted["pixel_values"])


def test_a_kernel_that_differs_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def differs(device: torch.device) -> bool:
        warnings.warn(f"images are resized on the CPU, not on {device}: it differs", stacklevel=1)
        return False

    monkeypatch.setattr(raw_images, "is_exact_on", differs)
    with caplog.at_level(logging.WARNING):
        raw_images.check_resizing(torch.device("cpu"))
        raw_images.check_resizing(torch.device("cuda", 0))
    (record,) = caplog.records
    expected = "vitgraph: images are resized on the CPU, not on cuda:0: it differs"
    assert record.getMessage() == expected
