"""The towers of Qwen: ``qwen2_vl``, ``qwen2_5_vl`` and ``qwen3_vl`` (3.5 and 3.6 too).

Their pixels are the patches of ``encoders.inputs.patches``.
"""
