"""The picture: well-formed, everything inside it, a colour for each part of the state."""

import itertools
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import jax.numpy as jnp
import pytest

from podling import topology
from podling.files import show_binary
from podling.layout.describe import ESTIMATE_NOTE, describe
from podling.layout.grid import directions, grid_of_count, grid_of_topology, plane_rows
from podling.layout.svg import picture
from podling.parallel.axes import read_mesh
from podling.presets import PRESETS
from podling.topology import parse_topology
from podling.tuning import settled

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
        config = settled(config, "tpu", parsed.chip.device_kind)
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
    parts = layout.memory_estimate_bytes
    assert len(bars) == len(parts) == 7
    end = 16.0
    for bar, (_, size) in zip(bars, parts.items(), strict=True):
        assert float(bar.get("x", 0)) == pytest.approx(end, abs=0.1)  # each begins where the one before ends
        end += 448 * size / layout.device_memory_bytes
        assert float(bar.get("width", 0)) == pytest.approx(448 * size / layout.device_memory_bytes, abs=0.1)
    assert root.find(f"{SVG}line") is None
    assert drawn("gpt2-xl", "v5e:1x1", "data=1")[1].find(f"{SVG}line") is not None  # past its memory


@pytest.mark.parametrize("chips", ["v3:32x16", "v3:16x32", "v3:16x16", "v5e:16x16", "v3:2x2"])
def test_labels_of_chips_do_not_touch(chips):
    _, root = drawn("gpt2", chips, f"data={parse_topology(chips).devices // 2},tensor=2")
    labels = [text for text in root.iter(f"{SVG}text") if (text.text or "").isdecimal() and text.get("class") == "soft"]
    across = [text for text in labels if text.get("text-anchor") == "middle"]
    assert across[0].text == "0" and len({text.text for text in across}) == len(across) >= 2
    places = [float(text.get("x", 0)) for text in across]
    assert min(b - a for a, b in itertools.pairwise(places)) >= 8 * len(across[-1].text or "")
    down = [float(text.get("y", 0)) for text in labels if text.get("text-anchor") is None]
    assert down and min((b - a for a, b in itertools.pairwise(down)), default=12) >= 12
    left, right = (next(text for text in across if text.text == x) for x in ("0", across[-1].text))
    cells = sorted({float(rect.get("x", 0)) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "cell"})
    chips_wide, cores = parse_topology(chips).shape[0], len(cells) // parse_topology(chips).shape[0]
    width = (cells[-1] - cells[0]) / (len(cells) - 1)
    for label in (left, right):  # in the middle of the chip's cells
        assert float(label.get("x", 0)) == pytest.approx(cells[0] + (int(label.text) + 0.5) * width * cores, abs=0.2)
    assert int(right.text) < chips_wide


def test_dense_grids_say_which_way_the_axes_run():
    def words(chips: str, mesh: str) -> str:
        return " ".join(text.text or "" for text in drawn("gpt2", chips, mesh)[1].iter(f"{SVG}text"))

    assert "data runs down; fsdp runs to the right" in words("v5e:16x16", "data=16,fsdp=16")
    assert "data runs down; fsdp runs to the right and down" in words("v5e:16x16", "data=8,fsdp=32")
    assert " runs " not in words("v5e:2x4", "data=2,fsdp=4")  # its cells say it themselves
    grid = grid_of_topology(parse_topology("v4:2x2x4"), read_mesh("data=4,tensor=4")[0])
    by_plane = [plane_rows(grid, z) for z in range(4)]
    assert directions(grid, by_plane) == "data runs from plane to plane; tensor runs to the right and down"


def test_many_devices_without_a_place_make_no_endless_picture():
    _, root = drawn("gpt2", "", "data=512", 1 << 34)
    assert float(root.get("viewBox", "").split()[3]) < 1200


def test_the_estimate_is_called_one():
    layout, root = drawn("gpt2-xl", "v5e:2x4", "fsdp=8")
    words = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
    assert f"One device, estimated: {show_binary(layout.estimated_bytes)} of 15.75 GiB" in words
    assert ESTIMATE_NOTE in words


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
