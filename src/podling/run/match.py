"""What may change between two sessions of one run, and what may not."""

from typing import Any

from podling.config import Config, flags
from podling.errors import Problem, raise_if

# Changing these between sessions changes nothing that is computed.
FREE = {
    ("run", "out"),
    ("run", "checkpoint_every"),
    ("run", "keep"),
    ("run", "log_every"),
    ("run", "tensorboard"),
    ("run", "wandb"),
    ("run", "export"),
    ("train", "eval_every"),
    ("train", "samples"),
    ("data", "cache"),
}
# The same computation, rounded differently; or the same text at another place, which the fingerprints prove.
SAID = {
    ("run", "device"),
    ("run", "mesh"),
    ("train", "micro_batch"),
    ("train", "remat"),
    ("train", "loss_chunk"),
    ("train", "attention"),
    ("train", "layer_loop"),
    ("data", "paths"),
}


def match(out: str, old: Config, new: Config, began_with: dict[str, str], fingerprints: dict[str, str]) -> list[str]:
    """Compare this session's configuration and data with the run's own.

    Args:
        out: the run folder, for messages.
        old: the configuration of the last session.
        new: of this one.
        began_with: hashes of what the run learns from, by name, when it began.
        fingerprints: the same hashes now.

    Returns:
        One line for each difference that is allowed but worth reading.

    Raises:
        InputError: naming every difference that would make it another run.
    """
    problems, notes, moved = [], [], None
    for flag in flags():
        before, now = (getattr(getattr(c, flag.section), flag.field) for c in (old, new))
        key = (flag.section, flag.field)
        if before == now or key in FREE:
            continue
        change = f"{_show(before)} → {_show(now)}"
        if key == ("data", "paths"):
            moved = Problem(f"{flag.name}", change)
        if key in SAID:
            notes.append(f"{flag.name}: {change} since the last session")
        else:
            problems.append(Problem(flag.name, change))
    changed = [name for name, value in fingerprints.items() if began_with.get(name, value) != value]
    if changed and moved is not None:
        problems.append(moved)
    for name in changed:
        what = f"changed since the run began: {began_with[name][:12]} → {fingerprints[name][:12]}"
        problems.append(Problem(name, what))
    if problems:
        fix = f"repeat the run's own settings (podling train --resume {out}), or choose another --out"
        problems.append(Problem(f"--out {out}", "is a run of another configuration", fix))
    raise_if(problems)
    return notes


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(value) or "(nothing)"
    return str(value) if value != "" else "(nothing)"
