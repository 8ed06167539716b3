"""The towers of SigLIP: ``siglip`` (Gemma 3's too) and ``siglip2`` for images of any size."""
