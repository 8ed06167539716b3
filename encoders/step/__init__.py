"""The towers of Step: ``step3`` and ``step3_vl``; ``step3_pixels`` makes the crops of both."""
