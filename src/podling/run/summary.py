"""summary.json: there is one when a run is finished."""

from pathlib import Path
from typing import Any

from podling.errors import InputError
from podling.files import read_json

NEEDED = {"run", "steps", "tokens", "params", "val_loss", "wall_s"}
"""What every summary has, whatever else the version that wrote it knew."""


def read_summary(path: Path) -> dict[str, Any] | None:
    """What the file holds, or None when there is none or a hand has changed it beyond use."""
    if not path.exists():
        return None
    try:
        found = read_json(path)
    except InputError:
        return None
    return found if found.keys() >= NEEDED else None
