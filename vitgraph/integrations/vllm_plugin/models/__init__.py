"""vLLM's model classes with the vision towers of this library, one module per module of vLLM."""
