"""The images that a source of ``vitgraph embed`` names: listed once per job, read when decoded.

- ``listing``: the images of a folder, a pattern, a list of paths or a data set
- ``suffixes``: which files are images by their names
- ``tars``, ``tables``: the images inside tar files, and those in parquet files and data sets
- ``reading``: one image of a job, and how its bytes are read
- ``files``: single files, local and remote, that must be as they were when they were listed
"""
