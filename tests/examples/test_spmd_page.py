"""docs/spmd.md: every line of code on it runs, and what it says of old names and of the programs is so."""

import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "spmd.md").read_text(encoding="utf-8")


def section(page: str, title: str) -> list[list[str]]:
    """The cells of the tables under a heading, without their heads."""
    text = re.split(r"^## ", page, flags=re.M)
    (part,) = [part for part in text if part.startswith(title)]
    rows = [line.strip("|").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_code_runs(page: str) -> None:
    """All blocks, one after the other, in a fresh interpreter with the eight devices the first of them asks for."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S))
    assert code.count("assert ") >= 10
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    types, refusal = done.stdout.splitlines()
    assert f"# {types}\n" in page  # what is printed stands beside the line that prints it
    assert refusal.startswith("The context mesh") and "should match the mesh passed to shard_map" in refusal


def test_the_shell_commands_are_the_programs(page: str, root: Path) -> None:
    commands = re.findall(r"^python (examples/\S+)$", page, re.M)
    assert len(commands) == 3 and all((root / path).is_file() for path in commands)


def test_the_lines_that_differ_are_those_of_the_programs(page: str, root: Path) -> None:
    sources = [
        {line.strip().removesuffix(":") for line in (root / f"examples/spmd/{name}.py").read_text().splitlines()}
        for name in ("pmap", "shard_map", "explicit")
    ]
    quoted = 0
    for _, *cells in section(page, "The lines that differ"):
        for cell, lines in zip(cells, sources, strict=True):
            if cell.startswith("`"):
                assert cell.strip("`") in lines, cell
                quoted += 1
    assert quoted >= 15


def test_old_names_are_what_the_page_says(page: str) -> None:
    names = [row for row in section(page, "Old name, new name") if row[1] in ("gone", "warns", "works")]
    assert {row[1] for row in names} == {"gone", "warns", "works"}
    for old, state, new in names:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            found = find(old.strip("`"))
        assert (found, bool(heard)) == {"gone": (False, False), "warns": (True, True), "works": (True, False)}[state], (
            old
        )
        today = re.findall(r"`(jax\.[\w.]+)", new)
        assert today and all(map(find, today)), new


def find(name: str) -> bool:
    """Whether `jax.something.or.other` is there."""
    module, _, attribute = name.rpartition(".")
    try:
        getattr(importlib.import_module(module), attribute)
    except (AttributeError, ModuleNotFoundError):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            return False
    return True


def test_links_lead_somewhere(page: str, root: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page)
    assert targets and all((root / "docs" / target).exists() for target in targets)
