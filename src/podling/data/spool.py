"""Fetching hub datasets to local files: the text is read several times, and a stream may not be."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

from podling.config import DataConfig
from podling.data.events import Meter, Progress
from podling.data.readers import ReadCounts, hub_texts
from podling.data.sources import Source, Sources
from podling.files import atomic_write, parse_bytes, read_json, writing


def spool_hub(
    folder: Path, config: DataConfig, sources: Sources, progress: Progress | None
) -> tuple[Sources, Counter[str]]:
    """Replace each hub source by a .jsonl in `folder`, fetching at most `config.limit` of text for each.

    Returns:
        The sources, all local, and how many characters were replaced on the way, by source.

    Raises:
        InputError: a dataset cannot be fetched.
        RunError: the disk is full.
    """
    left = parse_bytes(config.limit, "--limit") if config.limit else None
    local = Sources(skipped=sources.skipped)
    replaced: Counter[str] = Counter()
    for number, source in enumerate(sources):
        if source.kind != "hub":
            local.append(source)
            continue
        path, counted = folder / f"hub-{number}.jsonl", folder / f"hub-{number}.json"
        if not counted.exists():
            counts = ReadCounts()
            _fetch(source, path, config, counts, left, Meter(f"fetching {source.name}", left, progress))
            atomic_write(counted, json.dumps(counts.replaced))
        replaced.update(read_json(counted))
        local.append(replace(source, kind="jsonl", path=path, size_bytes=path.stat().st_size))
    return local, replaced


def _fetch(source: Source, path: Path, config: DataConfig, counts: ReadCounts, left: int | None, meter: Meter) -> None:
    with writing(path), open(path, "w", encoding="utf-8") as file:
        for text in hub_texts(source, config, counts):
            file.write(json.dumps({config.text_field: text}, ensure_ascii=False) + "\n")
            meter.add(len(text.encode()))
            if left is not None and meter.done_bytes >= left:
                break
        file.flush()
        os.fsync(file.fileno())
    meter.finish()
