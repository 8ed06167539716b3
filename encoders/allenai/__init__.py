"""The tower of Molmo2: ``molmo2``."""
