"""The table of bench/cpu_training.py, and whether its target is met."""

import math
import os
import statistics

from harness import OTHERS
from work import Work

PEERS = ("nanogpt", "nanogpt-compile", "nanogpt-compile-fused", "transformers", "llmc")
FIRST_LOSS = 0.5
"""Nats that an untrained model's loss may be from ln(vocabulary)."""

Rows = list[dict]


def table(work: Work, rows: Rows, missing: dict[str, str]) -> str:
    """What was measured, and whether the target is met.

    Args:
        work: what was done.
        rows: samples, of one call of the script or several.
        missing: why some systems have none.
    """
    every: dict[str, Rows] = {}
    for row in rows:
        every.setdefault(row["name"], []).append(row)
    good = {name: [row for row in mine if row["others"] < OTHERS] or mine for name, mine in every.items()}
    speedups = {name: _speedup(good.get("podling", []), mine) for name, mine in good.items()}
    left_out = {name: why for name, why in missing.items() if name not in good}
    lines = [
        f"{work.name}: {work.layers} layers, {work.heads} heads, {work.embed} wide, vocabulary {work.vocab_size}, "
        f"{work.rows} rows of {work.context}, float32, {os.cpu_count()} cores",
        f"{'':24}{'ms a step':>11}{'smallest':>11}{'largest':>11}{'samples':>9}{'tokens/s':>11}{'podling':>9}"
        f"{'MB steps':>10}{'MB whole':>10}{'last loss':>11}",
    ]
    for name, mine in sorted(good.items(), key=lambda item: _ms(item[1])):
        lines.append(_line(work, name, mine, speedups[name]))
        if disturbed := sum(row["others"] >= OTHERS for row in every[name]):
            what = "left out" if disturbed < len(every[name]) else "there are no others: not to be relied on"
            lines.append(f"{'':24}{disturbed} of {len(every[name])} samples beside other work; {what}")
    lines += [f"{name:24}skipped: {why}" for name, why in left_out.items()]
    peers = {name: speedup for name, speedup in speedups.items() if name in PEERS and not math.isnan(speedup)}
    if not peers:
        return "\n".join([*lines, "no peer was measured beside podling: not met"])
    best = min(peers, key=lambda name: peers[name])
    memory = _memory(good["podling"], "peak_bytes") / _memory(good[best], "peak_bytes")
    faults = [fault for name, mine in good.items() for fault in _faults(work, name, mine)]
    faults += [f"{name} was skipped" for name in left_out]
    faults += [f"{peers[best]:.2f}x is below {work.target}x"] if peers[best] < work.target else []
    if work.most_memory is not None and memory > work.most_memory:
        faults.append(f"memory {memory:.2f}x is above {work.most_memory}x")
    words = f"against {best}, the fastest peer: {peers[best]:.2f}x tokens/s (target {work.target}x)"
    verdict = f"not met ({'; '.join(faults)})" if faults else "met"
    return "\n".join([*lines, f"{words}, memory {memory:.2f}x: {verdict}"])


def _speedup(ours: Rows, theirs: Rows) -> float:
    """Of medians over the calls that had both; NaN where none had."""
    both = {row["call"] for row in ours} & {row["call"] for row in theirs}
    ours, theirs = ([row for row in rows if row["call"] in both] for rows in (ours, theirs))
    return _ms(theirs) / _ms(ours) if both else math.nan


def _line(work: Work, name: str, mine: Rows, speedup: float) -> str:
    times = [row["step_s"] * 1e3 for row in mine]
    tokens_per_s = work.step_tokens / _ms(mine) * 1e3
    return (
        f"{name:24}{_ms(mine):11.2f}{min(times):11.2f}{max(times):11.2f}{len(times):9}{tokens_per_s:11,.0f}"
        f"{speedup:8.2f}x{_memory(mine, 'peak_bytes'):10,.0f}{_memory(mine, 'whole_peak_bytes'):10,.0f}"
        f"{mine[-1]['loss']:11.3f}"
    )


def _faults(work: Work, name: str, mine: Rows) -> list[str]:
    """What shows that a system did not do the work."""
    first, last, untrained = mine[0]["first_loss"], mine[-1]["loss"], math.log(work.vocab_size)
    faults = []
    if not abs(first - untrained) < FIRST_LOSS:
        faults.append(f"{name}'s first loss is {first:.3f}, an untrained model's {untrained:.3f}")
    if not last < first:
        faults.append(f"{name} does not learn: {first:.3f}, then {last:.3f}")
    return faults


def _ms(rows: Rows) -> float:
    return statistics.median(row["step_s"] for row in rows) * 1e3


def _memory(rows: Rows, key: str) -> float:
    return max(row[key] for row in rows) / 1e6
