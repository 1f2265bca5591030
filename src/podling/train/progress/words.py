"""Figures in words: each unknown one is a dash, never a made-up number."""

from typing import Any

from podling.data.events import PrepareEvent
from podling.files import show_bytes

BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float | None) -> str:
    """'0:07', '12:05', '3:02:45'; '-' when unknown."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def count(number: float | None) -> str:
    """Three figures and a unit: '950', '12.3K', '1.24M', '6.64B'."""
    if number is None:
        return "-"
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size * 0.9995:  # 999.95K is 1.00M
            return f"{number / size:#.3g}".rstrip(".") + unit
    return f"{number:.0f}"


def share(value: float | None) -> str:
    """'41.2%' for 0.412; '-' when unknown."""
    return "-" if value is None else f"{value:.1%}"


def loss(value: float | None) -> str:
    """Nats per token, to a ten-thousandth."""
    return "-" if value is None else f"{value:.4f}"


def step_line(record: dict[str, Any], total_steps: int) -> str:
    """One step in one line of a log."""
    total = f"{total_steps:,}"
    parts = [
        f"step {record['step']:>{len(total)},}/{total}",
        f"loss {loss(record.get('loss'))}",
        f"lr {record['lr']:.2e}" if record.get("lr") is not None else "lr -",
        f"{count(record.get('tokens_per_s'))} tokens/s",
        f"MFU {share(record.get('mfu'))}",
        f"data wait {share(record.get('data_wait_share'))}",
        f"left {duration(record.get('left_s'))}",
    ]
    return "  ".join(parts)


def seconds(value: float) -> str:
    """Three figures and a unit: '83.0 ms', '1.24 s'; from a thousand seconds on all of them: '1,770 s'."""
    if value >= 999.5:
        return f"{value:,.0f} s"
    return f"{value:#.3g}".rstrip(".") + " s" if value >= 0.9995 else f"{value * 1e3:#.3g}".rstrip(".") + " ms"


def predicted(facts: dict[str, Any]) -> str:
    """A step's foretold time with its range, of the facts in prediction.json."""
    low, high = facts["step_s_range"]
    return f"{seconds(facts['step_s'])} a step ({seconds(low)} to {seconds(high)})"


def held_against(facts: dict[str, Any] | None) -> str:
    """What was foretold beside what was measured; of a summary's `prediction`."""
    if not facts:
        return ""
    if facts.get("step_s") is None:
        return f"none: {facts.get('missing', 'unknown')}"
    if facts.get("measured_step_s") is None:
        return f"{predicted(facts)}, and no step was timed"
    ratio = facts["measured_step_s"] / facts["step_s"]
    share = f"{abs(ratio - 1):.0%}"
    off = "as predicted" if share == "0%" else f"took {share} {'longer' if ratio > 1 else 'less time'} than predicted"
    where = " in this session" if facts.get("measured_in") == "this session" else ""
    return f"{predicted(facts)}, measured {seconds(facts['measured_step_s'])}{where}: {off}"


def evaluation_line(record: dict[str, Any], baseline: Any = None) -> str:
    """One evaluation in one line, beside the model it has to beat."""
    words = f"step {record['step']:,}  held-out loss {loss(record['val_loss'])} nats/token"
    if record.get("val_bits_per_byte") is not None:
        words += f", {record['val_bits_per_byte']:.4f} bits/byte"
    words += f", perplexity {record['val_perplexity']:.2f}"
    return words + (f" (bigram {loss(baseline.bigram_loss)})" if baseline is not None else "")


def prepare_line(event: PrepareEvent) -> str:
    """How far one stage of preparing text has come."""
    done = show_bytes(event.done_bytes)
    of = f" of {show_bytes(event.total_bytes)}" if event.total_bytes is not None else ""
    left = f", {duration(event.left_s)} left" if event.left_s is not None else ""
    tokens = f", {count(event.tokens)} tokens" if event.tokens else ""
    return f"{event.stage}: {done}{of}, {event.mb_per_s:.1f} MB/s{tokens}{left}"


def about(seconds: float | None) -> str:
    """', about 40 s' after the name of something that takes a while."""
    if seconds is None:
        return ""
    return f", about {seconds:.0f} s" if seconds < 100 else f", about {seconds / 60:.0f} min"


def how_far(share: float, took_s: float) -> str:
    """`42%, 1:20 left` of something that goes on at one speed; the share is above 0."""
    return f"{share:.0%}, {duration(took_s / share - took_s)} left"


def printable(text: str) -> str:
    """Model output with nothing in it that could steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def first_lines(text: str, most: int = 16) -> str:
    """The beginning of a sample, saying how much was left out."""
    lines = printable(text).strip("\n").split("\n")
    more = f"\n... {len(lines) - most} more lines" if len(lines) > most else ""
    return "\n".join(lines[:most]) + more


class Curve:
    """A loss curve of any length in bounded memory: means over equal, growing stretches of steps."""

    SIZE = 64

    def __init__(self) -> None:
        self._means: list[float] = []
        self._stretch = 1
        self._sum, self._count = 0.0, 0

    def add(self, value: float | None) -> None:
        """Take the next step's value."""
        if value is None or value != value or abs(value) == float("inf"):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._stretch:
            return
        self._means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._means) == 2 * self.SIZE:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._stretch *= 2

    def draw(self, width: int) -> str:
        """One line of blocks, from the first step to the newest."""
        means = self._means
        if len(means) > width:
            edges = [round(i * len(means) / width) for i in range(width + 1)]
            means = [sum(means[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
        if not means:
            return ""
        low, high = min(means), max(means)
        scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
        return "".join(BLOCKS[round((value - low) * scale)] for value in means)
