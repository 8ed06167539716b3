"""The towers of Meta: ``sam3``."""
