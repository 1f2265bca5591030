"""`podling launch`."""

import difflib
from dataclasses import dataclass
from typing import Any

from podling.cli import train
from podling.cli.main import COMMANDS, Ended
from podling.cli.parse import parse
from podling.errors import InputError, Problem, raise_if
from podling.launch.local import run_local

TARGETS = ("local",)


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `podling launch local`."""

    processes: int = 2
    """How many processes."""
    devices_per_process: int = 1
    """Emulated CPU devices of each process."""


DESCRIPTION = """Run a command in several processes that are one run.

local: on this machine's CPU, joined over loopback, as on a cluster of so many hosts. What follows -- is the command; \
its --mesh is over all devices of all processes. Process 0 prints as if it were alone, and the lines of the others \
carry their number. Ctrl-C and SIGTERM reach every process: the run is saved, and the same command carries on.

On a TPU pod, under SLURM, Kubernetes or Open MPI nothing is launched: start podling train itself in every process.

examples:
  podling launch local --processes 2 -- train --steps 100
  podling launch local --processes 4 --devices-per-process 2 -- train --mesh data=4,tensor=2
  podling launch local --processes 4 -- train --resume runs/book --json"""


def main(argv: list[str]) -> dict[str, Any]:
    """Launch, wait for all processes, and end as they did."""
    _expect_dashes(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:at], argv[at + 1 :]
    target = own[0] if own and not own[0].startswith("-") else ""
    parsed = parse(Args, own[1:] if target else own, prog="podling launch local", description=DESCRIPTION)
    args, problems = parsed.args, _target_problems(target) + parsed.problems
    if args.processes < 1:
        problems.append(Problem("--processes", f"{args.processes} is less than 1"))
    if args.devices_per_process < 1:
        problems.append(Problem("--devices-per-process", f"{args.devices_per_process} is less than 1"))
    raise_if(problems + _command_problems(command))
    code, answer = run_local(command, args.processes, args.devices_per_process)
    raise Ended(code, answer)


def _expect_dashes(argv: list[str]) -> None:
    """Without -- every flag of the command would be taken for one of the launcher's, and each would be a problem."""
    at = next((index for index, word in enumerate(argv) if word in COMMANDS), None)
    if at is not None and "--" not in argv and not {"-h", "--help"} & set(argv):
        line = " ".join([*(argv[:at] or TARGETS), "--", *argv[at:]])
        raise InputError(Problem("podling launch", f"-- is missing before {argv[at]}", f"podling launch {line}"))


def _target_problems(target: str) -> list[Problem]:
    if target in TARGETS:
        return []
    what = f"{target!r} is no place to launch on" if target else "where to launch is missing"
    return [Problem("podling launch", what, f"podling launch {TARGETS[0]} --processes 2 -- train")]


def _command_problems(command: list[str]) -> list[Problem]:
    """What the processes would refuse is refused here, once."""
    example = "for example: podling launch local --processes 2 -- train --steps 100"
    if not command:
        return [Problem("--", "no command follows", example)]
    name = command[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        return [Problem(name, "podling has no such command", f"did you mean {near[0]}?" if near else example)]
    if name != "train":
        return [Problem(name, "runs in one process only", f"run it as it is: podling {' '.join(command)}")]
    own = [word for word in command if word.partition("=")[0].replace("_", "-") in HOST_FLAGS]
    problems = [Problem(word, "is the launcher's to say", "leave it out") for word in own]
    try:
        train.read(command[1:])
    except InputError as error:
        return problems + error.problems
    return problems


HOST_FLAGS = ("--coordinator", "--num-processes", "--process-id")
