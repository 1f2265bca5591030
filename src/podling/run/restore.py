"""Reading a checkpoint: its bytes are checked first, and the newest good step is what a run goes on from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from podling.errors import InputError, Problem
from podling.hosts.hosts import Hosts, broadcast, exchange
from podling.run import manifest
from podling.run.steps import StepFolders

STATE = "state"  # what Orbax wrote, beside the manifest


def restore_good(
    folders: StepFolders,
    hosts: Hosts,
    orbax: ocp.AsyncCheckpointer,
    step: int | None,
    like: Any,
    say: Callable[[str], None],
) -> tuple[Any, dict[str, Any]]:
    """`Checkpoints.restore`, whose arguments and errors these are."""
    newest_first = broadcast(hosts, "checkpoints", folders.steps()[::-1], limit_s=None)
    if step is not None and step not in newest_first:
        have = ", ".join(map(str, newest_first[::-1])) or "none"
        raise InputError(Problem(str(folders.folder), f"has no checkpoint of step {step}", f"there are: {have}"))
    order = newest_first if step is None else [step, *(other for other in newest_first if other != step)]
    damage: list[Problem] = []
    for candidate in order:
        path = folders.path(candidate)
        record, harm = _verify(path, hosts)
        if harm:
            damage.append(Problem(str(path), f"checkpoint is damaged: {harm}"))
            say(f"{damage[-1]}; trying the one before")
            continue
        manifest.check_leaves(path, record, like)
        if damage:
            say(f"restored step {candidate} from {path}")
        return _read(orbax, path / STATE, like), record["meta"]
    if damage:
        none_left = Problem(str(folders.folder), "no good checkpoint is left", "train again in a new --out")
        raise InputError([*damage, none_left])
    raise InputError(Problem(str(folders.folder), "there is no checkpoint", "train the run first"))


def _verify(path: Path, hosts: Hosts) -> tuple[dict[str, Any], str]:
    """The manifest, and what any process found wrong in its share of the files; empty when nothing is."""
    record, harm = {}, ""
    try:
        record = manifest.verify(path, share=(hosts.process, hosts.count))
    except manifest.Damaged as error:
        harm = str(error)
    return record, next(filter(None, exchange(hosts, f"check of {path.name}", harm, limit_s=None)), "")


def _read(orbax: ocp.AsyncCheckpointer, path: Path, like: Any) -> Any:
    """Each process reads what its devices will hold."""
    args = ocp.args.PyTreeRestore(  # pyright: ignore[reportCallIssue]
        item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
    )
    return orbax.restore(path, args=args)
