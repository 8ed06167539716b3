"""Search in the vectors that ``vitgraph embed`` wrote; used by the command ``vitgraph search``.

- ``vectors``: finds the images with the largest cosine
- ``texts``: makes vectors of texts, by the text half of a checkpoint
- ``pairs``: finds all near-duplicates
- ``page``: writes the result as one HTML file
"""
