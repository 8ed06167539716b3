"""OpenAI's CLIP, and the towers that others trained in its form."""
