"""The end of a run: samples, export, summary."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from podling.data.shards import Prepared
from podling.files import atomic_write
from podling.generate.samples import python_parse_share, sample_text
from podling.hosts.waits import STEP_S
from podling.interop.hf import export_hf
from podling.model.spec import Params, param_count
from podling.run.folder import RunFolder
from podling.run.metrics import recent_loss
from podling.train.progress import Reporter
from podling.train.session import Session
from podling.train.together import Together


def finish(
    session: Session,
    folder: RunFolder,
    reporter: Reporter,
    params: Params,
    figures: dict[str, Any],
    wall_s: Callable[[], float],
    together: Together,
) -> dict[str, Any]:
    """Write samples and export, then the summary, which marks the run as finished.

    The first process does, with the parameters in its own memory, while the others wait.

    Killed before that, the run ends up here again with the same parameters, and writes the same.

    Args:
        session: gives configuration, data and devices.
        folder: the run folder, held by the first process.
        reporter: shows a sample and the summary.
        params: as trained.
        figures: what the loop has measured, for the summary.
        wall_s: seconds of work on the run until the moment it is called.
        together: the processes, which all call this.
    """
    with together.waits("bringing the parameters together", STEP_S):
        whole = bring_together(params, keep=together.is_first)
    summary = None
    with together.gate("finishing: samples, export and summary"):
        if whole is not None:
            summary = _finish(session, folder, reporter, whole, figures, wall_s)
    return together.broadcast("summary", summary)


def bring_together(params: Params, *, keep: bool) -> Params | None:
    """All parameters in this process's memory, one leaf after another: the devices never hold more than a whole leaf.

    Args:
        params: sharded over the devices of all processes, which all call this.
        keep: False in the processes that need none; they get None.
    """

    def whole(leaf: jax.Array) -> np.ndarray | None:
        here = leaf.is_fully_addressable or leaf.is_fully_replicated
        value = np.asarray(leaf) if here else multihost_utils.process_allgather(leaf, tiled=True)
        return value if keep else None

    found = jax.tree.map(whole, params)
    return found if keep else None


def _finish(
    session: Session,
    folder: RunFolder,
    reporter: Reporter,
    params: Params,
    figures: dict[str, Any],
    wall_s: Callable[[], float],
) -> dict[str, Any]:
    config = session.config
    parse_share = _write_samples(session, folder, reporter, params)
    export = None
    if config.run.export:
        with reporter.status("exporting to Hugging Face format", None):
            export_hf(params, config.model, session.prepared.tokenizer, folder.paths.export)
            export = str(folder.paths.export)
    summary = {
        "run": str(folder.path),
        "params": param_count(config.model),
        "tokens": config.train.steps * session.plan.tokens,
        "steps": config.train.steps,
        "train_loss": recent_loss(folder.paths),
        **figures,
        "parse_share": parse_share,
        "mfu_peak": str(session.peak),
        "retraces": session.counter.retraces,
        "wall_s": wall_s(),
        "export": export,
        "example_prompt": example_prompt(session.prepared),
    }
    folder.mark_finished(summary)
    reporter.summary(summary)
    return summary


def example_prompt(prepared: Prepared) -> str:
    """Something to ask this model: `def `, or the first words (without spaces: characters) of the held-out text."""
    if prepared.kind == "python":
        return "def "
    head = [token for token in prepared.tokens("heldout")[:64].tolist() if token != prepared.tokenizer.eot_id]
    line = next((line.strip() for line in prepared.tokenizer.decode(head).split("\n") if line.strip()), "")
    words = line.replace("\ufffd", "").split()
    return " ".join(words[:3])[:40] if len(words) > 2 else line.replace("\ufffd", "")[:8]


def _write_samples(session: Session, folder: RunFolder, reporter: Reporter, params: Params) -> float | None:
    """Write the samples; returns the share of them that parse, when the text is Python."""
    config, prepared = session.config, session.prepared
    if config.train.samples == 0:
        return None
    with reporter.status(f"writing samples ({config.train.samples})", None):
        texts = sample_text(params, config.model, prepared.tokenizer, config.train.samples, seed=config.train.seed)
        samples = folder.paths.samples
        samples.mkdir(exist_ok=True)
        for index, text in enumerate(texts):
            atomic_write(samples / f"{index:03d}.txt", text)
    reporter.sample(texts[0])
    return python_parse_share(texts)[0] if prepared.kind == "python" else None
