"""``python -m perseus_bench``: the command ``perseus-bench``."""

import sys

from perseus_bench.command import main

if __name__ == "__main__":
    sys.exit(main())
