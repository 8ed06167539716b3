"""The tower of Gemma 4: ``gemma4``, and its pixels: ``gemma4_pixels``."""
