"""Encoders in the place of the vision towers of transformers' models, for ``as_vision_tower``.

- ``records``: the models, by encoder, and where each has its tower
- ``calls``: the batches of a model, encoded to what it takes from its tower

transformers is not imported here.
"""
