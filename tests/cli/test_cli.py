"""The command as people run it: a process, its two outputs and its exit code."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podling import __version__
from podling.cli.main import COMMANDS, GIVE_UP_S

HEAVY = ("jax", "numpy", "orbax", "tensorstore", "tokenizers", "rich.live")


def podling(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "podling", *args],
        capture_output=True, text=True, cwd=cwd, env={**os.environ, **env}, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def run_and_list_modules(*args: str) -> tuple[int, set[str], str]:
    """Run a command in a fresh interpreter; its exit code, the heavy modules it imported, and its stderr."""
    code = (
        "import sys\nfrom podling.cli.main import main\ncode = main(sys.argv[1:])\n"
        f"print('modules', *[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)
    return done.returncode, set(done.stderr.strip().splitlines()[-1].split()[1:]), done.stderr


def test_no_arguments_is_help() -> None:
    done = podling()
    assert done.returncode == 0 and done.stderr == ""
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout


def test_version() -> None:
    assert podling("--version").stdout == f"podling {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_quick_and_worth_reading(command: str) -> None:
    code, heavy, _ = run_and_list_modules(command, "--help")
    assert (code, heavy) == (0, set())
    for columns in ("80", "120"):
        text = podling(command, "--help", COLUMNS=columns).stdout
        assert "examples:" in text and f"podling {command}" in text and "--json" in text
        assert max(map(len, text.splitlines())) <= int(columns)
        assert "default: ''" not in text and "default: )" not in text


@pytest.mark.parametrize(
    "args",
    [
        ["train", "--stepz", "5"],
        ["train", "--model.heads", "5"],
        ["prepare", "--limit", "ten"],
        ["generate"],
        ["generate", "no/such/run"],
        ["evaluate", "no/such/run"],
        ["export", "no/such/run", "--to", "hf", "x"],
        ["import", "no/such/folder", "--out", "x"],
    ],
    ids=" ".join,
)
def test_bad_input_exits_2_without_traceback_and_without_heavy_imports(args: list[str]) -> None:
    code, heavy, errors = run_and_list_modules(*args)
    assert (code, heavy) == (2, set())
    assert "Traceback" not in errors and errors.startswith(f"podling {args[0]}: ")


@pytest.mark.parametrize("args", [["train", "--help"], ["train", "--stepz", "5"]], ids=" ".join)
def test_starts_in_half_a_second(args: list[str]) -> None:
    """In processor time, which other work on the machine does not stretch; the best of several."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        podling(*args)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5, seconds


def test_unknown_names_bring_the_nearest() -> None:
    assert "did you mean train?" in podling("trian").stderr
    assert "did you mean --steps?" in podling("train", "--step", "5").stderr
    assert "did you mean --model.layers?" in podling("train", "--layers", "5").stderr
    assert "did you mean --lr?" in podling("train", "--learning-rate", "5").stderr
    assert "did you mean gpt2-nano?" in podling("train", "--model", "gpt2-nan").stderr
    assert "did you mean --data book.txt?" in podling("train", "book.txt").stderr


def test_all_problems_at_once_as_one_json_object(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = podling(
        "train", "--json", "--model.heads", "5", "--batch-tokens", "1000", "--stepz=5", "--seed", "x", "--lr",
        "--device", "tpv", "--out", "file/run", "--steps", "5", "--tokens", "9", "--no-run.export", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert answer["exit_code"] == 2
    problems = {problem["where"]: problem for problem in answer["error"]["problems"]}
    assert set(problems) == {
        "--model.heads", "--batch-tokens", "--stepz", "--seed", "--lr", "--device", "--out", "--tokens",
        "--no-run.export",
    }  # fmt: skip
    assert all(set(problem) == {"where", "what", "fix"} for problem in problems.values())
    assert problems["--seed"]["what"] == "'x' is not a whole number"
    assert problems["--lr"]["what"] == "needs a number"
    assert problems["--device"]["fix"] == "did you mean tpu?"
    assert problems["--no-run.export"]["fix"] == "did you mean --run.no-export?"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_answers_errors_in_json(command: str) -> None:
    done = podling(command, "--json", "--nonsense")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["problems"]


def test_flags_of_train_reach_only_commands_that_use_them() -> None:
    done = podling("prepare", "--lr", "1", "--steps", "5")
    assert done.returncode == 2
    assert "--lr: there is no such flag" in done.stderr and "--steps: there is no such flag" in done.stderr


FAKE = """
import os, signal, sys, time, types
from podling.cli import main as cli
module = types.ModuleType("fake")
def command(argv):
    {work}
    {body}
module.main = command
sys.modules["fake"] = module
cli.COMMANDS["fake"] = ("fake", "")
sys.exit(cli.main(["fake", *sys.argv[1:]]))
"""


WORK = 'print("on its way", flush=True); os.system("echo from a child process")'


def fake(body: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A command that does `body`."""
    return subprocess.run(
        [sys.executable, "-c", FAKE.format(body=body, work=WORK), *args], capture_output=True, text=True, timeout=60
    )


def test_json_mode_keeps_stdout_for_the_object() -> None:
    done = fake("return {'loss': float('nan'), 'text': 'é', 'n': 1}", "--json")
    assert json.loads(done.stdout) == {"loss": None, "text": "é", "n": 1}
    assert done.stderr == "on its way\nfrom a child process\n"
    assert fake("return {'n': 1}").stdout == "on its way\nfrom a child process\n"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise KeyboardInterrupt", 130),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", 143),
        ("from podling import errors as e; raise e.RunError(e.Problem('disk', 'is full', 'free some space'))", 1),
        ("from podling import errors as e; raise e.InputError(e.Problem('file', 'is empty'))", 2),
    ],
)
def test_exit_codes(body: str, code: int) -> None:
    done = fake(body, "--json")
    assert done.returncode == code
    assert json.loads(done.stdout)["exit_code"] == code
    assert "Traceback" not in done.stderr
    assert fake(body).returncode == code


def test_the_unforeseen_keeps_its_traceback() -> None:
    done = fake("return 1 / 0", "--json")
    assert done.returncode == 1
    assert "ZeroDivisionError" in json.loads(done.stdout)["error"]["problems"][0]["what"]
    assert "Traceback" in done.stderr and "line" in done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    body = "[print('x' * 1000, flush=True) for _ in range(10000)]"
    process = subprocess.Popen(
        [sys.executable, "-c", FAKE.format(body=body, work="")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_sigterm_reaches_finally_blocks() -> None:
    body = "\n    try: os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)\n    finally: print('closed')"
    assert "closed" in fake(body).stdout
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


SWALLOWED = """
import os, signal, sys, threading, time
from podling.cli import main as cli
cli.GIVE_UP_S = 0.3
def stubborn(argv):
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        time.sleep(30)
    except KeyboardInterrupt:  # as a callback inside JAX does
        time.sleep(30)
cli._command = lambda name: type("C", (), {"main": staticmethod(stubborn)})
sys.argv = ["podling", "train", "--json"]
cli.entry()
"""


def test_ctrl_c_ends_the_program_even_when_a_library_swallows_it() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True, timeout=20)
    assert done.returncode == 130
    assert json.loads(done.stdout)["exit_code"] == 130


SWALLOWED_IN_A_CALLBACK = """
import gc, os, signal, sys, time
from podling.cli import main as cli
def collected(phase, info):  # as JAX does, to collect its own
    if phase == "start":
        os.kill(os.getpid(), signal.{name})
        time.sleep(30)
def command(argv):
    gc.callbacks.append(collected)
    gc.collect()
    time.sleep(30)
cli._command = lambda name: type("C", (), {{"main": staticmethod(command)}})
sys.argv = ["podling", "train", "--json"]
cli.entry()
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_that_comes_in_a_callback_ends_the_program_at_once(name: str, code: int) -> None:
    began_s = time.monotonic()
    program = SWALLOWED_IN_A_CALLBACK.format(name=name)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert done.returncode == code and json.loads(done.stdout)["exit_code"] == code
    assert "Exception ignored" not in done.stderr and "Traceback" not in done.stderr
    assert "podling train: stopped" in done.stderr
    assert time.monotonic() - began_s < GIVE_UP_S


IMPORTING = """
import sys
from podling.cli import main as cli
def command(argv):
    import slow
cli._command = lambda name: type("C", (), {"main": staticmethod(command)})
sys.argv = ["podling", "train", "--json"]
cli.entry()
"""
SLOW = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
except BaseException as error:  # as the loader of C++ modules does
    raise ImportError("initialization failed") from error
"""


def test_a_signal_that_comes_during_an_import_ends_the_program_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, timeout=20, cwd=tmp_path)
    assert done.returncode == 143 and json.loads(done.stdout)["exit_code"] == 143
    assert done.stderr == "podling train: stopped\n  interrupted: stopped by SIGTERM\n"
    assert time.monotonic() - began_s < GIVE_UP_S
