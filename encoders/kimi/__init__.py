"""The tower of Kimi: ``moonvit``, and its pixels: ``moonvit_pixels``."""
