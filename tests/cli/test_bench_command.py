"""`podling bench`: a small model measured for real, and what it refuses."""

import json
from typing import Any

import pytest

from podling.cli.main import main
from podling.measure import peaks
from podling.parallel import device

SMALL = ("--model.layers", "1", "--model.heads", "2", "--model.embed", "16", "--context", "16", "--batch-tokens", "256")


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch, quick_compile: None) -> None:
    monkeypatch.setattr(device, "_measure_gemm", lambda chip: 8e11)
    monkeypatch.setattr(peaks, "READ_BYTES", 2**20)
    monkeypatch.setattr("podling.measure.bench.LOADER_S", 0.1)
    monkeypatch.setattr("podling.measure.loader.LEAST_TOKENS", 2**12)


def call(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    code = main(["bench", *args, "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_figures_that_belong_together(capfd):
    code, found = call(capfd, *SMALL, "--seconds", "0.2", "--mesh", "data=8")
    assert code == 0
    assert (found["devices"], found["mesh"]["data"], found["dtype"]) == (8, 8, "float32")
    assert found["batch"]["tokens"] == 256
    assert found["step"]["steps"] >= 1
    assert found["step"]["least_s"] <= found["step"]["step_s"] <= found["step"]["most_s"]
    assert found["tokens_per_s"] == pytest.approx(256 / found["step"]["step_s"])
    flops = 6 * (4 * 16 * 16 + 2 * 16 * 64 + 2048 * 16) + 12 * 16 * 16
    assert found["mfu"] == pytest.approx(found["tokens_per_s"] * flops / 8e11)  # eight devices share the peak
    assert found["step"]["loss"] == pytest.approx(7.6, abs=1.0)  # ln(2048), of random tokens
    assert 0 <= found["step"]["wait_share"] <= 1
    assert found["loader_tokens_per_s"] > 0
    assert [one["prompts"] for one in found["generation"]] == [1, 8]
    assert found["predicted_parts_s"] is None and "8 devices share this CPU" in found["no_prediction"]
    assert found["bound"] in ("data", "unknown")


def test_the_table_for_people(capfd):
    assert main(["bench", *SMALL, "--seconds", "0.05", "--mesh", "tensor=2,data=4"]) == 0
    out = capfd.readouterr().out
    assert "8 x cpu (data=4,tensor=2), float32" in out
    for name in ("peaks", "training", "loader", "generation"):
        assert f"\n{name} " in out


def test_everything_that_is_wrong_at_once(capfd):
    code, found = call(capfd, "--seconds", "0", "--model.layers", "0", "--secnds", "3", "--model.heads", "x")
    problems = {problem["where"]: problem for problem in found["error"]["problems"]}
    assert code == 2
    assert set(problems) == {"--seconds", "--model.layers", "--secnds", "--model.heads"}
    assert "did you mean --seconds?" in problems["--secnds"]["fix"]


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "601"])
def test_seconds_out_of_range(capfd, seconds):
    code, found = call(capfd, "--seconds", seconds)
    assert (code, [problem["where"] for problem in found["error"]["problems"]]) == (2, ["--seconds"])


def test_a_mesh_that_does_not_fit(capfd):
    code, found = call(capfd, *SMALL, "--mesh", "data=3")
    assert code == 2 and found["error"]["problems"]


def test_a_vocabulary_that_only_text_tells(capfd):
    code, found = call(capfd, *SMALL, "--tokenizer", "char")
    assert (code, found["error"]["problems"][0]["where"]) == (2, "--tokenizer")
