"""Which accelerator this machine has, read from the system and not from JAX, so that neither can hide the other."""

from pathlib import Path
from typing import Literal

GOOGLE = "0x1ae0"
# PCI device ids of TPU v2/v3, v4, v5p, v5e, v6e and v7x, as JAX's own start-up looks for them. The vendor alone would
# also match the network cards of Google's virtual machines.
TPU_DEVICES = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}


def accelerator(root: Path = Path("/")) -> Literal["tpu", "gpu"] | None:
    """The kind of accelerator that is plugged in.

    Args:
        root: of the file system; another one in tests.
    """
    dev = root / "dev"
    if any(dev.glob("nvidia[0-9]*")) or (dev / "kfd").exists():
        return "gpu"
    if any(dev.glob("accel[0-9]*")):
        return "tpu"
    for card in (root / "sys/bus/pci/devices").glob("*"):
        # Newer TPU machines hand the chips over as /dev/vfio, which says nothing about what is behind it.
        if _read(card / "vendor") == GOOGLE and _read(card / "device") in TPU_DEVICES:
            return "tpu"
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
