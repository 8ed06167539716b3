"""The reference model of each family, built from a published config, in our names and shapes."""
