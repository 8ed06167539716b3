"""The images to encode by ``vitgraph embed``: listed once per job, and read when decoded.

- ``listing``: lists the images of a folder, a file name pattern, a list of paths or a dataset
- ``suffixes``: tells images from other files by their suffixes
- ``tars``: images inside tar files; ``tables``: images inside parquet files and datasets
- ``reading``: reads the bytes of one image of a job
- ``files``: reads local and remote files, and checks that they are unchanged since the listing
"""
