"""The towers of DINO: ``dinov2``, with and without registers, and ``dinov3``."""
