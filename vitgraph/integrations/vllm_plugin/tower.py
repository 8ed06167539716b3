"""An encoder with the ``forward``, attributes and ``load_weights`` of a vision tower of vLLM.

vLLM is not imported here. Source: vLLM 0.33.0, ``model_executor/models``: the class
``Qwen3_VisionTransformer`` of ``qwen3_vl.py``, ``AutoWeightsLoader`` of ``utils.py``, and
``InternVLChatModel.extract_feature`` of ``internvl.py``.

Shapes: P patches, N tokens, L DeepStack layers, D width of the language model, B tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

import torch
from einops import rearrange
from torch import Tensor, nn

from encoders import (
    LlavaNextEncoder,
    LlavaOnevisionEncoder,
    Molmo2Encoder,
    PatchEncoder,
    PathsEncoder,
    Qwen3VLEncoder,
    VisionEncoder,
    VisionInputs,
)
from encoders.contract import GridLike, PartialOutput
from encoders.stored_tensors import STORED_DTYPES
from graphwrap import GraphedEncoder
from weights import Family, JsonObject, Layout, Slot, build_config

from .inputs import Packed, tokens_per_item
from .options import PluginOptions

VLLM_LAYOUTS = (
    *("qwen", "internvl", "glm4v", "glm_ocr", "gemma3", "pixtral", "idefics3", "kimi-vl"),
    *("paddleocr-vl", "gemma4", "kimi-k25", "kimi-k3", "lfm2-vl", "ernie", "llama4", "minimax-m3"),
    *("step3", "step3-vl", "dots-ocr", "deepseek-ocr2", "minicpm-v", "llava_onevision"),
    *("llava_next", "paligemma", "molmo2", "deepseek-v4", "nemotron"),
)
"""The layouts (tensor namings) of checkpoints that vLLM's own model classes can read."""
LISTED = 20
"""The most tensor names that an error message lists."""


def build_encoder(family: Family, config: JsonObject, name: str) -> VisionEncoder | PathsEncoder:
    """Build the encoder for a model's config on the meta device.

    Args:
        family: record of the tower's family.
        config: the whole ``config.json`` of the model.
        name: name of the model in errors.

    Raises:
        ValueError: the family's encoder does not support a size or value in the config.
    """
    encoder = family.on_meta(build_config(family, config, None, name))
    assert isinstance(encoder, VisionEncoder | PathsEncoder)
    if isinstance(encoder, PathsEncoder):
        path = encoder.paths["image"]
        # Of LFM2-VL, this path takes images and tiles of any size; of LLaVA, vLLM joins the tiles.
        if isinstance(path, PatchEncoder) or isinstance(
            encoder, LlavaNextEncoder | LlavaOnevisionEncoder
        ):
            encoder = path
    return encoder.eval().requires_grad_(False)


class Tower(nn.Module):
    """An encoder with the interface of vLLM's vision towers; subclasses define ``forward``.

    Args:
        encoder: an encoder made by :func:`build_encoder`, moved to a device.
        family: record of the encoder's family, which has the names of published tensors.
        options: the settings of :class:`GraphedEncoder`.
        enforce_eager: vLLM's option of this name, which excludes CUDA graphs.
        input_norm: the module of vLLM that normalises uint8 pixels; None if vLLM passes normalised
            pixels.

    Attributes:
        spatial_merge_size: patches per side of one token.
        out_hidden_size: (1 + L) * D.
        deepstack_visual_indexes: the blocks that feed DeepStack layers.
    """

    def __init__(
        self,
        encoder: VisionEncoder | PathsEncoder,
        family: Family,
        options: PluginOptions,
        *,
        enforce_eager: bool = False,
        input_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.input_norm = input_norm
        self._options = options
        self._layouts = [
            layout for layout in family.layouts if not (layout.refusal or layout.rotary_halves)
        ]
        self._layout = next(layout for layout in family.layouts if layout.name in VLLM_LAYOUTS)
        """The layout whose tensor names error messages use."""
        self._backend = options.backend_for(enforce_eager=enforce_eager)
        self._graphed: GraphedEncoder | None = None
        self._reserved: Tensor | None = None
        self._filled: dict[str, set[int]] = {}
        """Name of a parameter -> the numbers of its chunks that no tensor has filled yet."""
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

    @property
    def graphable(self) -> VisionEncoder | PathsEncoder:
        """The part of the encoder that runs as graphs."""
        return self.encoder

    @property
    def single(self) -> VisionEncoder:
        """The encoder, asserted to have a single input path (not "image" and "tiles")."""
        assert isinstance(self.encoder, VisionEncoder)
        return self.encoder

    def encode_items(self, packed: Packed) -> list[Tensor]:
        """Encode images or clips to a tensor [tokens, D] each, not overwritten by later calls."""
        tokens = self(packed.pixel_values, packed.grids)
        return list(tokens.split(tokens_per_item(packed, self.single)))

    def encode_views(self, inputs: VisionInputs) -> list[Tensor]:
        """Encode whole images and tiles to one tensor [tokens, D] per image; later calls do not
        overwrite it."""
        outputs = (self._graphed or self.capture())(inputs)
        return [rows.clone() for output in outputs if (rows := output.pooler_output) is not None]

    @property
    def captured(self) -> bool:
        """Whether :meth:`capture` has finished."""
        return self._graphed is not None

    def _encode(self, pixels: Tensor, grid: GridLike) -> PartialOutput:
        """Encode packed patches, or tiles with a grid each; the next call overwrites the output."""
        return (self._graphed or self.capture())(pixels, grid)

    def capture(self, *, first: bool = True, wait: Callable[[], object] = bool) -> GraphedEncoder:
        """Capture the graphs, or prepare the backend without graphs, unless that is done already.

        Args:
            first: whether this process measures the times of graphs, if none are kept yet; the
                other processes read what it has kept.
            wait: a barrier: returns once every process of the engine has called it.

        Returns:
            The encoder with its graphs.
        """
        if self._graphed is not None:
            return self._graphed
        settings = {**asdict(self._options), "backend": self._backend}
        del settings["raw_images"]
        with torch.inference_mode(mode=False), torch.no_grad():
            graphed = GraphedEncoder(self.graphable, clone=False, **settings)
            waits = graphed.table is not None and graphed.backend == "cudagraph"
            if waits and not first:
                wait()
            graphed.capture(progress=False)
            if waits and first:
                wait()
        self._graphed = graphed
        return graphed

    def reserve(self) -> None:
        """Allocate as many bytes as the graphs' memory pool has, until :meth:`free_reserve`.

        The memory profile of older versions of vLLM counts only allocated bytes, and the pool of
        captured graphs is reserved but not allocated.
        """
        pool_bytes = self.capture().stats().pool_bytes
        self._reserved = torch.empty(pool_bytes, dtype=torch.uint8, device=self.device)

    def free_reserve(self) -> None:
        """Free the memory that :meth:`reserve` allocated."""
        self._reserved = None

    def describe(self) -> str:
        """Return one line for the log: the encoder, its backend, its budgets (token counts of the
        graphs) and its attention kernels."""
        graphed = self.capture()
        stats = graphed.stats()
        head = f"{type(self.encoder).__name__}, backend {graphed.backend}"
        if not stats.budgets:
            return f"{head}, kernels {self._options.kernels}{stats.note and f' ({stats.note})'}"
        kernels = ", ".join(sorted({budget.kernel for budget in stats.budgets}))
        largest = max(budget.tokens for budget in stats.budgets)
        return (
            f"{head}, {len(stats.budgets)} budgets up to {largest} tokens, kernels "
            f"{kernels}, pool {stats.pool_bytes / 2**20:.0f} MiB, {stats.capture_seconds:.1f} s"
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill parameters from tensors under their published names, without the tower's prefix.

        vLLM calls this several times, once per group of the tower's tensors in the files of a
        checkpoint, so only :meth:`check_filled` can tell which tensors are missing.

        Returns:
            Names of the filled parameters.

        Raises:
            ValueError: tensors whose name, shape or dtype does not fit; the message lists them.
        """
        tensors = self.encoder.state_dict()
        filled: set[str] = set()
        problems: list[str] = []
        for name, tensor in weights:
            if any(layout.is_ignored(name) for layout in self._layouts):
                continue
            layout_and_slot = self._slot_of(name, tensors)
            if layout_and_slot is None:
                problems.append(f"{name}: the tower has no such tensor")
                continue
            layout, slot = layout_and_slot
            if name.startswith(layout.projector):  # projector names tell a family's layouts apart
                self._layout = layout
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
            raise ValueError(_name_list("tensors that do not fit", problems))
        return filled

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Fill parameters from a whole checkpoint, and yield the tensors outside the tower.

        Args:
            weights: published names of tensors, with their prefixes, and the tensors.

        Raises:
            ValueError: a tensor of the tower whose name, shape or dtype does not fit.
        """
        for name, tensor in weights:
            local = self._local_name(name)
            if local is None:
                yield name, tensor
            else:
                self.load_weights([(local, tensor)])

    def _local_name(self, name: str) -> str | None:
        """Return a published name without the prefix of tower or projector; None for tensors of
        other parts of the model.
        """
        for layout in self._layouts:
            for prefix in filter(lambda prefix: prefix.full, layout.prefixes):
                local = layout.local_name(prefix, name)
                if local is not None:
                    return local
        return None

    def _slot_of(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[Layout, Slot] | None:
        """Return the layout of a published tensor and its place in the encoder; None if it has no
        place there.
        """
        for local in (name, name.removeprefix("vision_model.")):  # Gemma 3 may have this prefix
            for layout in self._layouts:
                slot = layout.to_slot(local)
                if slot is not None and slot.name in tensors:
                    return layout, slot
        return None

    def check_filled(self) -> None:
        """Check that :meth:`load_weights` has filled every parameter.

        Raises:
            ValueError: tensors are missing; the message lists them by their published names.
        """
        names = [name for name in self.encoder.state_dict() if self._filled.get(name, {0})]
        if names:
            missing = [part for name in names for part in self._layout.published_names(name)]
            raise ValueError(_name_list("no tensors for", missing))


class PackedTower(Tower):
    """An encoder that vLLM calls with pixels and grids; DeepStack features widen the output."""

    def forward(self, x: Tensor, grid_thw: GridLike, *, encoder_metadata: object = None) -> Tensor:
        """Encode packed patches, or tiles with a grid each.

        Args:
            x: P patches, [P, patch_dim], or tiles [B, 3, h, w]; uint8 if vLLM normalises pixels on
                the device.
            grid_thw: [items, 3], (t, h, w) in patches, on the host.
            encoder_metadata: not read; vLLM passes it for its own graphs.

        Returns:
            N tokens and their L DeepStack features, joined to [N, (1 + L) * D]: a new tensor, which
            later calls do not overwrite.
        """
        if self.input_norm is not None:
            x = self.input_norm(x.to(self.device, non_blocking=True), self.dtype)
        output = self._encode(x, grid_thw)
        assert output.pooler_output is not None
        if not output.deepstack_features:
            return output.pooler_output.clone()
        return torch.cat((output.pooler_output, *output.deepstack_features), dim=1)


class TileTower(Tower):
    """An encoder that vLLM calls with tiles of one size and without a grid."""

    def forward(
        self,
        pixel_values: Tensor,
        *,
        select_layers: object = None,
        feature_select_strategy: object = None,
    ) -> Tensor:
        """Encode B tiles to projected tokens.

        Args:
            pixel_values: [B, 3, side, side].
            select_layers: not read; the encoder has it from the config.
            feature_select_strategy: not read either.

        Returns:
            [B, tokens per tile, width of the language model], which later calls do not overwrite.
        """
        tiles = pixel_values.shape[0]
        grid = [self.single.grid_for(1)] * tiles
        tokens = self._encode(pixel_values, grid).pooler_output
        assert tokens is not None
        return torch.unflatten(tokens, 0, (tiles, -1)).clone()


class WindowTower(Tower):
    """The encoder of Molmo2, which vLLM calls with views or frames and the patches of each token.

    The views run as graphs, the pooling of patches and the projector do not.
    """

    @property
    def graphable(self) -> VisionEncoder:
        """The tower without pooling and projector."""
        return self._whole.paths["image"]

    @property
    def _whole(self) -> Molmo2Encoder:
        assert isinstance(self.encoder, Molmo2Encoder)
        return self.encoder

    def forward(self, images: Tensor, token_pooling: Tensor) -> Tensor:
        """Encode B views of n patches each to N tokens.

        Args:
            images: [1, B, n, p*p*3], patches line by line.
            token_pooling: [1, N, patches of a token], the numbers of patches from 0 to B*n; -1
                stands for none.

        Returns:
            [N, width of the language model], without the tokens that have no patch.
        """
        side, patch = self._whole.config.side, self._whole.config.patch_size
        pattern = "b (h w) (p q c) -> b c (h p) (w q)"
        views = rearrange(images[0], pattern, h=side, w=side, p=patch, q=patch)
        rows = self._encode(views, [(1, side, side)] * len(views)).pooler_output
        assert rows is not None
        windows = token_pooling[0].to(rows.device)
        windows = windows[(windows >= 0).any(-1)]
        pooled = self._whole.pool(rows[windows.clamp(min=0)], windows >= 0)
        tokens: Tensor = self._whole.projector(pooled)
        return tokens


TOWERS: Mapping[str, type[Tower]] = {
    "patches": PackedTower,
    "tiles": TileTower,
    "windows": WindowTower,
}
"""Value of ``Record.takes`` -> the class of the tower."""


def _name_list(problem: str, names: Sequence[str]) -> str:
    rest_line = f"\n  and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return (
        f"vitgraph: the checkpoint has {problem} ({len(names)}):\n  "
        + "\n  ".join(names[:LISTED])
        + f"{rest_line}\nUse the config.json and weights of one repo, or unset VITGRAPH_VLLM."
    )
