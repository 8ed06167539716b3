"""Run a reference in float64 throughout, so that float64 is compared with float64."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import torch
from torch.overrides import TorchFunctionMode

NO_LIFT = nullcontext()


class LiftFloat32(TorchFunctionMode):
    """Replace every float32 that a reference asks for by name with float64.

    transformers' towers drop to float32 in these places whatever their dtype, and at 1e-7 that
    hides what a float64 comparison is for:

    - rotary: ``torch.arange(..., dtype=torch.float)`` in ``inv_freq``, ``position_ids.float()``,
      ``inv_freq.to(dtype=torch.float)``, and ``.float()`` of q, k, cos and sin
    - RMS norms: ``hidden_states.to(torch.float32)``
    - position interpolation: ``index.to(torch.float32)`` before the taps' weights
    - eager attention: ``softmax(..., dtype=torch.float32)``

    All of them name the dtype in a call, so one rule lifts all: in each torch call, ``float32`` as
    an argument is read as ``float64`` and ``Tensor.float`` as ``Tensor.double``. The default dtype
    is float64 meanwhile, which covers integer tensors divided or multiplied by Python floats.
    ``lifted`` counts the calls, so that a test can see that the lift took hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lifted: Counter[str] = Counter()
        self.default = torch.get_default_dtype()

    def __enter__(self) -> LiftFloat32:
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch annotates no mode
        return self

    def __exit__(self, *reason: object) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self.default)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            self.lifted["float"] += 1
            func = torch.Tensor.double
        if any(arg is torch.float32 for arg in (*args, *kwargs.values())):
            self.lifted[func.__name__] += 1
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {
                key: torch.float64 if value is torch.float32 else value
                for key, value in kwargs.items()
            }
        return func(*args, **kwargs)
