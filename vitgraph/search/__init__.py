"""Search in the vectors that ``vitgraph embed`` wrote; used by the command ``vitgraph search``.

- ``vectors``: finds the images with the largest cosine
- ``page``: writes the result as one HTML file
"""
