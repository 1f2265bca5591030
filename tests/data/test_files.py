"""Atomic writes and readable refusals."""

import os
import resource
import signal

import pytest

from podling.errors import InputError, RunError
from podling.files import atomic_write, parse_bytes, read_json, show_bytes


def test_a_write_replaces_the_whole_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    atomic_write(path, "first, and longer")
    atomic_write(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["file.txt"]


def test_a_write_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        atomic_write(tmp_path / "file" / "below" / "out.json", "x")


def test_a_file_size_limit_leaves_the_old_file(tmp_path):
    """A write that the system stops half-way must not touch what was there."""
    path = tmp_path / "file"
    atomic_write(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RunError, match="file-size limit"):
            atomic_write(path, b"n" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n "b": }', r"bad\.json:2: is not JSON"),
        (b"[1]", "holds a JSON list"),
        (b"\xff{}", "invalid UTF-8 at byte 0"),
    ],
)
def test_broken_json_is_told_with_its_place(tmp_path, content, message):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_json(tmp_path / "bad.json")


def test_missing_json(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_json(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "size"), [("10GB", 10**10), ("1.5 MB", 1_500_000), ("2GiB", 2 * 2**30), ("77", 77), ("3k", 3000)]
)
def test_sizes(text, size):
    assert parse_bytes(text, "--limit") == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "10 XB", "1e9", "0.1"])
def test_sizes_that_are_none(text):
    with pytest.raises(InputError, match="--limit"):
        parse_bytes(text, "--limit")


def test_shown_sizes():
    assert [show_bytes(n) for n in (999, 1_000, 12_600_000, 5 * 10**9)] == ["999 bytes", "1.0 kB", "12.6 MB", "5.0 GB"]
