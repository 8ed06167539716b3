"""Run the command line by ``python -m vitgraph``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
