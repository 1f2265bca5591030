"""A prediction that an earlier session made of the very same program on the very same machine need not be made again.

On a CPU a prediction takes three seconds of measuring, more than everything else that a session does before it goes on.
"""

import hashlib
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from podling.cost.cpu_load import cores_here
from podling.errors import PodlingError
from podling.files import read_json

BOOT = Path("/proc/sys/kernel/random/boot_id")
FIGURES = ("step_s", "step_s_range", "tokens_per_s", "parts_s", "calibration", "measured")
INSTRUCTION, METADATA = re.compile(r"\s*(%|ROOT|ENTRY|\})"), re.compile(r", metadata=\{[^}]*\}")
NARROW = 1.5
"""A range that ends beyond so many times its middle was measured beside other work, which may be gone by now."""


def basis(device: Any, program: jax.stages.Compiled) -> str | None:
    """A hash of what a CPU's prediction rests on: the program, and this machine since it was started.

    None for an accelerator, whose prediction measures nothing, and where the system does not tell one machine, or one
    start of it, from another.
    """
    if device.platform != "cpu" or not BOOT.exists():
        return None
    facts = [BOOT.read_text(), platform.processor(), str(cores_here()), jaxlib.version.__version__]
    return hashlib.sha256("\n".join([*facts, *_instructions(program.as_text() or "")]).encode()).hexdigest()


def _instructions(text: str) -> Iterator[str]:
    """Without where they come from: a program that is read from the cache tells that otherwise than a new one."""
    for line in text.splitlines():
        if INSTRUCTION.match(line):
            yield METADATA.sub("", line)


def earlier(path: Path, wanted: str | None) -> dict[str, Any] | None:
    """The figures of the prediction at `path`, when it has that basis and was measured on a quiet machine."""
    if wanted is None:
        return None
    try:
        facts = read_json(path)
    except PodlingError:  # there is none, or it cannot be read
        return None
    if facts.get("basis") != wanted or not all(name in facts for name in FIGURES):
        return None
    if facts["step_s_range"][1] > NARROW * facts["step_s"]:
        return None
    return {name: facts[name] for name in FIGURES}
