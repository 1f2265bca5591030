"""What prepared data says about itself."""

from pathlib import Path
from typing import Any

from podling.config import DataConfig
from podling.data.scan import Scan, Split
from podling.data.sources import Sources
from podling.data.tokenizer import Tokenizer
from podling.files import counted

SETTINGS = ("tokenizer", "vocab_size", "text_field", "errors", "split_on_eot", "limit", "holdout")
"""The fields of DataConfig that decide what prepared data holds, besides its paths."""


def make_manifest(
    config: DataConfig,
    sources: Sources,
    key: str,
    found: Scan,
    split: Split,
    tokenizer: Tokenizer,
    totals: dict[str, Any],
) -> dict[str, Any]:
    """Everything but the shards: how they were made, what they hold, and what was left out."""
    from podling.data.shards import FORMAT, fingerprint, token_dtype

    python_bytes = sum(
        size for source, size in zip(sources, found.source_bytes, strict=True) if ".py" in Path(source.name).suffixes
    )
    return {
        "format": FORMAT,
        "key": key,
        "fingerprint": fingerprint(tokenizer, totals["splits"]),
        "kind": "python" if python_bytes >= 0.95 * found.total_bytes else "text",
        "documents": len(found.sizes_bytes),
        "split": split.describe(totals["splits"]["heldout"]["documents"]),
        "split_rule": split.rule,
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eot_id": tokenizer.eot_id,
        },
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "splits": totals["splits"],
        "notes": _notes(config, sources, found, tokenizer, totals),
        "config": {name: getattr(config, name) for name in SETTINGS},
        "sources": [
            {"name": source.name, "text_bytes": size, "documents": found.source_documents[number]}
            for number, (source, size) in enumerate(zip(sources, found.source_bytes, strict=True))
        ],
    }


def _notes(
    config: DataConfig, sources: Sources, found: Scan, tokenizer: Tokenizer, totals: dict[str, Any]
) -> list[str]:
    """Everything that was left out, changed or done otherwise than a person might think."""
    notes = []
    counts = found.counts
    if sources.skipped:
        listed = ", ".join(f"{count:,} {reason}" for reason, count in sources.skipped.most_common())
        notes.append(f"skipped: {listed}")
    if counts.empty_documents:
        notes.append(f"left out: {counted(counts.empty_documents, 'empty document')}")
    if counts.replaced:
        where = ", ".join(f"{count:,} in {name}" for name, count in counts.replaced.most_common(5))
        notes.append(f"replaced with U+FFFD: {where}")
    if counts.eot_lines:
        notes.append(
            f"the text holds <|endoftext|> {counted(counts.eot_lines, 'time')}, kept as plain text; "
            "--split-on-eot takes lines of it as document boundaries"
        )
    if counts.limited:
        notes.append(f"reading stopped at --limit {config.limit}; the document there is cut")
    if tokenizer.note:
        notes.append(tokenizer.note)
    if totals["forced_cuts"]:
        notes.append(f"{totals['forced_cuts']:,} runs of over a million characters without a word boundary were cut")
    if totals["unknown"]:
        notes.append(f"{totals['unknown']:,} tokens are unknown: {tokenizer.name} cannot write all of this text")
    if totals["changed_bytes"]:
        notes.append(f"{totals['changed_bytes']:,} bytes of the text were dropped or changed by {tokenizer.name}")
    return notes
