"""Model classes of vLLM made from records, beside fakes: batches in vLLM's form, and weights."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor, nn

from encoders.base.paths_encoder import PathsEncoder
from encoders.base.vision_encoder import VisionEncoder
from tests.support.fakes.vllm import LinearBase, UnquantizedLinearMethod, fake_vllm
from vitgraph.integrations import vllm_plugin
from vitgraph.integrations.vllm_plugin import raw_processor
from vitgraph.integrations.vllm_plugin.records import MODELS
from vitgraph.integrations.vllm_plugin.tower import TOWERS
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

Batch = dict[str, Any]
Case = tuple[Tensor, list[tuple[int, int, int]], list[int], Batch]
"""Rows and grids of our encoder, the number of grids of each item, and the same batch of vLLM."""
dice = torch.Generator().manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=dice)


def tiles(encoder: VisionEncoder) -> Case:
    pixels = draw(3, *encoder.row_shape)
    batch = {"pixel_values": pixels, "num_patches": torch.tensor([1, 2])}
    return pixels, [encoder.grid_for(1)] * 3, [1, 2], batch


def chunked_tiles(encoder: VisionEncoder) -> Case:
    pixels, found, counts, batch = tiles(encoder)
    return pixels, found, counts, {**batch, "patches_per_image": batch.pop("num_patches")}


def images(encoder: Any) -> Case:
    """Images whose patches are taken out one by one, block by block."""
    patch, merge = encoder.config.patch_size, encoder.config.spatial_merge_size
    grids = [(1, 4, 6), (1, 2, 4)]
    pictures = [draw(3, h * patch, w * patch) for _, h, w in grids]
    rows = []
    for picture, (_, h, w) in zip(pictures, grids, strict=True):
        for top in range(0, h, merge):
            for left in range(0, w, merge):
                for y in range(top, top + merge):
                    for x in range(left, left + merge):
                        cell = picture[:, y * patch :, x * patch :][:, :patch, :patch]
                        rows.append(cell.flatten())
    return torch.stack(rows), grids, [1, 1], {"pixel_values": pictures}


def patches(encoder: Any) -> tuple[Tensor, list[tuple[int, int, int]], Tensor]:
    grids = [(1, 4, 6), (1, 2, 4)]
    rows = draw(32, encoder.config.patch_dim)
    side = encoder.config.patch_size
    return rows, grids, rearrange(rows, "n (c p q) -> n c p q", p=side, q=side)


def grids(encoder: Any) -> Case:
    rows, found, cells = patches(encoder)
    batch = {"pixel_values": cells, "image_grid_hws": torch.tensor(found)[:, 1:]}
    return rows, found, [1, 1], batch


def chunks(encoder: Any) -> Case:
    """An image, and a clip of four frames that becomes one set of tokens."""
    found = [(1, 4, 6), (4, 2, 4)]
    rows, side = draw(56, encoder.config.patch_dim), encoder.config.patch_size
    cells = rearrange(rows, "n (c p q) -> n c p q", p=side, q=side)
    return rows, found, [1, 1], {"pixel_values": cells, "grid_thws": torch.tensor(found)}


def rows_alone(encoder: Any) -> Case:
    """Patches as rows, which are not divided into channels."""
    found = [(1, 4, 6), (1, 2, 4)]
    rows = draw(32, encoder.config.patch_dim)
    return rows, found, [1, 1], {"pixel_values": rows, "image_grid_thw": torch.tensor(found)}


def padded(encoder: Any) -> Case:
    """An image of one tile and one of two, with padding after the patches of smaller tiles."""
    found = [(1, 4, 6), (1, 2, 4), (1, 4, 4)]
    rows = draw(48, encoder.config.patch_dim)
    parts = [F.pad(part, (0, 0, 0, 24 - len(part))) for part in rows.split([24, 8, 16])]
    shapes, counts = torch.tensor(found)[:, 1:], torch.tensor([1, 2])
    batch = {"pixel_values": torch.stack(parts), "spatial_shapes": shapes, "num_patches": counts}
    return rows, found, [1, 2], batch


def lists(encoder: Any) -> Case:
    rows, found, cells = patches(encoder)
    batch = {"pixel_values": cells.split([24, 8]), "image_grid_thw": torch.tensor(found)}
    return rows, found, [1, 1], batch


def flat(encoder: Any) -> Case:
    rows, found, counts, batch = lists(encoder)
    return rows, found, counts, {**batch, "pixel_values": torch.cat(batch["pixel_values"])}


def stacked(encoder: Any) -> Case:
    rows, _, cells = patches(encoder)
    found = [(1, 4, 4), (1, 4, 4)]
    batch = {"pixel_values": cells.unflatten(0, (2, 16)), "image_grid_thw": torch.tensor(found)}
    return rows, found, [1, 1], batch


def positions(encoder: Any) -> Case:
    """Images of 36 and 18 patches, the second with padding, at values of 0 to 1."""
    found = [(1, 6, 6), (1, 3, 6)]
    raw = torch.rand(54, encoder.config.patch_dim, generator=dice)
    images, places = [], []
    for rows, (_, h, w) in zip(raw.split([36, 18]), found, strict=True):
        missing = 36 - h * w
        images.append(F.pad(rows, (0, 0, 0, missing)))
        cells = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)
        places.append(F.pad(cells, (0, 0, 0, missing), value=-1))
    batch = {"pixel_values": torch.stack(images), "pixel_position_ids": torch.stack(places)}
    return 2 * (raw - 0.5), found, [1, 1], batch


CASES = [
    ("Gemma3ForConditionalGeneration", "gemma3", tiles),
    ("Idefics3ForConditionalGeneration", "idefics3", tiles),
    ("SmolVLMForConditionalGeneration", "smolvlm", tiles),
    ("Mistral3ForConditionalGeneration", "pixtral", images),
    ("KimiVLForConditionalGeneration", "kimi_vl", grids),
    ("KimiK25ForConditionalGeneration", "kimi_k25", chunks),
    ("KimiK3ForConditionalGeneration", "kimi_k3", chunks),
    ("PaddleOCRVLForConditionalGeneration", "paddleocr_vl", lists),
    ("PaddleOCRVLForConditionalGeneration", "paddleocr_vl", flat),
    ("PaddleOCRVLForConditionalGeneration", "paddleocr_vl", stacked),
    ("Lfm2VlForConditionalGeneration", "lfm2_vl", padded),
    ("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl", rows_alone),
    ("MiniMaxM3SparseForConditionalGeneration", "minimax_m3", rows_alone),
    ("DotsOCRForCausalLM", "dots_ocr", rows_alone),
    ("Llama4ForConditionalGeneration", "llama4", chunked_tiles),
    ("Gemma4ForConditionalGeneration", "gemma4", positions),
    ("Gemma4ForConditionalGeneration", "gemma4_e2b", positions),
]


@dataclass(frozen=True)
class Factories:
    """The classes from which vLLM builds the processor of a model."""

    info: type = SimpleNamespace
    processor: type = SimpleNamespace


class TheirModel(nn.Module):
    """A model class of vLLM: a tower and a projector, and weights that go to children by name."""

    paths: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    """Names of the model's own parameters."""
    _processor_factory = Factories()

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.model = nn.Module()
        for name in self.learned:
            self.register_parameter(name, nn.Parameter(torch.zeros(1)))
        for path in self.paths:
            holder, _, name = path.rpartition(".")
            self.get_submodule(holder).add_module(
                name, nn.Sequential(LinearBase(UnquantizedLinearMethod()))
            )

    def _process_image_input(self, image_input: Batch) -> Any:
        return "theirs"

    _process_video_input = _process_media_input = _process_image_input

    def _process_vision_input(self, image_input: Batch, use_vit_merger: Any = None) -> Any:
        return "theirs"

    def load_weights(self, weights: Any) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            child, path = next(
                (self.get_submodule(path), path) for path in self.paths if name.startswith(path)
            )
            one = [(name.removeprefix(f"{path}."), tensor)]
            loaded |= {f"{path}.{local}" for local in child.load_weights(one)}
        return loaded


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of classes, imported beside a fake vLLM with a class for each record."""
    fakes = fake_vllm("0.32.0")
    vision = ModuleType("vllm.model_executor.models.vision")
    vision.run_dp_sharded_vision_model = None  # type: ignore[attr-defined]
    fakes[vision.__name__] = vision
    for name, record in MODELS.items():
        module = fakes.setdefault(record.path, ModuleType(record.path))
        facts = {"paths": (record.tower, *record.projectors), "learned": record.parameters}
        vars(module)[record.name or name] = type(name, (TheirModel,), facts)
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = [f"{vllm_plugin.__name__}.{name}" for name in ("models", "replacing")]
    yield import_module(ours[0])
    for name in ours:
        del sys.modules[name]  # they have read the fakes


def build(models: Any, architecture: str, config: Any) -> Any:
    model = SimpleNamespace(
        model="a-model",
        enforce_eager=True,
        dtype=torch.float32,
        hf_config=SimpleNamespace(to_dict=lambda: config),
    )
    settings = SimpleNamespace(
        model_config=model,
        additional_config={},
        lora_config=None,
        compilation_config=SimpleNamespace(cudagraph_mm_encoder=True),
    )
    return models.__getattr__(architecture)(vllm_config=settings)


def named_as_in_vllm(folder: Path, record: Any) -> dict[str, Tensor]:
    """The tensors of tower and projector as vLLM's mapper names them."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if record.published_names and not tensor.isnan().any():
            found[name] = tensor
            continue
        short = name if record.tower.startswith("model.") else name.removeprefix("model.")
        if short.startswith(tuple(f"{path}." for path in (record.tower, *record.projectors))):
            found[short] = tensor
    return found


@pytest.mark.parametrize(("architecture", "kind", "make"), CASES)
def test_batches_of_vllm_become_the_tokens_of_the_loaded_encoder(
    models: Any, tmp_path: Path, architecture: str, kind: str, make: Any
) -> None:
    write_seeded_checkpoint(tmp_path, kind, width=64, dtype=torch.float32, shards=1)
    model = build(models, architecture, json.loads((tmp_path / "config.json").read_text()))
    weights = named_as_in_vllm(tmp_path, MODELS[architecture])
    assert model.load_weights(weights.items()) >= {name for name, _ in model.named_parameters()}
    loaded = load_encoder(tmp_path)
    encoder: Any = loaded.paths["image"] if isinstance(loaded, PathsEncoder) else loaded
    if architecture.startswith("Ernie"):  # vLLM takes the epsilon of the language model
        for block in encoder.blocks:
            block.norm1.eps = block.norm2.eps = 1e-5
    rows, found, counts, batch = make(encoder)
    wanted = encoder(rows, found).pooler_output
    process = model._process_media_input if make is chunks else model._process_image_input
    items = process({"type": "pixel_values", **batch})
    assert len(items) == len(counts)
    torch.testing.assert_close(torch.cat(items), wanted, rtol=1e-4, atol=1e-5)
    tokens = iter(encoder.item_specs(found))
    assert [len(item) for item in items] == [
        sum(next(tokens).output_tokens for _ in range(count)) for count in counts
    ]
    assert model._process_image_input({"type": "image_embeds"}) == "theirs"


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl"),
        ("MiniMaxM3SparseForConditionalGeneration", "minimax_m3"),
    ],
)
def test_clips_are_read_by_names_of_their_own(
    models: Any, tmp_path: Path, architecture: str, kind: str
) -> None:
    write_seeded_checkpoint(tmp_path, kind, width=64, dtype=torch.float32, shards=1)
    model = build(models, architecture, json.loads((tmp_path / "config.json").read_text()))
    model.load_weights(named_as_in_vllm(tmp_path, model.record).items())
    encoder, grid = model.our_tower.encoder, (4, 2, 4)
    rows = draw(32, encoder.config.patch_dim)
    video = {"pixel_values_videos": rows, "video_grid_thw": torch.tensor([grid])}
    (clip,) = model._process_video_input(video)
    torch.testing.assert_close(clip, encoder(rows, [grid]).pooler_output, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # views have the published sizes
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("StepVLForConditionalGeneration", "step3_vl"), ("Step3VLForConditionalGeneration", "step3")],
)
def test_tokens_of_tiles_come_before_those_of_the_whole_image(
    models: Any, tmp_path: Path, architecture: str, kind: str
) -> None:
    write_seeded_checkpoint(tmp_path, kind, width=96, dtype=torch.float32, shards=1)
    model = build(models, architecture, json.loads((tmp_path / "config.json").read_text()))
    model.load_weights(named_as_in_vllm(tmp_path, model.record).items())
    encoder = load_encoder(tmp_path)
    whole, parts = draw(2, 3, 728, 728), draw(2, 3, 504, 504)
    images = encoder.paths["image"](whole, [(1, 52, 52)] * 2).pooler_output.chunk(2)
    tiles = encoder.paths["tiles"](parts, [(2, 36, 36)]).pooler_output
    batch = {"type": "pixel_values", "pixel_values": whole, "patch_pixel_values": parts}
    found = model._process_image_input({**batch, "num_patches": torch.tensor([2, 0])})
    for tokens, wanted in zip(found, (torch.cat((tiles, images[0])), images[1]), strict=True):
        torch.testing.assert_close(tokens, wanted, rtol=1e-4, atol=1e-5)
    alone = {**batch, "patch_pixel_values": parts[:0], "num_patches": torch.tensor([0, 0])}
    torch.testing.assert_close(model._process_image_input(alone)[0], images[0])
    assert model._process_image_input({"type": "image_embeds"}) == "theirs"


def test_crops_of_deepseek_ocr_2_come_before_whole_image_and_separator(
    models: Any, tmp_path: Path
) -> None:
    write_seeded_checkpoint(tmp_path, "deepseek_ocr2", width=64, dtype=torch.float32, shards=1)
    config = json.loads((tmp_path / "config.json").read_text())
    model = build(models, "DeepseekOCR2ForCausalLM", config)
    weights = named_as_in_vllm(tmp_path, model.record)
    assert model.load_weights(weights.items()) >= {name for name, _ in model.named_parameters()}
    encoder: Any = load_encoder(tmp_path)
    whole, parts = draw(2, 3, 256, 256), draw(2, 3, 192, 192)
    images = encoder.paths["image"](whole, [(1, 16, 16)] * 2).pooler_output.chunk(2)
    tiles = encoder.paths["tiles"](parts, [(2, 12, 12)]).pooler_output
    batch = {"type": "pixel_values", "data": whole, "images_crop": parts}
    crops = torch.tensor([[1, 1], [2, 1]])
    found = model._process_image_input({**batch, "images_spatial_crop": crops})
    end = encoder.view_seperator[None]
    wanted = (torch.cat((images[0], end)), torch.cat((tiles, images[1], end)))
    for tokens, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-5)


def test_requests_choose_the_mode_of_minicpm_v(models: Any, tmp_path: Path) -> None:
    write_seeded_checkpoint(tmp_path, "minicpm_v", width=64, dtype=torch.float32, shards=1)
    config = json.loads((tmp_path / "config.json").read_text())
    model = build(models, "MiniCPMV4_6ForConditionalGeneration", config)
    model.load_weights(named_as_in_vllm(tmp_path, model.record).items())
    encoder = load_encoder(tmp_path).paths["image"]
    found, side = [(1, 4, 8), (1, 8, 4), (1, 4, 4)], 14
    parts = [draw(3, side, h * w * side) for _, h, w in found]
    batch = {"pixel_values": parts, "tgt_sizes": torch.tensor(found)[:, 1:]}
    batch |= {"type": "pixel_values", "num_slices": torch.tensor([2, 1])}
    rows = torch.cat([x.unflatten(2, (-1, side)).permute(2, 0, 1, 3).flatten(1) for x in parts])
    wanted = encoder(rows, found).pooler_output
    for flags in (None, [torch.tensor([1]), torch.tensor([1])]):
        items = model._process_vision_input(batch, flags)
        assert [len(item) for item in items] == [4, 1]
        torch.testing.assert_close(torch.cat(items), wanted, rtol=1e-4, atol=1e-5)
    items = model._process_vision_input(batch, torch.tensor([True, False]))
    assert [len(item) for item in items] == [4, 4]
    torch.testing.assert_close(items[0], wanted[:4], rtol=1e-4, atol=1e-5)
    assert model._process_vision_input({"type": "image_embeds"}) == "theirs"


def test_frames_of_a_clip_of_gemma_4_are_one_item(models: Any, tmp_path: Path) -> None:
    write_seeded_checkpoint(tmp_path, "gemma4", width=64, dtype=torch.float32, shards=1)
    config = json.loads((tmp_path / "config.json").read_text())
    model = build(models, "Gemma4ForConditionalGeneration", config)
    weights = named_as_in_vllm(tmp_path, model.record)
    model.load_weights(weights.items())
    encoder = load_encoder(tmp_path)
    rows, found, _, batch = positions(encoder)
    video = {f"{name}_videos": tensor for name, tensor in batch.items()}
    (clip,) = model._process_video_input({**video, "video_frame_counts": torch.tensor([2])})
    torch.testing.assert_close(clip, encoder(rows, found).pooler_output, rtol=1e-4, atol=1e-5)


def test_images_and_clips_of_nemotron_are_rows_of_one_tower(models: Any, tmp_path: Path) -> None:
    write_seeded_checkpoint(tmp_path, "nemotron", width=64, dtype=torch.float32, shards=1)
    config = json.loads((tmp_path / "config.json").read_text())
    made = models.__getattr__("NemotronH_Nano_Omni_Reasoning_V3")
    made.patch_size, made.video_temporal_patch_size = 16, 2
    model, encoder = build(models, made.__name__, config), load_encoder(tmp_path)
    assert model.load_weights(named_as_in_vllm(tmp_path, model.record).items()) is not None
    rows = draw(1, 48, 768)
    found = model.extract_feature_dynamic(rows, [(64, 96), (96, 64)])
    wanted = encoder(F.pad(rows[0], (0, 1536)), [(1, 4, 6), (1, 6, 4)]).pooler_output
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    pixels = draw(3, 3, 64, 96)
    cells = rearrange(pixels, "b c (h p) (w q) -> b (h w) (c p q)", p=16, q=16)
    wanted = encoder(F.pad(cells.flatten(0, 1), (0, 1536)), [(1, 4, 6)] * 3).pooler_output
    found = model.extract_feature(pixels).flatten(0, 1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    pairs = torch.cat((cells[[0, 2]], cells[[1, 2]]), dim=-1)  # the last frame twice
    wanted = encoder(F.pad(pairs.flatten(0, 1), (768, 0)), [(1, 4, 6)] * 2).pooler_output
    found = model.extract_feature(pixels, num_frames=3).flatten(0, 1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_images_of_deepseek_v4_are_encoded_in_one_batch(models: Any, tmp_path: Path) -> None:
    """vLLM gives V4.1's config without sections, like V4's, which has one more tensor."""
    write_seeded_checkpoint(tmp_path, "deepseek_v4", width=64, dtype=torch.float32, shards=1)
    config = json.loads((tmp_path / "config.json").read_text())
    vision = config.pop("vision_config")
    config |= {"hidden_size": config.pop("text_config")["hidden_size"]}
    config |= {"vision_n_layers": vision["num_hidden_layers"], "vision_dim": 64}
    config |= {"vision_n_heads": vision["num_attention_heads"]}
    config |= {"vision_inter_dim": vision["intermediate_size"]}
    model = build(models, "DeepseekV41ForCausalLM", config)
    model.load_weights(named_as_in_vllm(tmp_path, model.record).items())
    encoder: Any = load_encoder(tmp_path)
    rows, found, order = draw(34, 588), [(1, 4, 7), (1, 2, 3)], torch.tensor([5, 4, 3, 2, 1, 0, 0])
    batch = {"patches": rows.view(-1, 3, 14, 14), "vit_grid": torch.tensor([[4, 7], [2, 3]])}
    batch |= {"llm_grid": torch.tensor([[2, 3], [1, 1]]), "perm": order}
    first, second = encoder(rows, found).pooler_output.split([6, 1])
    items = model.embed_multimodal(**batch)
    torch.testing.assert_close(items[0], first.flip(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(items[1], second, rtol=1e-4, atol=1e-5)
    model._build_image_span = lambda tokens, types: (tokens, types)
    del batch["perm"]
    spans = model.embed_multimodal(**batch, types=torch.arange(14))
    assert [len(types) for _, types in spans] == [10, 4]
    torch.testing.assert_close(torch.cat([x for x, _ in spans]), torch.cat((first, second)))


def test_norms_of_blocks_follow_vllm_where_it_does_not_follow_the_config(
    models: Any, tmp_path: Path
) -> None:
    """For GLM-5.3-Flash, vLLM says that the tower was trained with another epsilon."""
    write_seeded_checkpoint(tmp_path, "glm5_next", width=64, dtype=torch.float32, shards=1)
    config = json.loads((tmp_path / "config.json").read_text())
    model = build(models, "Glm5NextForConditionalGeneration", config)
    (block, *_), last = model.our_tower.encoder.blocks, model.our_tower.encoder.post_layernorm
    found = [block.norm1.eps, block.norm2.eps, block.attn.q_norm.eps, last.eps]
    assert found == [1e-6, 1e-6, 1e-5, 1e-5]


@pytest.mark.parametrize("architecture", MODELS)
def test_every_record_names_a_tower_that_reads_its_batches(models: Any, architecture: str) -> None:
    made = models.__getattr__(architecture)
    record = MODELS[architecture]
    reads = {"extract_feature"} if record.module == "internvl" else set()
    readers = models.ReadsInputs, models.ReadsViews, models.ReadsSlices
    assert issubclass(made, readers) == bool(record.reader)
    assert reads <= vars(models.InternVL).keys()
    assert made.__name__ == architecture
    assert record.takes in TOWERS
    processor = made._processor_factory.processor
    assert issubclass(processor, raw_processor.RawProcessor) == record.sends_images
    assert made is getattr(models, architecture)


@pytest.mark.parametrize(
    ("architecture", "kind", "name"),
    [
        (
            "Gemma3ForConditionalGeneration",
            "gemma3",
            "multi_modal_projector.mm_soft_emb_norm.weight",
        ),
        ("KimiK25ForConditionalGeneration", "kimi_k25", "mm_projector.proj.2.bias"),
    ],
)
def test_a_projector_that_the_checkpoint_lacks_is_named(
    models: Any, tmp_path: Path, architecture: str, kind: str, name: str
) -> None:
    write_seeded_checkpoint(tmp_path, kind, width=64, dtype=torch.float32, shards=1)
    model = build(models, architecture, json.loads((tmp_path / "config.json").read_text()))
    weights = named_as_in_vllm(tmp_path, model.record)
    del weights[name]
    with pytest.raises(ValueError, match=re.escape(name)):
        model.load_weights(weights.items())


def test_a_class_without_a_record_is_no_attribute(models: Any) -> None:
    with pytest.raises(AttributeError, match="OtherModel"):
        models.__getattr__("OtherModel")
