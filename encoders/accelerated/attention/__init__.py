"""The attention of accelerated blocks: its steps, and the kernels that compute it.

- ``fused``: the steps of a block's attention
- ``candidates``, ``choices``: the kernels to choose from, and the one chosen for each shape
- ``flash_attn_4``: the kernel of the package flash-attn-4, a private function there
"""
