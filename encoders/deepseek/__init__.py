"""The encoders of DeepSeek: ``deepseek_vl``, ``deepseek_vl2`` and ``deepseek_ocr``.

``sam``, ``clip_vit`` and ``deepseek_siglip`` are the towers of which they are made; a file
``*_pixels`` makes the views of one encoder.
"""
