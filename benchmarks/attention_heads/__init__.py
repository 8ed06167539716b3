"""Speed of attention with head sizes 72 and 80: ``python -m benchmarks.attention_heads``.

- ``measure``: times and checks the library's attention kernels, and candidates to replace them
"""
