"""What all encoders have in common: the base classes, how blocks run, checks of arguments, saving.

- ``encoder``: the base class of all encoders, with their one call
- ``vision_encoder``: encoders of one input path, with ``patch_encoder`` and ``tile_encoder``
- ``paths_encoder``: encoders of several input paths, with ``tiles_then_image``
- ``block_runner``: blocks as the modules they are, or accelerated
- ``checks``: arguments of an encoder's methods that are refused
- ``saving``: encoders as checkpoints
"""
