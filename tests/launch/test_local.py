"""The launcher with small programs in the place of podling: marks, signals, deaths, exit codes, and its own end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podling.cli.main import main
from podling.launch.child import LAUNCHER

CHILD = """
import os, signal, sys, time
from podling.launch.child import follow_launcher
follow_launcher()
act, number, count = sys.argv[1], int(sys.argv[-1]), int(sys.argv[-3])
assert sys.argv[-6:-1] == ["--coordinator", sys.argv[-5], "--num-processes", str(count), "--process-id"]
say = lambda text, **to: print(text, flush=True, **to)

def stop(signum, frame):
    say(f"saving after {signum}")
    time.sleep(0.3)
    say("saved")
    os._exit(128 + signum)

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
open(f"{act}.{number}", "w").write(f"{os.getpid()} {os.environ['JAX_PLATFORMS']} {os.environ['JAX_NUM_CPU_DEVICES']}")
if act == "talk":
    say(f"stdout of {number}")
    say(f"stderr of {number}", file=sys.stderr)
elif act == "json":
    say('{"number": %d}' % number if "--json" in sys.argv else "no object")
elif act == "fail":
    time.sleep(0.2 * number)
    sys.exit(number and 2 + number)
elif act == "die":
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    sys.exit(1)
elif act == "abort" and number:
    if number == 2:
        time.sleep(0.3)
    say("terminate called after throwing an instance of 'gloo::EnforceNotMet'")
    os.kill(os.getpid(), signal.SIGKILL if number == 1 else signal.SIGABRT)
elif act == "hang":
    if number == 1:
        sys.exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
elif act == "late":
    time.sleep(1 + number)  # each end is news: the launcher waits anew
    sys.exit(1)
elif act == "wait":
    time.sleep(60)
"""

DRIVER = """
import sys
from podling.launch import local
local.PROGRAM, local.STOP_S, local.END_S = (sys.executable, sys.argv[1]), 1.2, 0.5
code, answer = local.run_local(sys.argv[3:], processes=int(sys.argv[2]), devices=2)
print(answer) if answer else None
sys.exit(code)
"""


@pytest.fixture
def start(tmp_path: Path):
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "driver.py").write_text(DRIVER)
    running: list[subprocess.Popen[str]] = []

    def launch(processes: int, *command: str) -> subprocess.Popen[str]:
        line = [sys.executable, "driver.py", "child.py", str(processes), *command]
        pipe = subprocess.PIPE
        running.append(
            subprocess.Popen(line, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        )
        return running[-1]

    yield launch
    for process in running:
        process.kill()
        process.communicate()


def children(folder: Path, act: str, count: int) -> list[list[str]]:
    """What each child wrote when it was ready: its process id, JAX's platform and number of devices."""
    until = time.monotonic() + 20
    files = [folder / f"{act}.{number}" for number in range(count)]
    while not all(file.is_file() and len(file.read_text().split()) == 3 for file in files):
        assert time.monotonic() < until
        time.sleep(0.02)
    return [file.read_text().split() for file in files]


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_first_speaks_plainly_and_the_others_are_marked(start, tmp_path: Path) -> None:
    out, err = start(3, "talk").communicate(timeout=30)
    assert out == "stdout of 0\n"
    assert sorted(err.splitlines()) == sorted(
        ["stderr of 0", *(f"[{number}] {name} of {number}" for number in (1, 2) for name in ("stdout", "stderr"))]
    )
    assert [child[1:] for child in children(tmp_path, "talk", 3)] == [["cpu", "2"]] * 3


def test_json_is_that_of_the_first(start) -> None:
    process = start(2, "json", "--json")
    out, err = process.communicate(timeout=30)
    assert out == "{'number': 0}\n" and process.returncode == 0
    assert err == "[1] no object\n"


def test_a_first_process_without_an_answer_has_one(start) -> None:
    out, _ = start(2, "fail", "--json").communicate(timeout=30)
    assert "process 0 of 2" in out and "'exit_code': 3" in out


def test_the_json_of_a_launch_tells_what_only_the_launcher_knows(start) -> None:
    out, _ = start(3, "die", "--json").communicate(timeout=30)
    assert "process 1 of 3 was killed by SIGKILL" in out and "'exit_code': 1" in out


def test_the_json_of_a_stopped_launch_says_so(start, tmp_path: Path) -> None:
    process = start(2, "wait", "--json")
    children(tmp_path, "wait", 2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert "'stopped by SIGTERM'" in out and "'exit_code': 143" in out


def test_a_frozen_process_is_killed_soon_after_the_others_ended(start, tmp_path: Path) -> None:
    process = start(3, "late")
    pids = [child[0] for child in children(tmp_path, "late", 3)]
    os.kill(int(pids[0]), signal.SIGSTOP)
    _, err = process.communicate(timeout=30)
    assert err.splitlines()[-1] == "podling launch: process 0 of 3 was killed by SIGKILL"
    assert process.returncode == 1 and "process 1, 0" not in err


def test_the_first_failure_is_the_exit_code(start) -> None:
    process = start(4, "fail")
    process.communicate(timeout=30)
    assert process.returncode == 3


def test_a_killed_process_is_named(start) -> None:
    process = start(3, "die")
    _, err = process.communicate(timeout=30)
    assert err.splitlines() == ["podling launch: process 1 of 3 was killed by SIGKILL"]
    assert process.returncode == 1


def test_what_gloo_says_because_of_another_death_is_left_out(start) -> None:
    process = start(3, "abort")
    _, err = process.communicate(timeout=30)
    killed = [
        f"podling launch: process {number} of 3 was killed by {name}"
        for number, name in ((1, "SIGKILL"), (2, "SIGABRT"))
    ]
    said = "[1] terminate called after throwing an instance of 'gloo::EnforceNotMet'"
    assert err.splitlines() == [killed[0], said, killed[1]]
    assert process.returncode == 1


def test_survivors_that_hang_are_stopped(start) -> None:
    process = start(2, "hang")
    _, err = process.communicate(timeout=30)
    stopped = ["1 s of the others: SIGTERM", "2 s of the others: SIGKILL"]
    assert err.splitlines()[:2] == [f"podling launch: process 0 did not end within {how}" for how in stopped]
    assert process.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_process_once_and_is_waited_for(start, tmp_path: Path, number: int) -> None:
    process = start(3, "wait")
    children(tmp_path, "wait", 3)
    os.killpg(process.pid, number)  # as a terminal does it
    out, err = process.communicate(timeout=30)
    assert out.splitlines() == [f"saving after {int(number)}", "saved"]
    assert [err.count(f"[{child}] saving") for child in (1, 2)] == [1, 1]
    assert [err.count(f"[{child}] saved") for child in (1, 2)] == [1, 1]
    assert process.returncode == 128 + number


def test_no_process_outlives_a_killed_launcher(start, tmp_path: Path) -> None:
    process = start(3, "wait")
    pids = [child[0] for child in children(tmp_path, "wait", 3)]
    assert all(map(is_running, pids))
    process.kill()
    until = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left


def test_alone_it_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    from podling.launch.child import follow_launcher

    monkeypatch.delenv(LAUNCHER, raising=False)
    follow_launcher()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ["where to launch is missing", "no command follows"]),
        ("moon --processes 2 -- train", ["'moon' is no place to launch on"]),
        (
            "local --processes 0 --devices-per-process 0 --",
            ["--processes: 0", "--devices-per-process: 0", "no command"],
        ),
        ("local --processes two -- trian", ["'two' is not a whole number", "did you mean train?"]),
        (
            "local -- generate runs/a",
            ["generate: runs in one process only", "run it as it is: podling generate runs/a"],
        ),
        (
            "local -- train --lr x --num-processes 3",
            ["--lr: 'x' is not a number", "--num-processes: is the launcher's"],
        ),
        ("local --json -- train", ["--json: there is no such flag"]),
        (
            "local --processes 3 train --lr 1",
            ["-- is missing before train", "launch local --processes 3 -- train --lr 1"],
        ),
        (
            "train --lr 1",
            ["stopped\n  podling launch: -- is missing before train\n      podling launch local -- train --lr 1"],
        ),
    ],
)
def test_bad_input_is_told_once_and_at_once(line: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *line.split()]) == 2
    err = capsys.readouterr().err
    assert [text for text in expected if text not in err] == [], err


def test_bad_input_with_json_is_an_object(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "local", "--processes", "0", "--", "train", "--json"]) == 2
    assert json.loads(capfd.readouterr().out)["error"]["problems"][0]["where"] == "--processes"


def test_flags_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--coordinator", "nowhere", "--process-id", "1", "--lr", "x"]) == 2
    err = capsys.readouterr().err
    assert "--num-processes: must be given too" in err and "'nowhere' is not host:port" in err and "--lr" in err


def test_what_was_typed_counts_also_where_it_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--coordinator", "", "--process-id", "-1", "--num-processes", "0"]) == 2
    err = capsys.readouterr().err
    assert "--coordinator: '' is not host:port" in err and "--process-id: -1 is negative" in err
    assert "--num-processes: 0 is less than 1" in err and "must be given too" not in err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_left_is_no_failure(unbuffered: str) -> None:
    gone, out = os.pipe()
    os.close(gone)
    command = [sys.executable, "-m", "podling", "--version"]
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    process = subprocess.run(
        command, stdout=out, stderr=subprocess.PIPE, env=environ, text=True, timeout=60, check=False
    )
    os.close(out)
    assert (process.returncode, process.stderr) == (0, "")
