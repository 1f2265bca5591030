"""What `podling mesh` prints, and where the grid puts each device."""

import io
import re
from dataclasses import replace

import jax.numpy as jnp
import pytest
from rich.console import Console

from podling import topology
from podling.files import show_binary
from podling.layout.describe import ESTIMATE_NOTE, Layout, describe
from podling.layout.grid import grid_of_count, grid_of_topology, legend
from podling.layout.table import ACTIVATIONS, CAST, GRADIENTS, MICRO_GRADIENTS, PARAMETERS
from podling.layout.text import show
from podling.parallel.axes import read_mesh
from podling.presets import PRESETS
from podling.topology import parse_topology


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)


def layout(model: str, chips: str, mesh: str) -> Layout:
    config = PRESETS[model].config
    config = replace(config, model=replace(config.model, vocab_size=50257))
    parsed = parse_topology(chips)
    grid = grid_of_topology(parsed, read_mesh(mesh)[0])
    return describe(config, grid, parsed.name, "", parsed.device_bytes, jnp.dtype("bfloat16"))


def printed(drawn: Layout, width: int = 80, *, terminal: bool = False) -> str:
    out = io.StringIO()
    show(drawn, Console(file=out, width=width, force_terminal=terminal))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize(
    ("model", "chips", "mesh"),
    [
        ("gpt2-xl", "v5e:2x4", "fsdp=8"),
        ("gpt2-xl", "v5e:16x16", "data=16,fsdp=16"),
        ("gpt2", "v5e:16x16", "data=16,fsdp=4,tensor=4"),
        ("gpt2-medium", "v4:2x2x4", "data=2,fsdp=2,tensor=4"),
        ("gpt2", "v3:2x2", "data=8"),
        ("gpt2", "v3:16x16", "data=512"),
        ("gpt2", "v3:16x16", "data=32,fsdp=4,tensor=4"),
        ("gpt2-medium", "v4:4x4x16", "data=16,fsdp=16"),
    ],
)
def test_nothing_is_cut_and_no_line_is_too_long(model, chips, mesh, width):
    drawn = layout(model, chips, mesh)
    text = printed(drawn, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text and "\x1b" not in text
    words = set(re.findall(r"[\w.]+", text))
    for row in drawn.rows:
        if row.rests and row.axes:
            assert row.name in words and "x".join(map(str, row.shape)) in words, row
    drawn_ids = [line.split("│")[3:-1] for line in text.splitlines() if "│device" in line.replace(" ", "")]
    assert sorted(int(cell) for line in drawn_ids for cell in line) == list(range(len(drawn.grid.cells)))
    for axis, size in drawn.sizes.items():
        assert (f"{axis}={size}" in text) == (size > 1)


def test_the_grid_has_every_device_where_it_is():
    lines = printed(layout("gpt2-xl", "v5e:2x4", "data=2,fsdp=4")).splitlines()
    numbers = {}
    for index, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if len(cells) == 4 and cells[1] == "device":
            below = [[cell.strip() for cell in lines[index + more].split("│")[3:-1]] for more in (1, 2)]
            for x, device in enumerate(cells[2:]):
                numbers[int(device)] = (x, int(cells[0]), int(below[0][x]), int(below[1][x]))
    # id: x, y, data, fsdp; without the compiler in order of ids
    assert numbers == {i: (i % 2, i // 2, i // 4, i % 4) for i in range(8)}


def test_the_numbers_of_a_row():
    text = printed(layout("gpt2-xl", "v5e:2x4", "fsdp=8"))
    (line,) = [line for line in text.partition("first moments")[0].splitlines() if line.startswith("blocks.qkv_kernel")]
    assert line.split() == ["blocks.qkv_kernel", "48x3x1600x1600", "48x3x200x1600", "175.8", "MiB"]
    assert "  layers qkv embed/fsdp heads\n" in re.sub(r" +\n", "\n", text)
    assert "pip install 'podling[tpu]'" in text.replace("\n", " ").replace("  ", " ")  # not taken for rich's markup


def test_what_fills_a_device_adds_up():
    drawn = layout("gpt2-xl", "v5e:2x4", "fsdp=8")
    parts = drawn.memory_estimate_bytes
    assert parts[PARAMETERS] == parts[GRADIENTS] == parts["first moments (mu)"]
    assert drawn.state_bytes == 3 * parts[PARAMETERS] + 12  # and three counters
    text = printed(drawn)
    assert f"together, an estimate {show_binary(sum(parts.values()))}" in re.sub(" +", " ", text)
    assert ESTIMATE_NOTE in re.sub(r"\s+", " ", text)
    assert re.search(r"^parameters +746\.1 MiB", text, re.M) and re.search(r"^its memory +15\.75 GiB", text, re.M)


def test_copies_are_counted_where_there_are_any():
    """With accumulation a second set of gradients, and in another precision than float32 a copy of the weights."""
    config = PRESETS["gpt2"].config
    config = replace(config, model=replace(config.model, vocab_size=50257))

    def parts(micro_batch: int, dtype: str) -> dict[str, int]:
        train = replace(config.train, micro_batch=micro_batch)
        grid = grid_of_count(8, read_mesh("fsdp=8")[0])
        return describe(replace(config, train=train), grid, "", "", 1 << 40, jnp.dtype(dtype)).memory_estimate_bytes

    rows = config.train.batch_tokens // config.model.context
    whole, cut, half = parts(rows, "float32"), parts(rows // 2, "float32"), parts(rows // 2, "bfloat16")
    assert set(cut) - set(whole) == {MICRO_GRADIENTS} and cut[MICRO_GRADIENTS] == cut[GRADIENTS]
    assert set(half) - set(cut) == {CAST}
    assert 0.495 < half[CAST] / half[PARAMETERS] < 0.5  # LayerNorms are used in float32
    assert cut[ACTIVATIONS] * 2 == whole[ACTIVATIONS]


def test_colours_only_in_a_terminal():
    assert "\x1b[36m" in printed(layout("gpt2", "v5e:2x4", "fsdp=8"), terminal=True)


def test_the_legend_counts_copies():
    assert legend(grid_of_count(8, read_mesh("data=8")[0])) == "every device holds the whole state"
    assert legend(grid_of_count(1, read_mesh("data=1")[0])) == "the device holds the whole state"
    assert legend(grid_of_count(8, read_mesh("fsdp=4,tensor=2")[0])) == "every device holds its own 1/8 of the state"
    both = legend(grid_of_count(16, read_mesh("data=4,fsdp=2,tensor=2")[0]))
    assert both == "same fsdp index and tensor index (same colour): the same 1/4 of the state, on 4 devices"
