"""`python -m podling` is the `podling` command."""

from podling.cli.main import entry

if __name__ == "__main__":
    entry()
