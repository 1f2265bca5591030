"""The record of a run: metrics.jsonl for programs, TensorBoard events and Weights & Biases for people."""

import contextlib
import importlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podling.config import Config, to_dict
from podling.errors import InputError, PodlingError, Problem
from podling.files import atomic_write, writing
from podling.run.events import EventFile
from podling.run.folder import RunPaths

SYNC_S = 1.0
"""Between two waits for the disk: a file system far away takes long, and every step would wait for it."""


class MetricsLog:
    """Writes each record everywhere it should go; `metrics.jsonl` has it when `write` returns, whoever is killed then.

    A power cut takes what was written after the last `sync`, which is also done by `write` once a second.

    A resumed run computes the steps after its checkpoint again, so records beyond it are dropped first: the curve has
    every step once, as if the run had never stopped.

    Args:
        run: the run folder, held by this process.
        config: `run.tensorboard` and `run.wandb` say where else to write.
        restored_step: the step this session starts from; 0 for a new run.
        say: told what was repaired or dropped.

    Raises:
        InputError: Weights & Biases is asked for and not installed.
        RunError: the disk is full.
    """

    def __init__(self, run: RunPaths, config: Config, *, restored_step: int, say: Callable[[str], None]):
        self._wandb = _start_wandb(run, config) if config.run.wandb else None
        self.path = run.metrics
        kept = _drop_after(self.path, restored_step, say)
        # What was recorded at the restored step itself, e.g. an evaluation that is repeated before the run goes on.
        self._recorded = {(restored_step, *record) for record in kept if record.get("step") == restored_step}
        with writing(self.path):
            self._file = open(self.path, "ab")
        self._events = EventFile(run.tensorboard, restored_step) if config.run.tensorboard else None
        self._synced_s = -math.inf

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; `step` says where it belongs. Numbers that are not finite become null.

        A record of the restored step with the same fields as one that is there already is left out.

        Raises:
            RunError: the disk is full; the records before this one are safe.
        """
        if (record.get("step"), *record) in self._recorded:
            return
        record = {key: _plain(value) for key, value in record.items()}
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with writing(self.path):
            self._file.write(line.encode())
            self._file.flush()
        scalars = {f"{_section(key)}/{key}": value for key, value in record.items() if _is_scalar(key, value)}
        step = record.get("step")
        if self._events is not None:
            self._events.scalars(scalars, record.get("step", 0))
        if self._wandb is not None:
            # A resumed run sends some steps twice; W&B keeps the first, and the second is bit-equal.
            self._wandb.log(scalars, step=step)
        if time.monotonic() - self._synced_s >= SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Bring everything to the disk: before a checkpoint, which must not be newer than the record of its steps.

        Raises:
            RunError: the disk is full.
        """
        with writing(self.path):
            os.fsync(self._file.fileno())
        if self._events is not None:
            self._events.flush()
        self._synced_s = time.monotonic()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except PodlingError:
            if kind is None:  # else what ended the run is told: most often the same disk, met by a write
                raise

    def close(self) -> None:
        """Flush and close everything.

        Raises:
            RunError: the disk is full, and what a failed write left behind does not fit either.
        """
        with contextlib.ExitStack() as others:
            if self._wandb is not None:
                others.callback(self._wandb.finish)
            if self._events is not None:
                others.callback(self._events.close)
            with writing(self.path):
                self._file.close()


def read_records(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of a metrics.jsonl, and a line of words for each line that is not one.

    A kill in the middle of a write leaves a torn last line.
    """
    records, broken = [], []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        last = number == len(lines)
        try:
            record = json.loads(line)
            if isinstance(record, dict) and not last:
                records.append(record)
                continue
        except ValueError:
            pass
        broken.append(f"{path}:{number}: {'torn last line' if last else 'is not a JSON object'}")
    return records, broken


def recent_loss(run: RunPaths, steps: int = 50) -> float | None:
    """Mean training loss of the last `steps` steps, in nats per token; None when there is no record of one."""
    losses = [record["loss"] for record in read_records(run.metrics)[0] if record.get("loss") is not None][-steps:]
    return sum(losses) / len(losses) if losses else None


def require_wandb() -> Any:
    """The wandb module.

    Raises:
        InputError: it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise InputError(
            Problem("--run.wandb", "Weights & Biases is not installed", "pip install 'podling[wandb]'")
        ) from error


def _drop_after(path: Path, restored_step: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Repair the file for a session that starts after `restored_step`; gives the records that stay."""
    records, broken = read_records(path)
    kept = [record for record in records if not _is_after(record, restored_step)]
    for problem in broken:
        say(f"{problem}; removed")
    if len(kept) < len(records):
        say(f"{path}: {len(records) - len(kept)} records after step {restored_step} will be computed again")
    if broken or len(kept) < len(records):
        atomic_write(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
    lost = restored_step - len({record["step"] for record in kept if "loss" in record and "step" in record})
    if lost > 0:
        say(
            f"{path}: {lost} of the {restored_step} steps before are not recorded; train_loss will be of those that are"
        )
    return kept


def _is_after(record: dict[str, Any], step: int) -> bool:
    at = record.get("step")
    return isinstance(at, int | float) and at > step


def _start_wandb(run: RunPaths, config: Config) -> Any:
    wandb = require_wandb()
    id_file = run.path / "wandb_id"
    if not id_file.exists():
        atomic_write(id_file, uuid.uuid4().hex[:12])
    return wandb.init(
        project=config.run.wandb,
        id=id_file.read_text().strip(),
        name=run.path.name,
        dir=str(run.path),
        config=to_dict(config),
        resume="allow",
    )


def _plain(value: Any) -> Any:
    """JSON has neither NumPy's scalars, which no run should end for, nor NaN."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_scalar(key: str, value: Any) -> bool:
    return key != "step" and isinstance(value, int | float) and not isinstance(value, bool)


def _section(key: str) -> str:
    return "heldout" if key.startswith("val_") else "train"
