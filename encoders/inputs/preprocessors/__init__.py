"""Preprocessing of images and videos for towers: a module per family, and two that families share.

- ``patches``: patches of images and clips of any size, for Qwen, GLM, ERNIE, MiniMax and Pixtral
- ``views``: the steps that all preprocessors to square views of a fixed size share

Modules for towers over patches, by what they add to ``patches``:

- ``gemma4``: images resized to at most a chosen number of tokens
- ``moonvit``: images of Kimi, shrunk if they are too large and padded to whole tokens
- ``paddleocr_vl``: patches row by row, which the projector merges after the tower
- ``siglip2``: SigLIP2 NaFlex: images resized to the most patches that a limit allows

Modules for towers over views; a view is a whole image or a tile, which is a part of one:

- ``deepseek_ocr``: the whole image and, of large images, tiles
- ``deepseek_vl``: one padded view, or two of different sizes
- ``deepseek_vl2``: the whole image and tiles of the candidate size that wastes least
- ``idefics3``: tiles, and the whole image as the last of them; SmolVLM too
- ``intern_vit``: tiles of images, frames of clips
- ``lfm2_vl``: patches of the whole image and, of large images, of square tiles
- ``llama4``: tiles of the canvas that fits the image best, and the whole image as the last of them
- ``siglip``: one view without keeping the shape of the image; Gemma 3 too
- ``step3``: the whole image and crops of it, for all Step towers
"""
