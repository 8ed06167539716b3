"""Kernels in Triton, one subject per module, and the functions that launch them.

- ``norms``: residual, layer scale and norm in one pass; ``activations``: activations of the MLP
- ``rotary``: rotary positions in place; ``positions``: interpolated position embeddings
- ``triton_attention``: heads of sizes that are no power of two; ``tma_attention``: heads of 72 and
  80 columns, by the tensor memory accelerator; ``relative_attention``: SAM's attention
- ``quantise``: rows and weights in e4m3; ``compare``: derived weights brought up to date
"""
