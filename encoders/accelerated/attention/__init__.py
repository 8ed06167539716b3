"""The attention of accelerated blocks: its steps, and the kernels that compute it.

- ``fused``: the steps of a block's attention
- ``candidates``, ``choices``: the kernels to choose from, and the one taken for each shape
- ``flash_attn_4``: the private function of another package that one of these kernels is
"""
