"""The tower of InternVL: ``intern_vit``, and its tiles: ``intern_vit_pixels``."""
