"""The tower of LFM2-VL: ``lfm2_vl``, and its tiles: ``lfm2_vl_pixels``."""
