"""Outputs of items own their memory."""

from __future__ import annotations

import io

import pytest
import torch

from encoders.contract import EncoderOutput
from tests.oracles import BY_NAME, WHOLE, build_encoder, fields_of, tiny


def saved_bytes(item: EncoderOutput) -> int:
    buffer = io.BytesIO()
    torch.save(tuple(item), buffer)
    return buffer.tell()


@pytest.mark.parametrize("name", WHOLE)
def test_every_item_encoded_has_memory_of_its_own(name: str) -> None:
    """A saved item once wrote the memory of all twelve items to the disk."""
    encoder, images = tiny(name), [torch.zeros(3, 56, 56, dtype=torch.uint8)] * 12
    items = encoder.encode(images)
    alone = encoder.encode(images[:1])
    assert saved_bytes(items[5]) < 1.1 * saved_bytes(alone[0])
    for item in items:
        for field in fields_of(item).values():
            assert field.untyped_storage().nbytes() == field.nbytes


@pytest.mark.parametrize("name", WHOLE)
def test_items_of_their_own_still_have_gradients(name: str) -> None:
    encoder = build_encoder(BY_NAME[name], BY_NAME[name].tiny).requires_grad_(True)
    first, second = encoder.encode([torch.zeros(3, 56, 56, dtype=torch.uint8)] * 2)
    weight = next(p for key, p in encoder.named_parameters() if "qkv.weight" in key)
    for item in (first, second):
        [gradient] = torch.autograd.grad(item.pooler_output.sum(), weight, retain_graph=True)
        assert gradient.abs().max() > 0


def test_a_clone_leaves_out_what_was_left_out() -> None:
    rows = torch.arange(6.0).view(3, 2)
    whole = EncoderOutput(rows[:1], rows[1:], (rows[:2],))
    copied = whole.clone()
    assert [x.tolist() for x in fields_of(copied).values()] == [
        x.tolist() for x in fields_of(whole).values()
    ]
    assert EncoderOutput(None, rows, None).clone()[:3:2] == (None, None)
    assert EncoderOutput(None, None, ()).clone() == (None, None, (), {})
