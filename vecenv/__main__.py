"""``python -m vecenv``: the same as the command ``vecenv``."""

import sys

from vecenv.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
