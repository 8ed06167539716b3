"""Figures of feature maps, attention and similarity (``pip install 'matplotlib>=3.8'``).

From photographs to a figure::

    inputs = encoder.preprocess(images=photos)
    maps = encoder.feature_maps(encoder(inputs), inputs)
    plot_feature_maps(photos, maps).savefig("maps.png")

Figures are made without pyplot: nothing global is touched, and no display is needed. The numbers in
a figure are computed by ``vitgraph.analysis``. Each module but the last draws one kind of picture:

- ``feature_maps``: photographs and their feature maps; ``attention``: attention over a photograph
- ``nearest``: patches and the most similar patches; ``similarity``: the similarity of blocks
- ``probes``: the accuracy of probes after each block
- ``explorer``: a page on which one clicks a patch, without matplotlib
- ``figures``: writes a figure to a file, and draws a picture into a panel (one set of axes)
"""

from .attention import plot_attention
from .explorer import write_explorer
from .feature_maps import crop_padding, plot_feature_maps
from .figures import write_figure
from .nearest import plot_nearest_patches
from .probes import plot_probes
from .similarity import plot_similarity

__all__ = [
    "crop_padding",
    "plot_attention",
    "plot_feature_maps",
    "plot_nearest_patches",
    "plot_probes",
    "plot_similarity",
    "write_explorer",
    "write_figure",
]
