"""The end of a run: samples, export, summary."""

from typing import TYPE_CHECKING, Any

import jax

from podling.files import atomic_write
from podling.generate.samples import python_parse_share, sample_text
from podling.interop.hf import export_hf
from podling.model.spec import param_count
from podling.train.baselines import Baseline
from podling.train.evaluate import EvalResult
from podling.train.metrics import recent_loss
from podling.train.step import TrainState

if TYPE_CHECKING:
    from podling.train.loop import Run


def finish(run: "Run", state: TrainState, result: EvalResult, baseline: Baseline) -> dict[str, Any]:
    """Write samples and export, then the summary, which marks the run as finished."""
    config, folder, reporter = run.config, run.folder, run.reporter
    samples, parse_share = _samples(run, state)
    export = None
    if config.run.export:
        with reporter.status("exporting to Hugging Face format", None):
            params = jax.device_get(state.params)
            export_hf(params, config.model, run.session.prepared.tokenizer, folder.paths.export)
            export = str(folder.paths.export)
    totals = run.meter.totals()
    summary = {
        "run": str(folder.path),
        "params": param_count(config.model),
        "tokens": run.total_steps * run.session.plan.tokens,
        "steps": run.total_steps,
        "train_loss": recent_loss(folder.paths),
        "val_loss": result.loss,
        "val_perplexity": result.perplexity,
        "val_bits_per_byte": result.bits_per_byte,
        "val_tokens": result.tokens,
        "unigram_loss": baseline.unigram_loss,
        "bigram_loss": baseline.bigram_loss,
        "parse_share": parse_share,
        "bigram_parse_share": baseline.bigram_parse_share,
        "samples": len(samples),
        "tokens_per_s": totals["tokens_per_s"],
        "mfu": totals["mfu"],
        "mfu_peak": run.session.peak.source,
        "data_wait_share": totals["data_wait_share"],
        "retraces": run.session.counter.retraces,
        "train_s": run.meter.train_s,
        "wall_s": run.wall_s(),
        "export": export,
    }
    folder.mark_finished(summary)
    reporter.summary(summary)
    return summary


def _samples(run: "Run", state: TrainState) -> tuple[list[str], float | None]:
    config, prepared = run.config, run.session.prepared
    if config.train.samples == 0:
        return [], None
    with run.reporter.status(f"writing {config.train.samples} samples", None):
        texts = sample_text(
            state.params, config.model, prepared.tokenizer, config.train.samples, seed=config.train.seed
        )  # fmt: skip
        folder = run.folder.paths.samples
        folder.mkdir(exist_ok=True)
        for index, text in enumerate(texts):
            atomic_write(folder / f"{index:03d}.txt", text)
    run.reporter.sample(texts[0])
    share = python_parse_share(texts)[0] if prepared.kind == "python" else None
    return texts, share
