"""What researchers ask of towers: alike blocks, matching patches, and figures of attention."""
