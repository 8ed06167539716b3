"""The tower of Llama 4: ``llama4``, and its tiles: ``llama4_pixels``."""
