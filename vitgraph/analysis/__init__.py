"""Compare towers: the similarity of blocks, matching patches, and figures of attention."""
