"""The tower of InternVL: ``intern_vit``; its tiles: ``intern_vit_pixels``, by ``intern_vit_files``."""
