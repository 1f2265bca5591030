"""The state a session begins with: the newest good checkpoint, on whatever devices there are now, or a new one."""

from pathlib import Path
from typing import Any

from podling.hosts.waits import COMPILE_S
from podling.run.checkpoint import Checkpoints
from podling.run.environment import environment_changes
from podling.train.devices import check_batch
from podling.train.initial import initial_params
from podling.train.progress import Reporter
from podling.train.session import Session
from podling.train.step import TrainState
from podling.train.together import Together

NEW = {"step": 0, "evaluated": True, "wall_s": 0.0}


def first_state(
    session: Session, checkpoints: Checkpoints, reporter: Reporter, together: Together
) -> tuple[TrainState, dict[str, Any]]:
    """The state, and what its checkpoint kept (`NEW` for the initial state).

    Args:
        session: gives mesh, shardings and batches.
        checkpoints: of the run.
        reporter: told where the run goes on, and what keeps it from being bit-equal to one that never stopped.
        together: the processes, which all call this; each reads or makes the parts its devices hold.

    Raises:
        InputError: no checkpoint is good, or `--init` has none, or the processes mean different batches.
    """
    if together.broadcast("the newest checkpoint", checkpoints.latest()) is None:
        state, meta = _initial(session, reporter, together), NEW
    else:
        with together.waits("reading the checkpoint", COMPILE_S):
            state, meta = checkpoints.restore(None, session.abstract_state(), reporter.say)
        reporter.say(f"resuming after step {meta['step']:,} of {session.config.train.steps:,}")
        changes = environment_changes(meta) + layout_changes(session, meta)
        if changes:
            reporter.say("not bit-equal to an unbroken run from here on: " + "; ".join(changes))
    check_batch(session, meta["step"], together)
    return state, meta


def _initial(session: Session, reporter: Reporter, together: Together) -> TrainState:
    with together.waits("initial state", COMPILE_S):
        state = session.init_state()
        if not session.config.run.init:
            return state
        like = session.abstract_state().params
        params = initial_params(Path(session.config.run.init), like, reporter, together.hosts)
        return TrainState(step=state.step, params=params, opt_state=state.opt_state)


def layout_changes(session: Session, meta: dict[str, Any]) -> list[str]:
    """What is laid out, cut or ordered otherwise than when the checkpoint was written, in words."""
    saved = meta.get("layout", {})
    changes = [
        f"{name} changed: {saved[name]} → {value}"
        for name, value in session.layout.items()
        if name in saved and saved[name] != value
    ]
    if session.config.model.dropout and saved.get("micro-batch") not in (None, session.layout["micro-batch"]):
        changes.append("dropout draws other masks for micro-batches of another size")
    if meta.get("next_batch", following := session.batches.digest(meta["step"])) != following:
        changes.append("the batches are not the same from here on: their order changed with these versions")
    return changes
