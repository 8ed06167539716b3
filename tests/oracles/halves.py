"""The error of half precision, ours and the reference's, against the reference in float64.

Weights and pixels are rounded to the half dtype first and then widened, so that all three runs
encode the same numbers. An error is a relative L2; pooled, it is that of all grids' rows together.
The only references of Step3 and DeepSeek-VL2 run in float64 on the CPU, and other tests compare
ours with them: here, our own forward in half precision and in float64 stand for the reference's.
"""

from __future__ import annotations

import copy
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput
from graphwrap.encoder_forms import FormKernels

from .configs import Config, edited, vision_of
from .drawn import build_pair, draw_pixels, fields_of, in_tokens_of
from .family import Family, Grids
from .lift import LiftFloat32
from .references.deepseek_vl2 import VL2Reference
from .references.step import Step3Reference

LARGE_QWEN: list[Grids] = [
    [[1, 64, 64]],
    [[1, 46, 90]],
    [[4, 32, 34]],
    [[1, 16, 16], [1, 34, 46], [1, 64, 38], [2, 20, 28]],
    [[8, 16, 16], [1, 60, 36]],
]
LARGE_TILES: list[Grids] = [[[4, 32, 32]], [[7, 32, 32]], [[3, 32, 32], [1, 32, 32], [5, 32, 32]]]
"""Grids that each make a thousand tokens or more."""


@dataclass
class Errors:
    """Squared errors and norms of one output field, one entry per grid."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def add(self, ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
        """Add the errors of one grid."""
        self.ours.append(float((ours.double() - truth).pow(2).sum()))
        self.theirs.append(float((theirs.double() - truth).pow(2).sum()))
        self.norms.append(float(truth.pow(2).sum()))

    @property
    def pooled(self) -> tuple[float, float]:
        """The relative L2 error over all grids: ours, then the reference's."""
        total = sum(self.norms)
        return (sum(self.ours) / total) ** 0.5, (sum(self.theirs) / total) ** 0.5

    @property
    def ratio(self) -> float:
        """Our pooled error divided by the reference's."""
        return self.pooled[0] / self.pooled[1]

    @property
    def worst_ratio(self) -> float:
        """The largest ratio of any single grid."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return max((ours / theirs) ** 0.5 for ours, theirs in pairs)


def six_blocks(family: Family) -> Config:
    """Return changes to six blocks of published widths, with every kind of block."""
    if family.six is not None:
        return family.six
    vision = vision_of(family.config)
    known = ("depth", "layers", "vt_num_hidden_layers")
    name = next((name for name in known if name in vision), "num_hidden_layers")
    changes: Config = {name: 6}
    if "deepstack_visual_indexes" in family.shallow:
        changes["deepstack_visual_indexes"] = [1, 3, 5]
    if "fullatt_block_indexes" in family.shallow:
        changes["fullatt_block_indexes"] = [2, 5]
    return changes


@contextmanager
def alone_on_the_gpu() -> Iterator[None]:
    """Let one process of all test processes of this user in, and free its unused memory after.

    In float64, torch's attention makes all scores of a sequence: Gemma 4's take 11 GB per copy.
    """
    with (Path(tempfile.gettempdir()) / f"vitgraph-float64-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file, or the end of the process, unlocks it
        torch.cuda.empty_cache()
        try:
            yield
        finally:
            torch.cuda.empty_cache()


@dataclass
class Trio:
    """Our tower and the reference in one dtype, and the reference in float64; equal weights.

    The reference in float64 is on the GPU only while it runs.
    """

    family: Family
    encoder: VisionEncoder
    reference: nn.Module
    truth: nn.Module

    @classmethod
    def on_gpu(cls, family: Family, dtype: torch.dtype) -> Trio:
        """Build six blocks of published widths, with weights rounded to ``dtype`` in all three."""
        lift = LiftFloat32()
        encoder, reference = build_pair(family, six_blocks(family), dtype, device="cuda")
        exact = copy.deepcopy(encoder).cpu().double()
        if isinstance(reference, Step3Reference | VL2Reference):
            return cls(family, encoder, encoder, exact)
        with no_init_weights(), lift:
            truth = family.reference(edited(family.config, **six_blocks(family)))
        for weight in truth.parameters():  # not the rotary buffer, which the lift keeps wide
            weight.data = weight.data.double()
        truth.load_state_dict(family.keys(exact.state_dict()), strict=True)
        return cls(family, encoder, reference, truth.eval().requires_grad_(False))

    def batches(self) -> Iterator[tuple[Tensor, Grids, EncoderOutput]]:
        """Yield the pixels and grids of every large batch, and the output of the float64 run."""
        dtype, calls = next(self.encoder.parameters()).dtype, LARGE_TILES
        if not self.family.tiled:
            calls = [in_tokens_of(self.encoder, grids) for grids in LARGE_QWEN]
        pixels = [
            draw_pixels(self.encoder, grids, seed=seed).to("cuda", dtype)
            for seed, grids in enumerate(calls)
        ]
        with alone_on_the_gpu():
            self.truth.cuda()
            with LiftFloat32():
                truths = [
                    self._output(self.truth, rows.double(), grids)
                    for rows, grids in zip(pixels, calls, strict=True)
                ]
            self.truth.cpu()
        yield from zip(pixels, calls, truths, strict=True)

    def run(
        self, pixels: Tensor, grids: Grids, forms: dict[str, VisionEncoder]
    ) -> tuple[dict[str, EncoderOutput], EncoderOutput]:
        """Return the outputs of our forms and of the reference for one batch."""
        ours = {name: form(pixels, grids) for name, form in forms.items()}
        return ours, self._output(self.reference, pixels, grids)

    def _output(self, module: nn.Module, pixels: Tensor, grids: Grids) -> EncoderOutput:
        if isinstance(module, VisionEncoder):
            return module(pixels, grids)
        return self.family.output(module, pixels, torch.tensor(grids, device="cuda"))

    def forms(self, kernels: Sequence[FormKernels]) -> dict[str, VisionEncoder]:
        """Return our encoder per kernel name; "reference" is the encoder itself."""
        return {
            name: self.encoder if name == "reference" else self.encoder.accelerated(name)
            for name in kernels
        }


def half_errors(
    family: Family, dtype: torch.dtype, kernels: Sequence[FormKernels] = ("reference",)
) -> dict[str, dict[str, Errors]]:
    """Return the errors of every output field over a tower's large grids, by kernels."""
    trio = Trio.on_gpu(family, dtype)
    forms = trio.forms(kernels)
    errors: dict[str, dict[str, Errors]] = {name: {} for name in forms}
    with torch.no_grad():
        for pixels, grids, truth in trio.batches():
            outputs, theirs = trio.run(pixels, grids, forms)
            for name, output in outputs.items():
                for field_name, value in fields_of(truth).items():
                    held = errors[name].setdefault(field_name, Errors())
                    mine, other = fields_of(output)[field_name], fields_of(theirs)[field_name]
                    held.add(mine, other, value)
    for name, form in forms.items():
        if form.accelerator is not None:
            assert form.accelerator.kernels_used != "reference", (name, form.kernel_choices())
    return errors
