"""How encoders replace the vision towers of transformers' models, for ``as_vision_tower``.

- ``records``: the models that have an encoder's tower, and the attribute that holds the tower
- ``calls``: batches of a model, encoded to the output that the model expects from its tower

transformers is not imported here.
"""
