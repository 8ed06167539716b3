"""The encoders of DeepSeek: ``deepseek_vl``, ``deepseek_vl2``, ``deepseek_ocr``,
``deepseek_ocr2`` and ``deepseek_v4``.

``sam``, ``clip_vit`` and ``deepseek_siglip`` are the towers of which they are made; a file
``*_pixels`` makes the views of one encoder.
"""
