"""The tower of MiniCPM-V: ``minicpm_v``, and its pixels: ``minicpm_v_pixels``."""
