"""A plan written by hand, for what shows and records plans."""

from dataclasses import replace

from podling.cost.records import Hbm, Kind, Layout, OpTime, StepTime, Tensor
from podling.plan.records import BudgetUse, Loss, Option, Plan
from podling.plan.target import parse_target
from podling.presets import PRESETS

GIB = 2**30
PARTS: dict[Kind, float] = {"matmul": 0.3, "compute": 0.05, "memory": 0.1, "collective": 0.05}


def time(step_s: float = 0.5) -> StepTime:
    op = OpTime("fusion.7", "main", "jit(train_step)/while/body/jvp(mlp)/dot_general", "matmul", 12, 0.2, 0.1, 9, 7, 5)
    other = replace(op, name="copy.3", op_name="", kind="memory", step_s=0.01)
    parts: dict[Kind, float] = {kind: part * step_s / 0.5 for kind, part in PARTS.items()}
    return StepTime(step_s, (0.4 * step_s / 0.5, 0.6 * step_s / 0.5), parts, "within 20% of two runs", (op, other))


def hbm(gib: float = 6.0, source: str = "compiler") -> Hbm:
    total = int(gib * GIB)
    categories = {"parameters": total // 2, "activations": total // 4}
    categories["temporary"] = total - sum(categories.values())
    largest = (
        Tensor("params.blocks.mlp_up", "parameters", "f32[12,768,3072]", 108 * 2**20),
        Tensor("logits", "logits", "f32[8,1024,50304]", 1571 * 2**20),
    )
    return Hbm(total, int(15.75 * GIB), categories, largest, source)


def option(mesh: str = "data=8", step_s: float | None = 0.5, gib: float = 6.0, **how) -> Option:
    layout = Layout(mesh, how.pop("micro_batch", 64), how.pop("accumulation", 8), "dots", how.pop("loss_chunk", 256))
    return Option(layout, hbm(gib, how.pop("source", "compiler")), time(step_s) if step_s else None, **how)


def plan(**changes) -> Plan:
    config = PRESETS["gpt2"].config
    config = replace(config, model=replace(config.model, vocab_size=50257))
    refusal = "needs 19.00 GiB of 15.75 GiB, most of it logits; loss chunks of 256 make it fit, at 3% of the speed"
    made = Plan(
        target=parse_target("v5e-8"),
        config=config,
        chosen=option(compile_s=41.0),
        runners_up=(option("fsdp=8", 0.55, 5.0), option("data=2,fsdp=4", 0.7, 5.5, accumulation=1, loss_chunk=0)),
        refused=(option("data=8", None, 19.0, refusal=refusal, compiler_text="/tmp/plan/compiler.txt"),),
        tokens_per_s=1048576.0,
        mfu=0.4123,
        peak_flops=197e12,
        params=124439808,
        budget=BudgetUse(32400, 60, 45, 900, 240, 60, 31095, 62190, 32605470720, 3.26, ("a checkpoint takes 3 s",)),
        loss=Loss((3.05, 3.21), "Hoffmann et al. 2022; missed two public runs by up to 3%"),
        command="podling train --model gpt2 --mesh data=8 --train.remat dots --steps 62190 --data PATH",
        plan_s=130.0,
        compiled=4,
        notes=("a note",),
    )
    return replace(made, **changes)
