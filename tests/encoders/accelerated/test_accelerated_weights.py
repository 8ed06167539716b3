"""Accelerated encoders follow the weights of their encoder: copied, loaded, cast and written."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from graphwrap import GraphedEncoder
from tests.oracles import (
    BY_NAME,
    KINDS,
    ONE_FAST,
    add_noise,
    build_encoder,
    distances,
    draw_pixels,
    slow,
)
from tests.support.accelerated.cases import (
    CLOSE,
    FEW_ROWS,
    OURS,
    assert_close,
    assert_fused,
    fresh,
    grids_for,
    needs_interpreter,
    needs_triton,
    run,
    run_steps_in_torch,
    run_twice,
)

pytestmark = [
    needs_triton,
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, fused_in_interpreter: None) -> None:
    """The steps in torch, with the kernel that finds writes to weights."""
    run_steps_in_torch(monkeypatch)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_the_state_is_that_of_the_encoder(name: str, tmp_path: Path) -> None:
    encoder, untouched = fresh(name), fresh(name).state_dict()
    fast = encoder.accelerated()
    run(fast, name)
    for state in (encoder.state_dict(), fast.state_dict()):
        assert list(state) == list(untouched)
        for key, value in state.items():
            assert value.dtype == untouched[key].dtype
            assert torch.equal(value, untouched[key])
    save_file(fast.state_dict(), tmp_path / "tower.safetensors")
    assert list(load_file(tmp_path / "tower.safetensors")) == sorted(untouched)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_copies_and_pickles_run_on_their_own(name: str) -> None:
    encoder = fresh(name)
    fast, truth = encoder.accelerated(), run(encoder, name)
    run(fast, name)
    copies = [copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), copy.deepcopy(encoder)]
    for weight in encoder.parameters():
        weight.zero_()
    for copied in copies:
        assert_close(run_twice(copied, name), truth)
    assert copies[2].accelerator is None
    for copied in copies[:2]:
        assert copied.accelerator is not fast.accelerator
        assert_fused(copied)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_a_state_loaded_later_is_taken(name: str) -> None:
    encoder = fresh(name)
    fast = encoder.accelerated()
    run(fast, name)
    for seed, assign in enumerate((False, True)):
        other = fresh(name)
        add_noise(*other.parameters(), seed=seed)
        encoder.load_state_dict(other.state_dict(), assign=assign)
        assert_close(run_twice(fast, name), run(other, name))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", [KINDS[0], *map(slow, KINDS[1:])])
def test_an_encoder_cast_later_runs_in_its_new_dtype(name: str) -> None:
    encoder = fresh(name)
    fast = encoder.accelerated()
    for dtype in (torch.float32, torch.float16, torch.float32):
        encoder.to(dtype)
        output, half = run_twice(fast, name), dtype == torch.float16
        assert output.pooler_output.dtype == dtype
        assert_close(output, run(encoder, name), 1e-2 if half else CLOSE)
        assert fast.accelerator.kernels_used == ("triton" if half else "reference")


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", ONE_FAST)
def test_each_parameter_written_in_place_is_seen_next_call(name: str) -> None:
    encoder, grids = fresh(name), [[1, 2, 2]]
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, grids)
    truth = encoder(pixels, grids)
    assert_close(fast(pixels, grids), truth)
    last = {id(weight) for weight in encoder.blocks[-1].parameters()}  # as those of the others
    for key, weight in encoder.named_parameters():
        if id(weight) in last:
            continue
        before = weight.clone()
        add_noise(weight, share=0.5)
        wanted = encoder(pixels, grids)
        changed = fast(pixels, grids)
        assert_close(changed, wanted)
        assert max(distances(changed, truth).values()) > 10 * CLOSE, key
        weight.copy_(before)
    assert_close(fast(pixels, grids), truth)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_a_weight_written_after_inference_mode_is_seen(name: str) -> None:
    encoder, grids = fresh(name), [[1, 2, 2]]
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, grids)
    with torch.inference_mode():
        fast(pixels, grids)
    add_noise(*encoder.parameters())
    for _ in range(2):
        assert_close(fast(pixels, grids), encoder(pixels, grids))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_weights_shared_by_two_blocks_stay_shared(name: str) -> None:
    encoder = fresh(name)
    first, last = (encoder.blocks[number].parts() for number in (0, 2))
    last.proj.weight = first.proj.weight
    encoder.blocks[2].mlp = encoder.blocks[0].mlp
    assert_close(run_twice(encoder.accelerated(), name), run(encoder, name))


# --- weights of any strides -----------------------------------------------------------------------

GATED = "qwen2_5_vl"
"""The family whose MLPs have derived weights."""
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x.clone(),
    "every second entry": lambda x: torch.stack((x, x + 1.0), -1)[..., 0],
    "every second row": lambda x: torch.stack((x, x + 1.0), 1)[:, 0],
    "a part of one buffer": lambda x: torch.cat((x.new_ones(3), x.flatten()))[3:].view(x.shape),
}
EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "one row for all": lambda x: x[:1].clone().expand_as(x),
    "one column for all": lambda x: x[..., :1].clone().expand_as(x),
}


def make_views(encoder: nn.Module, view: str) -> None:
    """Turn every weight into a view of other memory."""
    for parameter in encoder.parameters():
        parameter.data = {**VIEWS, **EXPANDED}[view](parameter.data)


@pytest.mark.usefixtures("fused_in_interpreter")
@pytest.mark.parametrize("name", [KINDS[0], slow("gemma4")])
def test_weights_may_have_any_strides(name: str) -> None:
    """As views of a larger tensor have."""
    encoder = fresh(name)
    make_views(encoder, "every second entry")
    fast = encoder.accelerated()
    assert_close(run_twice(fast, name, FEW_ROWS), run(encoder, name, grids=FEW_ROWS))
    assert_fused(fast)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("view", [*VIEWS, *EXPANDED])
def test_derived_weights_follow_sources_of_any_strides_in_every_call(view: str) -> None:
    encoder = fresh(GATED)
    fast = encoder.accelerated()
    assert_close(run_twice(fast, GATED), run(encoder, GATED))
    make_views(encoder, view)  # other memory, under way
    for one in (fast, encoder.accelerated()):
        assert_close(run_twice(one, GATED), run(encoder, GATED))
        assert_fused(one)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("backend", ["static", "none"])
@pytest.mark.parametrize("counted", [True, False], ids=["in place", "through data"])
@pytest.mark.parametrize("view", [view if view == "transposed" else slow(view) for view in VIEWS])
def test_writes_to_weights_of_any_strides_are_seen(view: str, counted: bool, backend: str) -> None:
    """In graphs, too; one kind of view runs in a plain pytest."""
    encoder = fresh(GATED)
    make_views(encoder, view)
    fast: nn.Module = encoder.accelerated()
    grids = grids_for(GATED)
    if backend == "static":
        fields = ("last_hidden_state", "pooler_output", "deepstack_features")
        fast = GraphedEncoder(encoder, [16], backend=backend, outputs=fields)
    pixels = draw_pixels(encoder, grids)
    for seed in range(3):
        for _ in range(2):
            assert_close(fast(pixels, grids), encoder(pixels, grids))
        for weight in encoder.parameters():
            add_noise(weight if counted else weight.data, seed=seed)
    if isinstance(fast, GraphedEncoder):
        assert fast.stats().eager_calls == 0


@pytest.mark.usefixtures("fused")
def test_a_square_weight_transposed_where_it_lies_is_seen() -> None:
    family = BY_NAME[GATED]
    square = {"hidden_size": 60, "num_heads": 3, "intermediate_size": 60}
    encoder = build_encoder(family, {**family.tiny, **square})
    fast = encoder.accelerated()
    run(fast, GATED)
    for part in (encoder.blocks[1].mlp.gate_proj, encoder.blocks[2].mlp.down_proj):
        before = run(encoder, GATED)
        part.weight.data = part.weight.data.t()
        assert_close(run_twice(fast, GATED), run(encoder, GATED))
        assert max(distances(run(encoder, GATED), before).values()) > 1e-3


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("width", [64, 46])
def test_an_mlp_cut_to_fewer_columns_where_it_lies_is_seen(width: int) -> None:
    """64 is no width that is padded, 92 and 46 are."""
    encoder = fresh(GATED)
    fast = encoder.accelerated()
    run(fast, GATED)
    mlp = encoder.blocks[1].mlp
    for layer in (mlp.gate_proj, mlp.up_proj):
        layer.weight.data, layer.bias.data = layer.weight.data[:width], layer.bias.data[:width]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :width]
    assert_close(run_twice(fast, GATED), run(encoder, GATED))


@pytest.mark.usefixtures("fused")
def test_weights_that_gate_and_up_share_stay_shared() -> None:
    encoder = fresh(GATED)
    mlp = encoder.blocks[1].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    mlp.down_proj.weight.data = mlp.gate_proj.weight.data.mT
    fast = encoder.accelerated()
    for seed in range(2):
        assert_close(run_twice(fast, GATED), run(encoder, GATED))
        add_noise(mlp.gate_proj.weight, seed=seed)
    assert_close(run_twice(fast, GATED), run(encoder, GATED))


@pytest.mark.usefixtures("fused")
def test_weights_made_in_inference_mode_may_be_written() -> None:
    with torch.inference_mode():
        encoder = fresh(GATED)
    assert all(parameter.is_inference() for parameter in encoder.parameters())
    fast = encoder.accelerated()
    assert_close(run_twice(fast, GATED), run(encoder, GATED))
    for seed in range(2):
        with torch.inference_mode():
            add_noise(*encoder.parameters(), seed=seed)
        assert_close(run_twice(fast, GATED), run(encoder, GATED))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_mlp_of_two_dtypes_raises_as_in_the_reference(when: str) -> None:
    encoder = fresh(GATED)
    fast = encoder.accelerated()
    if when == "after":
        run(fast, GATED)
    encoder.blocks[1].mlp.up_proj.half()
    with pytest.raises(RuntimeError, match="same dtype"):
        run(encoder, GATED)
    with pytest.raises(ValueError, match=r"are torch.float16 and torch.float32: cast the encoder"):
        run(fast, GATED)
    encoder.float()
    assert_close(run_twice(fast, GATED), run(encoder, GATED))
