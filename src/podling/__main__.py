"""`python -m podling` is the `podling` command."""

import sys

from podling.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
