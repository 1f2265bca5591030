"""Starts workers and takes their times in turn, round after round, noting what else the machine did meanwhile."""

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from work import Work

OTHERS = 0.15
"""A sample during which other programs kept more of one core than this busy counts only if there are no better ones."""
TRIES = 3


@dataclass
class Worker:
    """One system at work."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    about: dict = field(default_factory=dict)
    """What it said when it was ready."""
    steps: int = 1
    """In a sample."""
    samples: list[dict] = field(default_factory=list)
    whole_peak_bytes: int = 0
    """Of its whole life until now, compiling included."""

    @classmethod
    def start(cls, name: str, command: list[str], environment: dict[str, str], log: Path) -> "Worker":
        with open(log, "w") as errors:
            pipe = subprocess.PIPE
            env = {**os.environ, **environment}
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env)
        return cls(name, process, log)

    def ready(self) -> str:
        """Let it warm up, once it is prepared; what went wrong, if something did."""
        with contextlib.suppress(OSError):
            self._say("begin")
        if (answer := self._answer()) is None:
            return f"did not start: {self.last_words()}"
        self.about, self.whole_peak_bytes = answer, self._peak_bytes()
        with contextlib.suppress(OSError):  # from here on the peak is that of steps
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return ""

    def fit(self, sample_s: float) -> None:
        """Choose how many steps a sample takes, by its last step before the clock."""
        self.steps = max(1, round(sample_s / self.about["warm_step_s"]))

    def sample(self, until_s: float) -> None:
        """Time some steps; again where other programs disturbed it, if there is time. All samples are kept."""
        for _ in range(TRIES):
            busy_s, own_s, began_s = _machine_s(), self._own_s(), time.perf_counter()
            found = self._run(self.steps)
            took_s = time.perf_counter() - began_s
            others = max(0.0, (_machine_s() - busy_s) - (self._own_s() - own_s)) / took_s
            found |= {"others": others, "cores": (self._own_s() - own_s) / took_s, "peak_bytes": self._peak_bytes()}
            self.samples.append(found)
            if others < OTHERS or time.perf_counter() + took_s > until_s:
                break
        time.sleep(0.05)  # threads that spin when they are done come to rest

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "it said nothing"

    def _run(self, steps: int) -> dict:
        try:
            self._say(str(steps))
            answer = self._answer()
        except OSError:
            answer = None
        if answer is None:
            raise SystemExit(f"{self.name} ended: {self.last_words()}")
        return answer

    def _say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]

    def _answer(self) -> dict | None:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        return json.loads(line) if line else None

    def _own_s(self) -> float:
        """Processor seconds of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _peak_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _machine_s() -> float:
    """Processor seconds of everything on this machine so far; of a virtual one, also what its host took."""
    fields = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def build_llmc(folder: Path, into: Path) -> str:
    """Compile the llm.c worker against a checkout; what went wrong, if something did."""
    source = Path(__file__).parent / "llmc_worker.c"
    flags = ["-Ofast", "-march=native", "-fopenmp", "-DOMP", "-w"]
    try:
        done = subprocess.run(
            ["gcc", *flags, "-I", str(folder), str(source), "-lm", "-o", str(into)], capture_output=True, text=True
        )
    except FileNotFoundError:
        return "there is no gcc"
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def llmc_command(program: Path, work: Work) -> list[str]:
    padded = 50304 if work.vocab_size == 50257 else work.vocab_size
    shape = [work.layers, work.heads, work.embed, work.vocab_size, padded, work.rows, work.context]
    rest = [work.tokens, work.lr, work.beta1, work.beta2, work.eps, work.weight_decay, work.warmup_steps]
    return [str(program), *map(str, shape + rest)]
