"""A repo of the Hub: resolving its revision, reading files by HTTP, fetching tensors."""
