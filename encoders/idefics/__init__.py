"""The tower of Idefics3 and SmolVLM: ``idefics3``, and its tiles: ``idefics3_pixels``."""
