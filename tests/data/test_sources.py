"""Which files are found, which are passed over, and what is said about those that cannot be."""

import sysconfig

import pytest

from podling.config import DataConfig
from podling.data import sources as module
from podling.data.corpus import find_sources
from podling.errors import InputError


def names(*paths, **settings):
    return [source.name for source in find_sources(DataConfig(paths=tuple(map(str, paths)), **settings))]


@pytest.fixture
def folder(tmp_path):
    for name, text in {
        "b.txt": "b",
        "a.md": "a",
        "sub/c.py": "c",
        "sub/d.jsonl.gz": "x",
        "picture.png": "x",
        "sub/empty.txt": "",
        ".git/hidden.txt": "x",
        "LICENCE": "x",
    }.items():
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(text)
    return tmp_path / "text"


def test_a_folder_is_searched_in_sorted_order_and_the_rest_is_counted(folder):
    found = find_sources(DataConfig(paths=(str(folder),)))
    assert [source.name for source in found] == [
        str(folder / name) for name in ("a.md", "b.txt", "sub/c.py", "sub/d.jsonl.gz")
    ]
    assert [source.kind for source in found] == ["text", "text", "text", "jsonl"]
    assert found[3].compression == "gz"
    assert found.skipped == {".png": 1, "empty": 1, "no suffix": 1}


def test_several_paths_keep_their_order_and_a_file_named_twice_is_read_once(folder):
    found = find_sources(DataConfig(paths=(str(folder / "b.txt"), str(folder))))
    assert [source.path.name for source in found] == ["b.txt", "a.md", "c.py", "d.jsonl.gz"]
    assert found.skipped["named twice"] == 1


def test_a_glob(folder):
    assert names(folder / "**" / "*.py") == [str(folder / "sub" / "c.py")]
    with pytest.raises(InputError, match="matches no file"):
        names(folder / "*.rs")
    with pytest.raises(InputError, match=r"matches nothing readable \(1 .png\)"):
        names(folder / "*.png")


def test_a_file_without_a_suffix_is_text_when_named(folder):
    assert names(folder / "LICENCE") == [str(folder / "LICENCE")]


def test_nothing_named_is_the_standard_library_without_tests_and_generated_tables():
    found = names()
    root = sysconfig.get_path("stdlib")
    assert f"{root}/argparse.py" in found
    assert f"{root}/json/decoder.py" in found
    assert all(name.startswith(root) and name.endswith(".py") for name in found)
    for folder in ("test", "tests", "site-packages", "encodings", "pydoc_data"):
        assert not [name for name in found if f"/{folder}/" in name]


def test_all_problems_at_once(folder, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "x.png").write_text("x")
    with pytest.raises(InputError) as caught:
        names(
            folder / "b.tx",
            folder / "picture.png",
            folder / "sub" / "empty.txt",
            tmp_path / "pictures",
            folder / "b.txt" / "below",
            tmp_path / "txet" / "b.txt",
            limit="lots",
        )
    said = [str(problem) for problem in caught.value.problems]
    assert len(said) == 7
    assert "--limit: 'lots' is not a size" in said[0]
    assert f"did you mean {folder / 'b.txt'}?" in said[1]
    assert "unknown kind (.png)" in said[2] and "rename plain text to .txt" in said[2]
    assert "empty.txt: is empty" in said[3]
    assert "holds nothing readable (1 .png)" in said[4]
    assert f"{folder / 'b.txt'} is a file" in said[5]
    assert f"did you mean {tmp_path / 'text'}?" in said[6]


@pytest.mark.parametrize(
    ("name", "module_name", "command"),
    [
        ("a.parquet", "pyarrow", "pip install 'podling[data]'"),
        ("a.txt.zst", "zstandard", "pip install 'podling[data]'"),
        ("hf:owner/name", "datasets", "pip install 'podling[hub]'"),
    ],
)
def test_a_missing_extra_is_answered_with_its_command(tmp_path, monkeypatch, name, module_name, command):
    monkeypatch.setattr(module, "installed", lambda wanted: wanted != module_name)
    path = name
    if not name.startswith("hf:"):
        path = tmp_path / name
        path.write_text("x")
    with pytest.raises(InputError) as caught:
        names(path)
    assert command in str(caught.value)


def test_a_prepared_folder_is_not_mixed_with_text(folder, tmp_path):
    (tmp_path / "ready").mkdir()
    (tmp_path / "ready" / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="give it alone"):
        names(folder, tmp_path / "ready")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hf:o/n", ("o/n", None, "train")),
        ("hf:o/n:test", ("o/n", None, "test")),
        ("hf:o/n:en", ("o/n", "en", "train")),
        ("hf:o/n:en:train[:10%]", ("o/n", "en", "train[:10%]")),
        ("hf:o/n::validation", ("o/n", None, "validation")),
    ],
)
def test_hub_names(name, parts):
    assert module.hub_parts(name) == parts


def test_linked_folders_are_read_once_and_loops_end(tmp_path):
    """They were passed over without a word."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("a")
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "main" / "again").symlink_to(tmp_path / "real")
    (tmp_path / "main" / "loop").symlink_to(tmp_path / "main")
    assert names(tmp_path / "main") == [str(tmp_path / "main" / "again" / "a.txt")]
