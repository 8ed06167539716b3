"""The towers of Meta: ``sam3`` and ``muse_glimmer``."""
