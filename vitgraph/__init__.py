"""Where the packages meet: the command line, the demo, plots and video files.

The library itself is ``encoders`` and ``weights``; nothing there imports this package.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
