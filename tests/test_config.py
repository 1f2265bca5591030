"""Presets, files and flags come together as stated, and every problem is reported, all at once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podling.cli.options import base_config, settle
from podling.config import Config, flags, from_dict, to_dict
from podling.errors import InputError
from podling.presets import PRESETS, preset_config
from podling.validate import RULES, validate


def changed(**fields: Any) -> Config:
    """The default configuration with `section__field=value` changes."""
    config = Config()
    for key, value in fields.items():
        section, name = key.split("__")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def wheres(config: Config) -> list[str]:
    return [problem.where for problem in validate(config)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_names_itself(name: str) -> None:
    config = preset_config(name)
    assert validate(config) == []
    assert config.model.preset == name
    assert config.model.mlp == 4 * config.model.embed
    assert PRESETS[name].command.startswith("podling train") and PRESETS[name].about


def test_the_default_configuration_is_its_preset() -> None:
    assert preset_config(Config().model.preset) == Config()


def test_gpt2_presets_have_the_published_sizes() -> None:
    """Radford et al. 2019, table 2: parameters of the four sizes, here with biases and tied head."""
    published = {"gpt2": 124439808, "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200}
    for name, params in published.items():
        m = preset_config(name).model
        block = 12 * m.embed**2 + 13 * m.embed  # two LayerNorms, attention and MLP, all with biases
        assert m.layers * block + (50257 + m.context) * m.embed + 2 * m.embed == params


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        preset_config("gpt2-micr")
    assert "did you mean gpt2-micro?" in caught.value.problems[0].fix


def test_flags_are_unique_and_cover_every_field() -> None:
    names = [flag.name for flag in flags()]
    assert len(names) == len(set(names))
    sections = to_dict(Config())
    del sections["version"]
    assert {(flag.section, flag.field) for flag in flags()} == {(s, f) for s in sections for f in sections[s]}
    common = (
        "--data --tokenizer --vocab-size --model --context --steps --tokens --batch-tokens --lr --seed --dtype"
        " --device --mesh --eval-every --checkpoint-every --out"
    )
    for short in common.split():
        assert short in names


def test_every_rule_is_about_a_field() -> None:
    assert set(RULES) <= {(flag.section, flag.field) for flag in flags()}


@given(
    steps=st.integers(), lr=st.floats(allow_nan=False), paths=st.lists(st.text()), out=st.text(), export=st.booleans()
)
def test_json_round_trip(steps: int, lr: float, paths: list[str], out: str, export: bool) -> None:
    config = changed(train__steps=steps, optimizer__lr=lr, data__paths=tuple(paths), run__out=out, run__export=export)
    assert from_dict(json.loads(json.dumps(to_dict(config))), "here") == config


def test_a_file_with_several_mistakes_reports_them_all() -> None:
    data = {"train": {"stepz": 5, "lr": 1}, "model": {"heads": "four"}, "trian": {}, "run": []}
    with pytest.raises(InputError) as caught:
        from_dict(data, "c.json")
    found = {problem.where: problem for problem in caught.value.problems}
    assert set(found) == {
        "c.json: train.stepz",
        "c.json: train.lr",
        "c.json: model.heads",
        "c.json: trian",
        "c.json: run",
    }
    assert found["c.json: train.stepz"].fix == "did you mean steps?"
    assert found["c.json: trian"].fix == "did you mean train?"


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"model__heads": 5}, "--model.heads", "heads that do: 2, 3, 4, 6, 8"),
        ({"model__heads": 0}, "--model.heads", "at least 1"),
        ({"model__dropout": 1.0}, "--model.dropout", "less than 1"),
        ({"model__preset": "gpt2-xxl"}, "--model", "did you mean gpt2-xl?"),
        ({"train__batch_tokens": 1000}, "--batch-tokens", "nearest: 896, 1024"),
        ({"train__batch_tokens": 100}, "--batch-tokens", "nearest: 128"),
        ({"train__micro_batch": 5}, "--train.micro-batch", "sizes that do: 1, 2, 4, 8"),
        ({"train__loss_chunk": 100}, "--train.loss-chunk", "sizes that do: 8, 16, 32, 64, 128"),
        ({"train__steps": -1}, "--steps", "at least 1"),
        ({"train__seed": -1}, "--seed", "from 0"),
        ({"train__dtype": "float16"}, "--dtype", "auto, float32, bfloat16"),
        ({"train__tokens": 4096}, "--optimizer.warmup-steps", "longer than the run of 2"),
        ({"optimizer__lr": 0.0}, "--lr", "above 0"),
        ({"optimizer__lr": float("nan")}, "--lr", "above 0"),
        ({"optimizer__eps": float("inf")}, "--optimizer.eps", "above 0"),
        ({"optimizer__beta1": 1.0}, "--optimizer.beta1", "less than 1"),
        ({"optimizer__beta2": -0.1}, "--optimizer.beta2", "from 0"),
        ({"optimizer__warmup_steps": 701}, "--optimizer.warmup-steps", "at most 700"),
        ({"optimizer__clip_norm": -1.0}, "--optimizer.clip-norm", "0 or more"),
        ({"data__holdout": 0.0}, "--data.holdout", "between 0 and 1"),
        ({"data__holdout": 1.0}, "--data.holdout", "between 0 and 1"),
        ({"data__limit": "ten"}, "--limit", "10GB"),
        ({"data__paths": ("a", " ")}, "--data", "empty path"),
        ({"run__mesh": "data=2,tenser=2"}, "--mesh", "did you mean tensor?"),
        ({"run__mesh": "data=2,data=4"}, "--mesh", "given twice"),
        ({"run__mesh": "data=-1"}, "--mesh", "whole number"),
        ({"run__mesh": "data"}, "--mesh", "whole number"),
        ({"run__mesh": ""}, "--mesh", "is empty"),
        ({"run__keep": 0}, "--run.keep", "at least 1"),
        ({"run__out": ""}, "--out", "empty"),
        ({"run__init": "/no/such/folder"}, "--init", "not a folder"),
    ],
)  # fmt: skip
def test_one_bad_value_is_one_problem_that_teaches(changes: dict[str, Any], where: str, says: str) -> None:
    problems = validate(changed(**changes))
    assert [problem.where for problem in problems] == [where]
    assert says in str(problems[0])


def test_all_problems_at_once() -> None:
    config = changed(model__heads=5, train__batch_tokens=1000, optimizer__lr=-1.0, run__mesh="x=1", data__holdout=2.0)
    assert set(wheres(config)) == {"--model.heads", "--batch-tokens", "--lr", "--mesh", "--data.holdout"}


def test_a_field_wrong_by_itself_is_not_also_wrong_in_relation() -> None:
    assert wheres(changed(model__context=0)) == ["--context"]
    assert wheres(changed(model__embed=-4, model__heads=5)) == ["--model.embed"]
    assert wheres(changed(train__batch_tokens=0, train__tokens=5)) == ["--batch-tokens"]


def test_out_below_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for out in (file, file / "run", file / "deep" / "run"):
        (problem,) = validate(changed(run__out=str(out)))
        assert problem.where == "--out" and str(file) in problem.what
    assert file.read_text() == "x"
    assert validate(changed(run__out=str(tmp_path / "new" / "deep"))) == []
    assert validate(changed(run__out=str(tmp_path))) == []


def test_missing_wandb_is_answered_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = validate(changed(run__wandb="project"))
    assert problem.fix == "pip install 'podling[wandb]'"


def test_file_over_preset(tmp_path: Path) -> None:
    """The file's preset gives what the file leaves out; what the file has wins."""
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"model": {"preset": "gpt2-nano", "layers": 3}, "optimizer": {"lr": 1}}))
    config, problems = base_config(["--config", str(path)])
    nano = preset_config("gpt2-nano")
    assert problems == []
    assert config == replace(nano, model=replace(nano.model, layers=3), optimizer=replace(nano.optimizer, lr=1.0))


def test_model_flag_over_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"model": {"preset": "gpt2-nano", "layers": 3}, "train": {"steps": 7}}))
    config, _ = base_config([f"--config={path}", "--model", "gpt2-mini"])
    assert config.model == preset_config("gpt2-mini").model
    assert config.train.steps == 7


def test_a_broken_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"train":\n {"steps": }}')
    _, (problem,) = base_config(["--config", str(path)])
    assert problem.where == f"{path}:2"


def test_settle_derives_and_says_so() -> None:
    config, notes, problems = settle(
        changed(model__embed=128, train__steps=20), frozenset({"--model.embed", "--steps"})
    )
    assert (config.model.mlp, config.optimizer.warmup_steps) == (512, 2)
    assert len(notes) == 2 and problems == []
    given = frozenset({"--model.embed", "--steps", "--model.mlp", "--optimizer.warmup-steps"})
    assert settle(changed(model__embed=128, train__steps=20), given)[0] == changed(model__embed=128, train__steps=20)


def test_steps_flag_wins_over_tokens_of_a_file() -> None:
    config, _, _ = settle(changed(train__tokens=10**9, train__steps=500), frozenset({"--steps"}))
    assert config.train.tokens == 0


@pytest.mark.parametrize(
    ("given_flags", "changes", "where"),
    [
        ({"--steps", "--tokens"}, {}, "--tokens"),
        ({"--resume", "--out"}, {}, "--out"),
        ({"--resume", "--config"}, {}, "--config"),
        ({"--data"}, {}, "--data"),
        ({"--vocab-size"}, {"data__tokenizer": "char"}, "--vocab-size"),
        ({"--optimizer.decay-fraction"}, {}, "--optimizer.decay-fraction"),
    ],
)
def test_flags_that_contradict_or_do_nothing(given_flags: set[str], changes: dict[str, Any], where: str) -> None:
    assert [problem.where for problem in settle(changed(**changes), frozenset(given_flags))[2]] == [where]
    assert settle(changed(**changes), frozenset())[2] == []


def test_prepared_data_brings_its_own_settings(tmp_path: Path) -> None:
    """A folder of characters was refused by every preset whose vocabulary size is not the default's."""
    made = {"tokenizer": "char", "vocab_size": 2048, "holdout": 0.1, "an_older_field": 1}
    (tmp_path / "manifest.json").write_text(json.dumps({"config": made}))
    before = changed(data__paths=(str(tmp_path),), data__tokenizer="gpt2", data__vocab_size=999)
    config, _, problems = settle(before, frozenset())
    assert (config.data.tokenizer, config.data.vocab_size, config.data.holdout, problems) == ("char", 2048, 0.1, [])
    asked, _, _ = settle(before, frozenset({"--tokenizer"}))
    assert asked.data.tokenizer == "gpt2"  # said on purpose: it has to agree, and prepare says that it does not
