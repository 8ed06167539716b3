"""What ``graphwrap`` calls of torch without being promised it."""

from __future__ import annotations

import threading

import pytest
import torch

from graphwrap import torch_internals
from graphwrap.guards import CallLock


@pytest.mark.parametrize(
    "name",
    ["_is_any_autocast_enabled", "_len_torch_function_stack", "_get_default_device"],
)
def test_torch_still_has_the_private_functions_of_each_call(name: str) -> None:
    assert hasattr(torch._C, name), f"torch {torch.__version__} renamed it: graphwrap calls it"


def test_modes_that_are_on_are_seen() -> None:
    assert torch_internals.makes_tensors_on_cpu()
    assert not torch_internals.autocast_is_on()
    with torch.device("meta"):
        assert not torch_internals.makes_tensors_on_cpu()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_internals.autocast_is_on()


def test_a_lock_knows_which_thread_holds_it() -> None:
    lock, seen = CallLock(), []
    with lock, lock:
        other = threading.Thread(target=lambda: seen.append(lock.is_held_here()))
        other.start()
        other.join()
        assert lock.is_held_here()
    assert not lock.is_held_here()
    assert seen == [False]
