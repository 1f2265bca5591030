"""Scaling as a picture: tokens/s and efficiency over the number of devices, on doubling axes."""

import math
from collections.abc import Sequence

from podling.plan.scaling import How, Scaling
from podling.svg import COLOURS, INNER, MARGIN, WIDTH, document, text
from podling.train.progress.words import count

LEFT, HEIGHT, GAP = MARGIN + 52, 190, 54
HOWS: dict[How, tuple[str, str]] = {
    "strong": (COLOURS[0], "strong: one batch, shared"),
    "weak": (COLOURS[3], "weak: the batch grows"),
}
Dots = list[tuple[float, float]]
Curves = dict[How, Dots]


def picture(scaling: Scaling) -> str:
    """The SVG document."""
    devices = sorted({point.devices for how in HOWS for point in scaling.points(how)})
    drawn = [number for number in devices if any(number == x for how in HOWS for x, _ in _speeds(scaling, how))]
    title = f"{scaling.model} on {scaling.chip}{_sizes(drawn)}"
    parts = [text(MARGIN, MARGIN + 20, title, 18, bold=True)]
    y = MARGIN + 44.0
    for colour, words in HOWS.values():
        parts.append(f'<rect x="{MARGIN}" y="{y - 10:.1f}" width="14" height="10" rx="2" fill="{colour}"/>')
        parts.append(text(MARGIN + 20, y, words, 13))
        y += 18
    speeds: Curves = {how: _speeds(scaling, how) for how in HOWS}
    parts += _panel("tokens/s; dashed: as many times as there are devices", devices, speeds, y + 24, _ideal(speeds))
    shares: Curves = {how: _shares(scaling, how) for how in HOWS}
    parts += _panel("efficiency, %", devices, shares, y + 24 + HEIGHT + GAP + 16, None)
    y += 24 + 2 * (HEIGHT + GAP) + 18
    for words in (*scaling.measure(), *_missing(scaling), _footnote(scaling)):
        parts.append(text(MARGIN, y, words, 12, soft=True))
        y += 17
    return document(title, parts, round(y + MARGIN))


def _sizes(drawn: Sequence[int]) -> str:
    if not drawn:
        return ""
    return f", {drawn[0]} to {drawn[-1]} devices" if len(drawn) > 1 else f", {drawn[0]} devices"


def _missing(scaling: Scaling) -> list[str]:
    """What has no dot."""
    sizes = {how: [str(p.devices) for p in scaling.points(how) if not p.tokens_per_s] for how in HOWS}
    return [f"{how}, does not fit: {', '.join(numbers)}" for how, numbers in sizes.items() if numbers]


def _speeds(scaling: Scaling, how: How) -> Dots:
    return [(p.devices, p.tokens_per_s) for p in scaling.points(how) if p.tokens_per_s]


def _shares(scaling: Scaling, how: How) -> Dots:
    pairs = zip(scaling.points(how), scaling.efficiency(how), strict=True)
    return [(point.devices, 100 * value) for point, value in pairs if value is not None]


def _ideal(speeds: Curves) -> Dots:
    """From the first measured point of either curve, as many times as fast."""
    first = min((dots[0] for dots in speeds.values() if dots), default=None)
    last = max((dots[-1][0] for dots in speeds.values() if dots), default=0)
    return [] if first is None else [first, (last, first[1] * last / first[0])]


def _footnote(scaling: Scaling) -> str:
    sources = {point.source for point in (*scaling.strong, *scaling.weak) if point.source}
    words = {"compiler": "from compiled programs", "estimate": "estimated, nothing was compiled"}
    return words[sources.pop()] if len(sources) == 1 else "partly from compiled programs, partly estimated"


def _panel(heading: str, devices: Sequence[int], curves: Curves, y: float, ideal: Dots | None) -> list[str]:
    """A panel whose heading is at `y`: logarithmic upwards with an ideal line, from zero without."""
    parts = [text(MARGIN, y, heading, 13, soft=True)]
    top = y + 12
    values = [value for dots in (*curves.values(), ideal or []) for _, value in dots]
    if not values:
        return [*parts, text(LEFT, top + HEIGHT / 2, "nothing fits", 14)]
    logarithmic = ideal is not None
    low = 10 ** math.floor(math.log10(min(values))) if logarithmic else 0.0
    high = 10 ** math.ceil(math.log10(max(values))) if logarithmic else max(100.0, *values) * 1.05
    high = high if high > low else low * 10

    def across(value: float) -> float:
        first, last = math.log2(devices[0]), math.log2(max(devices[-1], devices[0] * 2))
        return LEFT + (math.log2(value) - first) / (last - first) * (WIDTH - MARGIN - 10 - LEFT)

    def up(value: float) -> float:
        height = math.log(value / low) / math.log(high / low) if logarithmic else value / high
        return top + HEIGHT * (1 - height)

    if logarithmic:
        marks = [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    else:
        apart = 25.0 * math.ceil(high / 250)
        marks = [apart * number for number in range(int(high // apart) + 1)]
    for mark in marks:
        parts.append(_line([(LEFT, up(mark)), (MARGIN + INNER, up(mark))], 'class="rule"'))
        parts.append(text(LEFT - 8, up(mark) + 4, count(mark), 12, soft=True, anchor="end"))
    for number in devices:
        parts.append(text(across(number), top + HEIGHT + 18, str(number), 12, soft=True, anchor="middle"))
    if ideal:
        parts.append(
            _line(
                [(across(x), up(v)) for x, v in ideal],
                'class="rule" style="stroke-opacity: 1" stroke-width="1.5" stroke-dasharray="5 4"',
            )
        )
    for how, dots in curves.items():
        places = [(across(x), up(v)) for x, v in dots]
        parts.append(_line(places, f'stroke="{HOWS[how][0]}" stroke-width="2"'))
        parts += [f'<circle cx="{x:.1f}" cy="{v:.1f}" r="3.5" fill="{HOWS[how][0]}"/>' for x, v in places]
    return parts


def _line(places: Sequence[tuple[float, float]], style: str) -> str:
    return f'<polyline fill="none" {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
