"""Kernels in Triton, one subject per module, and the functions that launch them.

- ``norms``: residual, layer scale and norm in one pass; ``activations``: activations of the MLP
- ``rotary``: rotary positions in place; ``positions``: interpolated position embeddings
- ``triton_attention``: attention for head sizes that are no power of two; ``tma_attention``: for 72
  and 80, by the tensor memory accelerator; ``relative_attention``: with SAM's relative positions
- ``quantise``: rows and weights in e4m3; ``compare``: copies of weights kept equal to them
"""

from triton.runtime import cache

from ...triton_build import keep_build_hash

keep_build_hash(cache)
