"""`podling mesh`: what it draws for flags, a topology, a number of devices and a run; and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from podling import topology
from podling.cli.main import main
from podling.config import Config, ModelConfig, TrainConfig, to_dict


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "find_spec", lambda name: None)


def call(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any, str]:
    code = main(["mesh", *args, "--json"])
    out, err = capfd.readouterr()
    return code, json.loads(out), err


def test_a_topology(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "mesh.svg"
    code, found, _ = call(
        capfd, "--model", "gpt2-xl", "--topology", "v5e:2x4", "--mesh", "fsdp=8", "--svg", str(picture)
    )
    assert (code, found["mesh"], found["devices"], found["dtype"]) == (0, "fsdp=8", 8, "bfloat16")
    assert found["params"] == 1557611200 and found["device_memory_bytes"] == int(15.75 * 2**30)
    assert [cell["coords"] for cell in found["grid"]["cells"]][:3] == [[0, 0, 0], [1, 0, 0], [0, 1, 0]]
    # Weights and moments of 1557.6M parameters (and 47 rows of padding): almost an eighth of 12 bytes each.
    assert found["state_bytes"] == pytest.approx(12 * (1557611200 + 47 * 1600) / 8, rel=0.01)
    assert found["state_bytes"] == sum(row["device_bytes"] for row in found["rows"] if row["kind"] in STATE)
    estimate = found["memory_estimate_bytes"]
    assert found["estimated_bytes"] == sum(estimate.values())
    assert sum(estimate[kind] for kind in STATE - {"counters"}) == found["state_bytes"] - 12
    assert not {"device_bytes", "totals", "activation_bytes"} & set(found)
    assert set(found["traffic"]) == {"fsdp"}
    assert picture.read_text().startswith("<svg")


STATE = {"parameters", "first moments (mu)", "second moments (nu)", "counters"}


def test_auto_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    code, found, _ = call(capfd, "--model", "gpt2-xl", "--topology", "v5e-8")
    assert (code, found["mesh"]) == (0, "data=2,fsdp=4")
    assert "of a device's 15.75 GiB podling plans with three quarters (11.81 GiB)" in found["why"]


def test_this_machines_devices_and_another_number(capfd: pytest.CaptureFixture[str]) -> None:
    code, here, _ = call(capfd, "--mesh", "data=2,fsdp=2,tensor=2")
    assert (code, here["where"]) == (0, "8 x cpu")
    assert [cell["device"] for cell in here["grid"]["cells"]] == [device.id for device in jax.devices()]
    code, more, _ = call(capfd, "--devices", "16")
    assert (code, more["mesh"], more["devices"]) == (0, "data=16", 16)
    assert more["device_memory_bytes"] * 2 == pytest.approx(
        here["device_memory_bytes"], rel=1e-6
    )  # they share one memory
    assert "vocabulary: 2048" in more["notes"][0]


def test_a_run_brings_its_model_and_flags_win(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    model = ModelConfig(preset="gpt2-nano", layers=1, heads=2, embed=32, mlp=128, context=32, vocab_size=257)
    (run / "config.json").write_text(json.dumps(to_dict(Config(model=model, train=TrainConfig(batch_tokens=512)))))
    code, found, _ = call(capfd, str(run), "--devices", "4")
    assert (code, found["batch"]["rows"], found["mesh"]) == (0, 16, "data=4")
    assert [row["shape"] for row in found["rows"] if row["name"] == "token_embed"][0] == [384, 32]
    code, found, _ = call(capfd, "--devices", "4", "--mesh", "tensor=2,fsdp=2", str(run), "--batch-tokens", "1024")
    assert (code, found["batch"]["rows"], found["mesh"]) == (0, 32, "fsdp=2,tensor=2")
    code, found, _ = call(capfd, str(run), "--devices", "8", "--mesh", "tensor=8")
    assert code == 2 and found["error"]["problems"][0]["what"] == "2 heads do not divide over tensor=8"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "gpt2-xl", "--topology", "v5e:2x4", "--mesh", "tensor=8"], ["25 heads do not", "nearest --mesh"]),
        (["--model", "gpt2-xl", "--topology", "v5e-256", "--mesh", "fsdp=256"], ["an embed of 1600 does not"]),
        (["--topology", "v5e:2x4", "--mesh", "data=4"], ["is 4 devices, and there are 8"]),
        (["--devices", "7"], ["no mesh of all 7 devices", "--batch-tokens 1792 or 2688"]),
        (["--devices", "-1"], ["-1 is less than 1"]),
        (["--devices", "0"], ["0 is less than 1"]),
        (["--devices", "4097"], ["4097 is more than the 4096 that podling draws"]),
        (["--topology", ""], ["--topology", "is empty", "for example v5e:2x4"]),
        (["--svg", ""], ["--svg", "is empty"]),
        (["--svg=mesh.png"], ["mesh.png does not end in .svg"]),
        (["--devices", "4", "--topology", "v5e-8"], ["cannot go together with --topology"]),
        (
            ["--topology", "v5e:3x3", "--mesh", "tensr=2,data=2,data=2"],
            ["there is no v5e:3x3", "did you mean tensor?", "twice"],
        ),
        (["nowhere"], ["there is no such run"]),
        (["--tokenizer", "char"], ["--model.vocab-size"]),
        (["--tokenizer", "nowhere.json"], ["nowhere.json"]),
        (["--svg", f"{__file__}/x.svg"], ["--svg", "test_mesh_command.py is a file"]),
    ],
)
def test_what_it_refuses(capfd: pytest.CaptureFixture[str], args: list[str], words: list[str]) -> None:
    code, found, _ = call(capfd, *args)
    text = json.dumps(found, ensure_ascii=False)
    assert code == 2
    for word in words:
        assert word in text


def test_only_pictures_are_written_over(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text, old, folder = tmp_path / "notes.txt", tmp_path / "old.svg", tmp_path / "folder.svg"
    text.write_text("mine")
    old.write_text("<svg/>")
    folder.mkdir()
    for path, code in ((text, 2), (folder, 2), (old, 0)):
        assert call(capfd, "--devices", "2", "--svg", str(path))[0] == code
    assert text.read_text() == "mine" and old.read_text().count("<rect") > 2 and folder.is_dir()


def test_a_narrow_terminal_loses_no_names(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["mesh", "--devices", "2"]) == 0
    out, _ = capfd.readouterr()
    assert "blocks.qkv_kernel" in out and "…" not in out and max(map(len, out.splitlines())) <= 80


def test_the_vocabulary_of_each_tokenizer(capfd: pytest.CaptureFixture[str]) -> None:
    def rows(*args: str) -> int:
        code, found, _ = call(capfd, "--devices", "1", *args)
        assert code == 0
        return next(row["shape"][0] for row in found["rows"] if row["name"] == "token_embed")

    assert rows("--tokenizer", "bytes") == 384
    assert rows("--tokenizer", "gpt2") == 50304
    assert rows("--vocab-size", "1000") == 1024
    assert rows("--tokenizer", "char", "--model.vocab-size", "65") == 128


@pytest.mark.parametrize("flags", ["--topology v5e:3x3 --mesh tensr=2", "--model gpt2-xl --devices 8 --mesh tensor=8"])
def test_what_cannot_be_is_answered_without_jax(flags: str) -> None:
    code = (
        "import sys; from podling.cli.main import main;"
        f"code = main(['mesh', *{flags.split()!r}]);"
        "print(code, 'jax' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2", "False", "False"], done.stderr


def test_small_models_are_counted_to_the_last_parameter(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "--devices", "1", "--model", "gpt2-nano", "--model.layers", "1"]) == 0
    out, _ = capfd.readouterr()
    block = 4 * 128 + 3 * 128 * 129 + 128 * 129 + 128 * 512 + 512 + 512 * 128 + 128
    assert f"gpt2-nano, {1024 * 128 + 128 * 128 + block + 256:,} parameters, on 1 x cpu" in out


def test_it_prints_the_drawing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "--devices", "2", "--mesh", "fsdp=2"]) == 0
    out, _ = capfd.readouterr()
    assert "gpt2-micro, 2.2M parameters, on 2 x cpu" in out and "what crosses the links" in out
