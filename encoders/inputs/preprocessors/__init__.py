"""Images and videos to the pixels of each family's towers.

- ``patches``: images and clips of any size, for Qwen, GLM and Pixtral; ``naflex``: for SigLIP2
  NaFlex, ``patch_tiles``: its tiles for LFM2-VL, ``navit``: for Kimi, ``raster``: for PaddleOCR-VL,
  ``soft_tokens``: for Gemma 4
- ``tiles``: images and clips in tiles, for InternViT; ``canvases``: for Llama 4
- ``views``: what all preprocessing to square views shares; ``crops``: for Step, ``splits``: for
  Idefics3, ``stretched``: for SigLIP and Gemma 3, ``square_views``, ``tiled_views``: for DeepSeek
"""
