"""Documents and what they came to: as a table for people, as a file for programs."""

import csv
import io
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podling.errors import Problem
from podling.files import atomic_write, file_above

FORMS = (".jsonl", ".csv")
NAME_COLUMNS = 36


def out_file_problems(out: str) -> list[Problem]:
    """Why the file could not be written, told before hours are spent on its contents."""
    if not out:
        return []
    path, where = Path(out), "--out"
    problems = []
    if path.suffix not in FORMS:
        problems.append(Problem(where, f"{out} is neither .jsonl nor .csv", "name it documents.jsonl or documents.csv"))
    if path.exists():
        kind = "a folder" if path.is_dir() else "there already"
        problems.append(Problem(where, f"{out} is {kind}", "give a file that does not exist yet"))
    elif (blocker := file_above(path)) is not None:
        problems.append(Problem(where, f"{out} lies below the file {blocker}", "choose a path below a folder"))
    return problems


def document_table(records: Sequence[dict[str, Any]], top: int) -> str:
    """The first documents in columns, as wide as the terminal, and how many are not shown."""
    from rich.cells import cell_len, set_cell_size

    from podling.train.progress.words import printable

    shown = records[:top]
    names = [_shortened(record["document"]) for record in shown]
    widest = max(map(cell_len, [*names, "document"]))
    head = f"{set_cell_size('document', widest)}    tokens  nats/token  bits/byte  gradient  begins"
    room = max(100, shutil.get_terminal_size((120, 24)).columns) - len(head) + len("begins")
    lines = [head, "─" * (len(head) - len("begins") + room)]
    for name, record in zip(names, shown, strict=True):
        bits = "-" if math.isnan(record["bits_per_byte"]) else f"{record['bits_per_byte']:.3f}"
        begins = printable(record["text"]) or "(white space)"
        begins = begins if cell_len(begins) <= room else set_cell_size(begins, room - 1) + "…"
        lines.append(
            f"{set_cell_size(name, widest)}  {record['tokens']:>8,}  {record['nats_per_token']:>10.3f}  {bits:>9}  "
            f"{record['grad_norm']:>8.3g}  {begins}"
        )
    if len(records) > top:
        lines.append(f"... and {len(records) - top:,} more (--top N; all of them with --out FILE)")
    return "\n".join(lines)


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_COLUMNS else "…" + name[1 - NAME_COLUMNS :]


def write_documents(out: str, records: Sequence[dict[str, Any]]) -> None:
    """One line for each document, whole or not at all; what is not a number is null (.jsonl) or empty (.csv).

    Raises:
        RunError: the disk is full.
        InputError: the file cannot be written.
    """
    rows = [{key: _plain(value) for key, value in record.items()} for record in records]
    text = io.StringIO(newline="")
    if Path(out).suffix == ".csv":
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    else:
        text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    atomic_write(out, text.getvalue())


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
