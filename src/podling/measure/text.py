"""A bench in words."""

from podling.files import counted, show_binary
from podling.measure.bench import Bench
from podling.measure.generation import GenerationSpeed
from podling.model.spec import param_count
from podling.parallel.axes import mesh_text
from podling.train.progress.words import count, seconds, share

BOUND = {
    "data": "the loader: the steps wait for batches",
    "matmul": "matrix products, as it should be",
    "memory": "passes over memory: what is read and written between the products",
    "compute": "arithmetic beside the products, such as exp and tanh",
    "collective": "what devices send one another",
    "unknown": "something else than matrix products; which work that is, podling cannot tell here",
}
READING = 0.5
"""Share of the time that reading weights must explain to be called the bound of generation."""


def lines(bench: Bench) -> list[str]:
    """What was measured, a fact a line; names in the first column."""
    setup, peaks, step = bench.setup, bench.peaks, bench.step
    many, kind = setup.mesh.size, setup.devices[0].device_kind
    mesh = f" ({mesh_text(setup.mesh.shape)})" if many > 1 else ""
    config = setup.config
    published = peaks.published
    known = published is not None and published.flops_per_s is not None
    sheet = f", {share(peaks.flops_per_s / published.flops_per_s)} of the published peak" if known else ""  # type: ignore
    memory = f", {show_binary(step.memory.total_bytes)} a device" if step.memory else ""
    found = [
        ("device", f"{many} x {kind}{mesh}, {setup.dtype.name}"),
        ("peaks", f"{_flops(peaks.flops_per_s)} a device ({peaks.flops_source}){sheet}"),
        ("", f"{peaks.read_bytes_per_s / 1e9:,.1f} GB/s of reading memory, measured here"),
        ("model", f"{config.model.preset}, {param_count(config.model):,} parameters"),
        ("batch", str(setup.plan)),
        *(("", f"step: {choice}") for choice in setup.choices if choice.said),
        ("program", f"compiled in {seconds(step.compile_s)}{memory}"),
        ("training", f"{count(bench.tokens_per_s)} tokens/s, MFU {share(bench.mfu)} of the measured peak"),
        ("", f"a step takes {seconds(step.step_s)} ({_spread(bench)})"),
        ("", f"waiting for data {share(step.wait_share)}"),
        ("", f"bound by {BOUND[bench.bound]}"),
        *(("", text) for text in _parts(bench)),
        ("loader", f"{count(bench.loader_tokens_per_s)} tokens/s, {_times(bench)} what the steps take"),
    ]
    found += [("generation" if not index else "", _generation(one)) for index, one in enumerate(bench.generation)]
    if bench.disturbed:
        found.append(("note", f"other programs kept {counted_cores(bench)} busy meanwhile: quiet, this is faster"))
    return [f"{name:<12}{text}" for name, text in found]


def _flops(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:,.0f} TFLOP/s" if flops_per_s >= 1e13 else f"{flops_per_s / 1e9:,.0f} GFLOP/s"


def _spread(bench: Bench) -> str:
    step = bench.step
    return f"median of {counted(step.steps, 'step')}, {seconds(step.least_s)} to {seconds(step.most_s)}"


def _times(bench: Bench) -> str:
    times = bench.loader_tokens_per_s / bench.tokens_per_s
    return f"{times:,.0f} times" if times >= 10 else f"{times:.1f} times"


def _parts(bench: Bench) -> list[str]:
    if bench.predicted is None:
        return [f"its parts are not known: {bench.unknown}"]
    parts = sorted(((part_s, kind) for kind, part_s in bench.predicted.parts_s.items() if part_s > 0), reverse=True)
    shares = ", ".join(f"{kind} {part_s / bench.predicted.step_s:.0%}" for part_s, kind in parts)
    return [f"its program is {shares} of {seconds(bench.predicted.step_s)} that podling foretells"]


def _generation(one: GenerationSpeed) -> str:
    asked = f"{counted(one.prompts, 'prompt')} of {counted(one.prompt_tokens, 'token')}"
    first = f"{asked}: first token after {seconds(one.first_token_s)}"
    if one.tokens_per_s is None or one.read_share is None:
        return first
    bound = "reading weights and cache" if one.read_share >= READING else "work on few numbers at a time"
    return (
        f"{first}, then {count(one.tokens_per_s)} tokens/s; bound by {bound}, "
        f"{share(one.read_share)} of what reading them allows"
    )


def counted_cores(bench: Bench) -> str:
    """'0.8 cores'."""
    return f"{bench.others:.1f} cores"
