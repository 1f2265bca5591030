"""A launched process does not outlive its launcher."""

import os
import signal
import threading
import time

LAUNCHER = "PODLING_LAUNCHER_FD"
"""Environment variable: a file descriptor that closes when the launcher ends, however it ends."""
SAVE_S = 60.0


def follow_launcher() -> bool:
    """Stop as by SIGTERM, and so save, when the launcher is gone. Without a launcher this does nothing.

    Returns:
        Whether there is one: what process 0 says is then read next to what this process says.
    """
    handle = os.environ.pop(LAUNCHER, "")
    if handle:
        threading.Thread(target=_follow, args=(int(handle),), name="launcher", daemon=True).start()
    return bool(handle)


def _follow(handle: int) -> None:
    while os.read(handle, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_S)
    os._exit(1)
