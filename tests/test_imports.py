"""Imports point one way, the light rooms stay light, and everything imports."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "podling"
MODULES = sorted(PACKAGE.rglob("*.py"))

FLOORS = [
    {"errors"},
    {"config", "files", "chips", "svg", "kernels", "startup"},
    {"data", "parallel", "presets", "hlo"},
    {"validate", "model", "hosts", "topology", "tuning"},
    {"cost"},
    {"run"},
    {"generate"},
    {"interop"},
    {"train"},
    {"layout", "plan", "explain", "measure", "launch", "report", "serve"},
    {"cli"},
    {"__main__"},
]
"""A room imports rooms of lower floors and its own: there is no circle of rooms."""

LIGHT = {
    "config",
    "errors",
    "files",
    "chips",
    "kernels",
    "topology",
    "presets",
    "validate",
    "startup",
    "tuning",
    "data",
    "launch",
    "cli",
}
LIGHT |= {"__main__", "__init__"}
LIGHT_FILES = {"cost/records.py", "cost/scaling_law.py", "plan/records.py", "plan/target.py", "plan/budget.py"}
NUMPY_IN_DATA = {"batches.py", "documents.py", "shards.py", "ngram.py"}
HEAVY = {"jax", "jaxlib", "numpy", "optax", "orbax", "grain", "scipy", "tensorstore"}


def room(path: Path) -> str:
    """`config` for config.py, `data` for data/corpus.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_light(path: Path) -> bool:
    if str(path.relative_to(PACKAGE)) in LIGHT_FILES:
        return True
    return room(path) in LIGHT and not (room(path) == "data" and path.name in NUMPY_IN_DATA)


def floor(name: str) -> int:
    return next(index for index, rooms in enumerate(FLOORS) if name in rooms)


def imported(tree: ast.AST) -> list[str]:
    """Dotted names of everything a piece of source imports; `from a import b` counts as a.b."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported_at_import_time(path: Path) -> list[str]:
    """Leaves out what stands inside functions and under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            return ast.copy_location(ast.Pass(), node)

        def visit_If(self, node: ast.If) -> ast.AST:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return ast.copy_location(ast.Pass(), node)
            self.generic_visit(node)
            return node

    return imported(Strip().visit(tree))


def test_the_rules_look_at_the_package() -> None:
    assert len(MODULES) > 20
    assert {room(path) for path in MODULES} >= {"cli", "data", "model", "train", "config"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_file(path: Path) -> None:
    here = room(path)
    text = path.read_text(encoding="utf-8")
    names = imported(ast.parse(text))
    if here != "__init__":
        for name in names:
            if name.startswith("podling.") and name != "podling.__version__":
                there = name.split(".")[1]
                assert there == here or floor(there) < floor(here), f"{here} imports {name}, which is not below it"
    assert not [name for name in names if name.startswith("jax._src")]
    assert "__future__.annotations" not in names
    if is_light(path):
        assert not {name.split(".")[0] for name in imported_at_import_time(path)} & HEAVY


def test_light_rooms_import_nothing_heavy_by_way_of_others() -> None:
    light = [
        ".".join(("podling", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in MODULES
        if is_light(path) and path.name != "__main__.py"
    ]
    code = f"import sys\nfor name in {light!r}: __import__(name)\nprint(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_module_imports() -> None:
    for path in MODULES:
        if path.name != "__main__.py":
            importlib.import_module(".".join(("podling", *path.relative_to(PACKAGE).with_suffix("").parts)))
