"""Draw what a terminal showed: `tmux capture-pane -e -p | python docs/images/picture.py TITLE > train.svg`."""

import io
import re
import sys

from rich.console import Console
from rich.text import Text

lines = sys.stdin.read().rstrip().split("\n")
width = max(Text.from_ansi(line).cell_len for line in lines)
console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
for line in lines:
    console.print(Text.from_ansi(line), no_wrap=True, overflow="ignore", crop=False)
svg = console.export_svg(title=sys.argv[1])
# The picture asks nothing of the network: whatever monospace font is there will do.
print(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", "monospace"))
