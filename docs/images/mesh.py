"""Draw docs/images/mesh.svg: `python docs/images/mesh.py`, with the tpu extra for the compiler's own arrangement."""

import sys
from pathlib import Path

from podling.cli.main import main

ARGS = ["--model", "gpt2-xl", "--topology", "v5e:2x4"]

if __name__ == "__main__":
    sys.exit(main(["mesh", *ARGS, "--svg", str(Path(__file__).with_suffix(".svg"))]))
