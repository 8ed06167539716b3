"""The tower of HunyuanOCR: ``hunyuan_vl``."""
