"""`python -m podling` is the `podling` command."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the command takes it: Ctrl-C amid the imports, no traceback

from podling.cli.main import entry  # noqa: E402

if __name__ == "__main__":
    entry()
