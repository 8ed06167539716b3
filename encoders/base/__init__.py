"""The base classes of all encoders, checks of their arguments, and saving.

- ``encoder``: the base class of all encoders, and how they are called
- ``feature_maps``, ``intermediates``: feature maps, block outputs
- ``raster``: arranges rows of features, which come in a tower's order, as maps
- ``vision_encoder``: the base class of encoders of one input path, and how blocks run
- ``patch_encoder``, ``tile_encoder``: base classes of towers over patches and over square tiles
- ``paths_encoder``: encoders of several input paths, such as "image" and "tiles"
- ``configs``: the sizes that base classes read from the config of a family
- ``checks``: checks of the arguments of an encoder's methods
- ``saving``: writes encoders as checkpoints
"""
