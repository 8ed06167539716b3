"""The tower of Granite for Docling: ``granite_docling``, its tiles: ``granite_docling_pixels``."""
