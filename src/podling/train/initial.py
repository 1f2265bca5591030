"""Starting from weights that exist: `--init`."""

from pathlib import Path

from podling.hosts.hosts import ALONE, Hosts
from podling.model.spec import Params
from podling.run.checkpoint import Checkpoints
from podling.run.folder import load_run
from podling.train.progress import Reporter


def initial_params(path: Path, like: Params, reporter: Reporter, hosts: Hosts = ALONE) -> Params:
    """The best checkpoint's parameters of another run, on this run's mesh.

    Args:
        path: a run folder, or what `podling import` wrote.
        like: the parameters' shapes and shardings.
        reporter: told which step was taken.
        hosts: the processes, which all call this.

    Raises:
        InputError: no good checkpoint; that model and tokenizer agree is checked before (`start.init_problems`).
    """
    _, paths = load_run(path)
    checkpoints = Checkpoints(paths.checkpoints, hosts=hosts)
    try:
        state, meta = checkpoints.restore(checkpoints.best(), {"params": like}, reporter.say)
    finally:
        checkpoints.close()
    reporter.say(f"starting from {path}, step {meta['step']:,}")
    return state["params"]
