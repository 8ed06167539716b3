"""The base classes of all encoders, checks of their arguments, and saving.

- ``encoder``: the base class of all encoders, with their one call
- ``feature_maps``, ``intermediates``, ``attention_maps``: feature maps, block outputs, attention;
  ``map_settings``: what attention maps show
- ``raster``: rows of features as maps, from the orders that towers have them in
- ``vision_encoder``: encoders of one input path, and how their blocks run
- ``patch_encoder``, ``tile_encoder``: towers over packed patches, and over square tiles
- ``paths_encoder``: encoders of several input paths
- ``configs``: the sizes that base classes read from the config of a family
- ``checks``: checks of the arguments of an encoder's methods
- ``saving``: encoders as checkpoints
"""
