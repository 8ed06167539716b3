"""The tower of InternVL: ``intern_vit``; ``intern_vit_pixels`` makes its tiles by processor files,
which ``intern_vit_files`` reads."""
