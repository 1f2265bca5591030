"""A plan as one JSON object. Sizes are in bytes, times in seconds; what is not known is null."""

from dataclasses import asdict
from typing import Any

from podling.cost.records import Hbm, StepTime
from podling.plan.records import Option, Plan
from podling.presets import PRESETS

MOST_OPS = 20  # of the thousands that a step may have


def record(plan: Plan) -> dict[str, Any]:
    """Everything that the text shows, and more of it."""
    use, loss, config, time = plan.budget, plan.loss, plan.config, plan.chosen.time
    steps = use.steps if use else config.train.total_steps
    return {
        "fits": plan.chosen.fits,
        "chip": plan.target.text,
        "chip_name": plan.target.chip.name,
        "devices": plan.target.devices,
        "slices": plan.target.slices,
        "approximate": plan.target.approximate,
        "model": model_name(plan),
        "preset": config.model.preset,
        "params": plan.params,
        **_option(plan.chosen),
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "peak_flops": plan.peak_flops,
        "batch_tokens": config.train.batch_tokens,
        "steps": steps,
        "tokens": steps * config.train.batch_tokens,
        "train_s": use.train_s if use else steps * time.step_s if time else None,
        "epochs": use.epochs if use else None,
        "budget": asdict(use) if use else None,
        "loss_range": list(loss.range) if loss and loss.range else None,
        "loss_words": loss.words if loss else None,
        "command": plan.command,
        "runners_up": [_option(option) for option in plan.runners_up],
        "sizes": [asdict(size) for size in plan.sizes],
        "refused": [_option(option) for option in plan.refused],
        "choices": [asdict(choice) for choice in plan.choices],
        "compiled": plan.compiled,
        "plan_s": plan.plan_s,
        "notes": list(plan.notes),
    }


def model_name(plan: Plan) -> str:
    """The preset's or the size's name; a preset with another shape is called by that shape."""
    model = plan.config.model
    if plan.sizes:
        return plan.sizes[0].name
    known = PRESETS[model.preset].config.model if model.preset in PRESETS else None
    shape = (model.layers, model.heads, model.embed, model.mlp)
    if known and shape == (known.layers, known.heads, known.embed, known.mlp):
        return model.preset
    return f"{model.preset} with {model.layers} layers, {model.heads} heads, embed {model.embed}, mlp {model.mlp}"


def _option(option: Option) -> dict[str, Any]:
    return {
        "fits": option.fits,
        **asdict(option.layout),
        **_memory(option.hbm),
        **_time(option.time),
        "compile_s": option.compile_s,
        "estimated_step_s": option.estimated_s,
        "refusal": option.refusal or None,
        "compiler_text": option.compiler_text or None,
    }


def _memory(hbm: Hbm) -> dict[str, Any]:
    return {
        "hbm_bytes": hbm.total_bytes,
        "hbm_limit_bytes": hbm.limit_bytes,
        "hbm_spare_bytes": hbm.spare_bytes,
        "hbm_by_category": dict(hbm.by_category),
        "hbm_largest": [asdict(tensor) for tensor in hbm.largest],
        "source": hbm.source,
    }


def _time(time: StepTime | None) -> dict[str, Any]:
    if time is None:
        return {"step_s": None, "step_s_range": None, "parts_s": None, "calibration": None, "ops": []}
    return {
        "step_s": time.step_s,
        "step_s_range": list(time.range_s),
        "parts_s": dict(time.parts_s),
        "calibration": time.calibration,
        "ops": [asdict(op) for op in time.ops[:MOST_OPS]],
    }
