"""Starting from weights that exist: `--init`."""

from pathlib import Path

from podling.data.tokenizer import Tokenizer
from podling.errors import Problem, raise_if
from podling.model.spec import Params
from podling.run.checkpoint import Checkpoints
from podling.run.folder import load_run
from podling.train.progress import Reporter
from podling.train.session import Session

SHAPE_FIELDS = ("layers", "heads", "embed", "mlp", "context", "vocab_size")


def initial_params(path: Path, like: Params, session: Session, reporter: Reporter) -> Params:
    """The newest good checkpoint's parameters of another run, on this run's mesh.

    Args:
        path: a run folder, or what `podling import` wrote.
        like: the parameters' shapes and shardings.
        session: this run.
        reporter: told which step was taken.

    Raises:
        InputError: another model or another tokenizer than this run's, naming each difference.
    """
    config, paths = load_run(path)
    problems = [
        Problem(f"--init {path}", f"{field} is {there}, this run's is {here}", "use the same model settings")
        for field in SHAPE_FIELDS
        if (there := getattr(config.model, field)) != (here := getattr(session.config.model, field))
    ]
    if Tokenizer.load(paths.tokenizer).fingerprint != session.prepared.tokenizer.fingerprint:
        problems.append(
            Problem(f"--init {path}", "its tokenizer is not this run's", f"use --tokenizer {paths.tokenizer}")
        )
    raise_if(problems)
    checkpoints = Checkpoints(paths.checkpoints)
    try:
        state, meta = checkpoints.restore(None, {"params": like}, reporter.say)
    finally:
        checkpoints.close()
    reporter.say(f"starting from {path}, step {meta['step']:,}")
    return state["params"]
