"""What the README tells people to type exists. `.ci/run` also executes its two set-up blocks."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from podling import __version__
from podling.cli.main import COMMANDS

DOCUMENTS = ["README.md", "CONTRIBUTING.md"]


def blocks(root: Path, document: str = "README.md") -> list[str]:
    """Fenced shell blocks, in order."""
    return re.findall(r"^```(?:bash|sh)\n(.*?)^```$", (root / document).read_text(encoding="utf-8"), re.M | re.S)


def test_two_commands_do_all_set_up(root: Path) -> None:
    """The first installs and trains, the second installs and runs the tests: each a single command."""
    train, test = blocks(root)[:2]
    for block in (train, test):
        assert len(block.strip().replace("\\\n", "").splitlines()) == 1
        assert "python3 -m venv" in block and "pip install" in block
    assert train.rstrip().endswith("podling train")
    assert "pytest" in test


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_are_valid_shell(root: Path, document: str) -> None:
    for block in blocks(root, document):
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_flags_exist(root: Path, document: str) -> None:
    """Every `podling ...` in a block is read by its own parser, up to the point where files would be needed."""
    from podling.cli.parse import known_flags

    for block in blocks(root, document):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            # What `launch` starts stands after a lone `--`, and is a command of its own.
            words = ["podling" if word == "--" else word for word in words]
            starts = [index for index, word in enumerate(words) if word.rpartition("/")[2] == "podling"]
            ends = [*starts[1:], len(words)]
            pieces = [words[start + 1 : end] for start, end in zip(starts, ends[: len(starts)], strict=True)]
            for command, *rest in [piece for piece in pieces if piece]:
                if command.startswith("-"):
                    continue
                assert command in COMMANDS, line
                module = __import__(COMMANDS[command][0], fromlist=["Args"])
                known = known_flags(module.Args)
                for word in rest:
                    if word.startswith("--"):
                        assert word.partition("=")[0] in known, line


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(root: Path, document: str) -> None:
    text = (root / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            assert (root / target).exists(), f"{document}: {target}"


def test_one_version(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/podling/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def test_extras_named_in_messages_exist(root: Path) -> None:
    """`pip install 'podling[x]'` in any message is an extra of the project."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    extras = set(project["project"]["optional-dependencies"])
    assert extras == {"tpu", "cuda", "data", "hub", "wandb", "test", "parity"}
    for path in (root / "src").rglob("*.py"):
        for named in re.findall(r"podling\[([a-z,]+)\]", path.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras, path
