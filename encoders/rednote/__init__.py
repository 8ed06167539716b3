"""The tower of dots.ocr, of rednote (Xiaohongshu): ``dots_ocr``."""
