"""The picture: well-formed, everything inside it, a colour for each part of the state."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import jax.numpy as jnp
import pytest

from podling.layout import topology
from podling.layout.describe import describe, memory
from podling.layout.grid import grid_of_count, grid_of_topology
from podling.layout.svg import picture
from podling.layout.topology import parse_topology
from podling.parallel.axes import read_mesh
from podling.presets import PRESETS

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)


def drawn(model: str, chips: str, mesh: str, memory_bytes: int = 0):
    config = PRESETS[model].config
    config = replace(config, model=replace(config.model, vocab_size=50257))
    sizes = read_mesh(mesh)[0]
    if chips:
        parsed = parse_topology(chips)
        grid, memory_bytes = grid_of_topology(parsed, sizes), memory_bytes or parsed.device_bytes
    else:
        grid = grid_of_count(math.prod(sizes.values()), sizes)
    layout = describe(config, grid, chips or "8 x <cpu> & more", "", memory_bytes, jnp.dtype("bfloat16"))
    return layout, ET.fromstring(picture(layout))


@pytest.mark.parametrize(
    ("model", "chips", "mesh", "colours"),
    [
        ("gpt2-xl", "v5e:2x4", "fsdp=8", 8),
        ("gpt2", "v5e:2x4", "data=2,fsdp=2,tensor=2", 4),
        ("gpt2", "v5e:2x4", "data=8", 1),
        ("gpt2-medium", "v4:2x2x4", "data=4,tensor=4", 4),
        ("gpt2-xl", "v5e:16x16", "data=16,fsdp=16", 16),
        ("gpt2", "v3:2x2", "data=4,tensor=2", 2),
        ("gpt2", "", "data=2,fsdp=4", 4),
    ],
)
def test_a_cell_for_each_device_and_a_colour_for_each_part_of_the_state(model, chips, mesh, colours):
    layout, root = drawn(model, chips, mesh, 0 if chips else 1 << 34)
    cells = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "cell"]
    assert len(cells) == len(layout.grid.cells)
    assert len({rect.get("fill") for rect in cells}) == colours
    places = {(rect.get("x"), rect.get("y")) for rect in cells}
    assert len(places) == len(cells)


@pytest.mark.parametrize("chips", ["v5e:2x4", "v5e:16x16", "v5e:1x1"])
def test_everything_is_inside_the_picture(chips):
    layout, root = drawn("gpt2", chips, f"data={parse_topology(chips).devices}")
    width, height = map(float, root.get("viewBox", "").split()[2:])
    assert width == 480
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width + 0.1 and y + h <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("y", 0)) <= height and float(text.get("font-size", 0)) >= 12
        if text.get("text-anchor") is None:  # a generous width of a letter
            assert float(text.get("x", 0)) + 0.62 * float(text.get("font-size", 0)) * len(text.text or "") <= width


def test_bars_are_as_long_as_what_they_stand_for():
    layout, root = drawn("gpt2-xl", "v5e:2x4", "fsdp=8")
    bars = [rect for rect in root.iter(f"{SVG}rect") if rect.get("height") == "9" and rect.get("class") is None]
    parts = memory(layout)
    assert len(bars) == len(parts) == 5
    end = 16.0
    for bar, (_, size) in zip(bars, parts, strict=True):
        assert float(bar.get("x", 0)) == pytest.approx(end, abs=0.1)  # each begins where the one before ends
        end += 448 * size / layout.device_bytes
        assert float(bar.get("width", 0)) == pytest.approx(448 * size / layout.device_bytes, abs=0.1)
    assert root.find(f"{SVG}line") is None
    assert drawn("gpt2-xl", "v5e:1x1", "data=1")[1].find(f"{SVG}line") is not None  # past its memory


def test_words_are_escaped_and_both_schemes_are_served():
    layout, root = drawn("gpt2", "", "data=8", 1 << 34)
    assert root.findtext(f"{SVG}title") == "gpt2 on 8 x <cpu> & more"
    assert "prefers-color-scheme: dark" in picture(layout) and "http" not in picture(layout).replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_the_picture_in_the_documents_is_what_the_code_draws(root):
    """Whatever the arrangement: the same words, as often."""
    _, now = drawn("gpt2-xl", "v5e:2x4", "data=2,fsdp=4")
    kept = ET.parse(root / "docs/images/mesh.svg").getroot()
    words = [sorted(text.text or "" for text in tree.iter(f"{SVG}text")) for tree in (now, kept)]
    assert words[0] == [word.replace(" (TPU v5 lite)", "") for word in words[1]]
    assert now.get("viewBox") == kept.get("viewBox")
