"""Pictures written by hand as SVG, 480 units wide so that a phone shows them legibly.

Colours follow the reader's light or dark scheme, and no font or script is fetched.
"""

from collections.abc import Iterable
from html import escape

WIDTH, MARGIN = 480, 16
INNER = WIDTH - 2 * MARGIN
COLOURS = ("#2f81f7", "#8957e5", "#bf4b8a", "#d29922", "#3fb950", "#db6d28", "#1b7c83")
STYLE = """
text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; fill: #1f2328 }
.page { fill: #ffffff } .soft { fill: #59636e } .track { fill: #8c959f; fill-opacity: .22 } .full { stroke: #cf222e }
.cell { stroke: #ffffff; stroke-width: 2 } .rule { stroke: #8c959f; stroke-opacity: .4 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #0d1117 } .soft { fill: #9198a1 } .full { stroke: #ff7b72 }
  .cell { stroke: #0d1117 }
}"""


def document(title: str, parts: Iterable[str], height: int) -> str:
    """The whole SVG file around what is drawn."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(title, quote=True)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(
    x: float, y: float, words: str, size: int, *, bold: bool = False, soft: bool = False, anchor: str = "start"
) -> str:
    """One line of text whose baseline is at `y`."""
    weight = ' font-weight="600"' if bold else ""
    kind = ' class="soft"' if soft else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{weight}{kind}{place}>{escape(words)}</text>'
