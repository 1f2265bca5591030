"""A trained or imported model, read from its run folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from podling.config import Config
from podling.data.tokenizer import Tokenizer
from podling.errors import InputError, Problem
from podling.files import read_json
from podling.model.spec import Params, abstract_params
from podling.run.checkpoint import Checkpoints
from podling.run.folder import load_run


@dataclass(frozen=True)
class Model:
    """Everything that is needed to use a model."""

    params: Params
    """float32, on this process's first device."""
    config: Config
    tokenizer: Tokenizer
    step: int
    """Of the checkpoint it was read from."""


def load_model(run: Path, say: Callable[[str], None], step: int | None = None) -> Model:
    """Read a run's best checkpoint (by held-out loss), or its newest when none was evaluated.

    Args:
        run: a run folder, finished or not.
        say: told which checkpoint is read, and about damaged ones passed over.
        step: read this step instead.

    Raises:
        InputError: not a run folder, no good checkpoint, or a tokenizer of another vocabulary than the model's.
    """
    config, paths = load_run(Path(run))
    tokenizer = Tokenizer.load(paths.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        what = f"has {tokenizer.vocab_size} tokens, and the model {config.model.vocab_size}"
        raise InputError(Problem(str(paths.tokenizer), what, "put the run's own tokenizer.json back"))
    made_with = read_json(paths.facts).get("fingerprints", {}).get("tokenizer") if paths.facts.exists() else None
    if made_with not in (None, tokenizer.fingerprint):
        what = "is not the tokenizer this model was trained with"
        raise InputError(Problem(str(paths.tokenizer), what, "put the run's own tokenizer.json back"))
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), abstract_params(config.model)
    )
    checkpoints = Checkpoints(paths.checkpoints)
    try:
        wanted = step if step is not None else checkpoints.best()
        state, meta = checkpoints.restore(wanted, {"params": like}, say)
    finally:
        checkpoints.close()
    say(f"{paths.path}: step {meta['step']:,}")
    return Model(params=state["params"], config=config, tokenizer=tokenizer, step=meta["step"])
