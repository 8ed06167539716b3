"""An encoder with the call, the attributes and the loading of a vision tower of vLLM.

vLLM is not imported here. Source: vLLM 0.33.0, ``model_executor/models``: the class
``Qwen3_VisionTransformer`` of ``qwen3_vl.py``, ``AutoWeightsLoader`` of ``utils.py``, and
``InternVLChatModel.extract_feature`` of ``internvl.py``.

Shapes: P patches, N tokens, L DeepStack layers, D width of the language model, B tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from encoders import Qwen3VLEncoder
from encoders.base.patch_encoder import PatchEncoder
from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import GridLike, PartialOutput
from graphwrap import GraphedEncoder
from weights import Family
from weights.families import build_config
from weights.layouts import Layout, Slot
from weights.match import STORED_DTYPES
from weights.tensor_file import JsonObject

from .inputs import Packed, tokens_per_item
from .options import Options

VLLM_LAYOUTS = (
    *("qwen", "internvl", "glm4v", "glm_ocr", "gemma3", "pixtral", "idefics3", "kimi-vl"),
    *("paddleocr-vl", "gemma4"),
)
"""The layouts of the checkpoints that vLLM's own classes read."""
LISTED = 20
"""The most tensor names that an error lists."""


def build_encoder(family: Family, config: JsonObject, name: str) -> VisionEncoder:
    """Build the encoder of a model's config on the meta device.

    Args:
        family: record of the tower's family.
        config: the whole config of the model.
        name: name of the model in errors.

    Raises:
        ValueError: sizes or values that the encoder of the family does not have.
    """
    encoder = cast(VisionEncoder, family.on_meta(build_config(family, config, None, name)))
    return encoder.eval().requires_grad_(False)


class Tower(nn.Module):
    """A tower over packed patches or tiles: rows to tokens, DeepStack layers side by side.

    Args:
        encoder: the encoder that :func:`build_encoder` returns, with memory for its weights.
        family: record of its family, which knows the names of published tensors.
        options: the settings of :class:`GraphedEncoder`.
        enforce_eager: vLLM's option of this name, which rules graphs out.
        input_norm: the module of vLLM that turns uint8 pixels into normalised ones, or None.

    Attributes:
        spatial_merge_size: patches per side of one token.
        out_hidden_size: (1 + L) * D.
        deepstack_visual_indexes: the blocks that feed DeepStack layers.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        family: Family,
        options: Options,
        *,
        enforce_eager: bool = False,
        input_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.input_norm = input_norm
        self._family, self._options = family, options
        self._layouts = [one for one in family.layouts if not (one.refused or one.rotary_halves)]
        self._backend = options.backend_for(enforce_eager=enforce_eager)
        self._graphed: GraphedEncoder | None = None
        self._reserved: Tensor | None = None
        self._filled: dict[str, set[int]] = {}
        """Per parameter name, the chunks of it that no tensor has filled yet."""
        deepstack = (
            encoder.config.deepstack_visual_indexes if isinstance(encoder, Qwen3VLEncoder) else ()
        )
        self.deepstack_visual_indexes = deepstack
        self.out_hidden_size = encoder.out_features * (1 + len(deepstack))
        self.spatial_merge_size = (
            encoder.config.spatial_merge_size if isinstance(encoder, PatchEncoder) else 2
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.encoder.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.encoder.parameters()).device

    def forward(self, x: Tensor, grid_thw: GridLike, *, encoder_metadata: object = None) -> Tensor:
        """Encode packed patches, or tiles with a grid each.

        Args:
            x: [P, patch_dim] or tiles; of type uint8 if vLLM normalises pixels on the device.
            grid_thw: [items, 3], on the host.
            encoder_metadata: not read, because vLLM passes it for its own graphs alone.

        Returns:
            [N, (1 + L) * D], a tensor of the caller's own.
        """
        if self.input_norm is not None:
            x = self.input_norm(x.to(self.device, non_blocking=True), self.dtype)
        output = self._encode(x, grid_thw)
        assert output.pooler_output is not None
        if not output.deepstack_features:
            return output.pooler_output.clone()
        return torch.cat((output.pooler_output, *output.deepstack_features), dim=1)

    def encode_items(self, packed: Packed) -> list[Tensor]:
        """Encode a batch to a view [tokens, D] per item of one tensor, which the caller owns."""
        tokens = self(packed.pixel_values, packed.grids)
        return list(tokens.split(tokens_per_item(packed, self.encoder)))

    @property
    def captured(self) -> bool:
        """Whether :meth:`capture` has been called."""
        return self._graphed is not None

    def _encode(self, pixels: Tensor, grid: GridLike) -> PartialOutput:
        """Encode inputs; the results are views that the next call overwrites."""
        return (self._graphed or self.capture())(pixels, grid)

    def capture(self, *, first: bool = True, wait: Callable[[], object] = bool) -> GraphedEncoder:
        """Capture the graphs, or make what runs without any; does nothing if that is done.

        Args:
            first: whether this process measures the table of times that the options name, if there
                is none; the others read it.
            wait: returns once every process of the engine has called it.
        """
        if self._graphed is not None:
            return self._graphed
        settings = asdict(self._options)
        table = settings.pop("table")
        settings["backend"] = self._backend
        with torch.inference_mode(mode=False), torch.no_grad():
            graphed = GraphedEncoder(self.encoder, clone=False, **settings)
            if table is None or graphed.backend != "cudagraph":
                self._graphed = graphed.capture(progress=False)
                return graphed
            if first and not Path(table).exists():
                graphed.capture(progress=False).save_table(table)
                wait()
            else:
                wait()
                graphed.load_table(table)
                graphed.capture(progress=False)
        self._graphed = graphed
        return graphed

    def reserve(self) -> None:
        """Hold as much memory as the pool of the graphs has, until :meth:`free_reserve`.

        A memory profile that counts what is allocated does not see the pool, which is reserved.
        """
        held = self.capture().stats().pool_bytes
        self._reserved = torch.empty(held, dtype=torch.uint8, device=self.device)

    def free_reserve(self) -> None:
        """Free the memory that :meth:`reserve` holds."""
        self._reserved = None

    def describe(self) -> str:
        """Return one line that says which tower runs, with which kernels."""
        graphed = self.capture()
        stats = graphed.stats()
        what = f"{type(self.encoder).__name__}, backend {graphed.backend}"
        if not stats.budgets:
            return f"{what}, kernels {self._options.kernels}{stats.note and f' ({stats.note})'}"
        kernels = ", ".join(sorted({budget.kernel for budget in stats.budgets}))
        most = max(budget.tokens for budget in stats.budgets)
        return (
            f"{what}, {len(stats.budgets)} budgets up to {most} tokens, kernels "
            f"{kernels}, pool {stats.pool_bytes / 2**20:.0f} MiB, {stats.capture_seconds:.1f} s"
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill parameters from tensors under their published names, without the tower's prefix.

        vLLM calls this for each run of the tower's tensors in the files of a checkpoint, so that
        :meth:`check_filled` has to tell in the end which are missing.

        Returns:
            Names of the filled parameters.

        Raises:
            ValueError: tensors whose name, shape or dtype does not fit, all of them.
        """
        tensors = self.encoder.state_dict()
        filled: set[str] = set()
        problems: list[str] = []
        for name, tensor in weights:
            if any(layout.is_ignored(name) for layout in self._layouts):
                continue
            found = self._slot_of(name, tensors)
            if found is None:
                problems.append(f"{name}: the tower has no such tensor")
                continue
            layout, slot = found
            rows = tensors[slot.name]
            if slot.chunks > 1:
                rows = rows.chunk(slot.chunks)[slot.chunk]
            shape = layout.published_shape(slot.name, tuple(rows.shape))
            if tensor.dtype not in STORED_DTYPES.values():
                problems.append(f"{name}: is of {tensor.dtype}, which is quantised")
            elif tensor.shape != shape:
                problems.append(f"{name}: is {[*tensor.shape]}, the config makes {[*shape]}")
            else:
                rows.copy_(tensor.reshape(rows.shape))
                self._filled.setdefault(slot.name, {*range(slot.chunks)}).discard(slot.chunk)
                filled.add(f"encoder.{slot.name}")
        if problems:
            raise ValueError(_listed("tensors that do not fit", problems))
        return filled

    def _slot_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[Layout, Slot] | None:
        """Return where a published tensor belongs, None if it is none of the encoder's."""
        for local in (name, name.removeprefix("vision_model.")):  # the tower of Gemma 3 has both
            for layout in self._layouts:
                slot = layout.to_ours(local)
                if slot is not None and slot.name in tensors:
                    return layout, slot
        return None

    def check_filled(self) -> None:
        """Check that :meth:`load_weights` has filled every parameter.

        Raises:
            ValueError: the names of tensors that the checkpoint lacks.
        """
        layout = next(one for one in self._family.layouts if one.name in VLLM_LAYOUTS)
        names = [name for name in self.encoder.state_dict() if self._filled.get(name, {0})]
        if names:
            missing = [part for name in names for part in layout.to_published(name)]
            raise ValueError(_listed("no tensors for", missing))


class TileTower(Tower):
    """The tower of InternVL, which encodes tiles to projected tokens."""

    def forward(self, pixel_values: Tensor) -> Tensor:  # type: ignore[override]  # tiles
        """Encode tiles.

        Args:
            pixel_values: [B, 3, side, side].

        Returns:
            [B, N / B, D], a tensor of the caller's own.
        """
        tiles = pixel_values.shape[0]
        grid = [self.encoder.grid_for(1)] * tiles
        tokens = self._encode(pixel_values, grid).pooler_output
        assert tokens is not None
        return tokens.unflatten(0, (tiles, -1)).clone()


def _listed(what: str, names: Sequence[str]) -> str:
    more = f"\n  and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return (
        f"vitgraph: the checkpoint has {what} ({len(names)}):\n  "
        + "\n  ".join(names[:LISTED])
        + f"{more}\nUse the config.json and weights of one repo, or unset VITGRAPH_VLLM."
    )
