"""How a session's time is spent."""

import json
import re
from dataclasses import replace

import pytest

from podling.config import Config
from podling.errors import InputError
from podling.plan.budget import COMPILE_S, DISK_BYTES_PER_S, END_S, START_S, hosts, parse_budget, spend, total_s, within
from podling.plan.overhead import overhead_notes
from podling.plan.target import parse_target
from podling.presets import PRESETS
from podling.validate import validate


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("9h", 32400), ("85m", 5100), ("85min", 5100), ("8h30m", 30600), ("90s", 90), ("1.5h", 5400),
        ("8h 30m", 30600), ("1D", 86400), ("1h0m5s", 3605),
    ],
)  # fmt: skip
def test_lengths_of_time(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "9", "h", "9x", "-9h", "9h30", "0s", "1:30", "9hours", "9h,", "99999999999h", "9" * 400 + "h", "3651d"]
)
def test_what_is_no_length_of_time(text):
    with pytest.raises(InputError) as error:
        parse_budget(text)
    assert "--budget" in str(error.value) and "85m" in str(error.value)


def config_of(preset: str, **train) -> Config:
    config = PRESETS[preset].config
    model = replace(config.model, vocab_size=50257)
    return replace(config, model=model, train=replace(config.train, **train))


def test_the_time_is_spent_to_the_last_step():
    config = config_of("gpt2")
    use = spend(config, parse_target("v5e-8"), 0.8, 42.0, 9 * 3600, 10**9)
    for more in range(4):
        fewer = spend(config, parse_target("v5e-8"), 0.8, 42.0 + 0.6 * more, 9 * 3600, 10**9)  # each by one step
        assert fewer.steps % 250 and fewer.steps % 100  # so that one step more would be only that
        assert total_s(fewer) <= fewer.budget_s < total_s(fewer) + 0.8
    assert use.train_s == use.steps * 0.8 and use.tokens == use.steps * 524288
    assert use.epochs == use.tokens / 1e9
    assert use.start_s == START_S["tpu"] and use.compile_s == pytest.approx(42 * 4 / 3)
    evaluations = -(-use.steps // 250)
    assert use.evaluation_s == pytest.approx(evaluations * 0.8 / 3 * 1048576 / 524288)
    saves, state = -(-use.steps // 100), 12 * 124_439_808
    assert use.checkpoint_s == pytest.approx(saves * state / 2e9 + state / DISK_BYTES_PER_S)
    assert use.end_s == END_S["tpu"] == 60 and "the state is copied at 2 GB/s and written at 200 MB/s" in use.assumed
    assert "compiling takes as long there as here" in use.assumed


def test_a_checkpoint_that_is_not_written_when_the_next_is_due_is_waited_for():
    often = replace(config_of("gpt2-xl"), run=replace(config_of("gpt2-xl").run, checkpoint_every=10))
    use = spend(often, parse_target("v5e-8"), 2.0, 40.0, 3600, None)
    state = 12 * 1_557_611_200
    saves = -(-use.steps // 10)
    waits = state / 200e6 - 20  # 93 s to write, 20 s of training between
    assert use.checkpoint_s == pytest.approx(saves * state / 2e9 + (saves - 1) * waits + state / 200e6)


def test_only_at_the_end():
    config = config_of("gpt2", eval_every=0)
    config = replace(config, run=replace(config.run, checkpoint_every=0))
    use = spend(config, parse_target("h100"), 1.0, None, 3600, None)
    assert use.evaluation_s == pytest.approx(2 / 3) and use.epochs is None
    state = 12 * 124_439_808
    assert use.checkpoint_s == pytest.approx(state / 2e9 + state / 200e6) and use.end_s == END_S["gpu"]
    assert use.compile_s == pytest.approx(COMPILE_S * 4 / 3) and "60 s to compile" in use.assumed


def test_all_that_is_held_out():
    config = config_of("gpt2", eval_tokens=0)  # 0.5% of the text
    use = spend(config, parse_target("h100"), 1.0, 60.0, 36000, 199 * 10**6)
    assert use.evaluation_s == pytest.approx(-(-use.steps // 250) * 1e6 / 524288 / 3)
    words = spend(config, parse_target("h100"), 1.0, 60.0, 36000, None)
    assert words.evaluation_s == 0 and any("is not known" in one for one in words.assumed)


def test_more_time_is_never_fewer_steps():
    config = config_of("gpt2")
    steps = [spend(config, parse_target("v5e-1"), 3.1, 40.0, minutes * 60, None).steps for minutes in range(5, 90, 7)]
    assert steps == sorted(set(steps))


def test_a_budget_too_short_for_one_step_and_one_checkpoint():
    config, target = config_of("gpt2"), parse_target("v5e-8")
    with pytest.raises(InputError) as error:
        spend(config, target, 0.8, 42.0, 90, None)
    text = str(error.value)
    assert "--budget: 90s is too short: 45s to start, 56s to compile" in text and "checkpoint" in text
    enough = parse_budget(text.rpartition("at least ")[2])
    assert spend(config, target, 0.8, 42.0, enough, None).steps >= 1
    with pytest.raises(InputError):  # it is the need to the second
        spend(config, target, 0.8, 42.0, enough - 1, None)


def test_the_configuration_of_a_short_run_warms_up_in_a_tenth_of_it():
    config, target = config_of("gpt2", tokens=10**9), parse_target("v5e-1")
    use = spend(config, target, 8.4, 40.0, 85 * 60, None)
    short = within(config, use, set())
    assert use.steps < 700 and short.train.steps == use.steps and short.train.tokens == 0
    assert short.optimizer.warmup_steps == use.steps // 10 and validate(short) == []
    long = within(config, spend(config, target, 0.8, 40.0, 9 * 3600, None), set())
    assert long.optimizer.warmup_steps == 700  # as it was


def test_a_warm_up_that_was_typed_stays_or_is_refused():
    config, typed = config_of("gpt2"), {"--optimizer.warmup-steps"}
    use = spend(config, parse_target("v5e-1"), 3.0, 40.0, 85 * 60, None)
    assert within(config, use, typed).optimizer.warmup_steps == 700 > use.steps // 10
    with pytest.raises(InputError, match="a warm-up of 700 steps is longer than the"):
        within(config, replace(use, steps=600), typed)


@pytest.mark.parametrize(
    ("chip", "many"),
    [
        ("v5e-1", 1), ("v5e-8", 1), ("v6e-8", 1), ("v5e-16", 4), ("v5e-256", 64), ("2xv5e-256", 128), ("v3-8", 1),
        ("v4-16", 2), ("v5p-8", 1), ("h100", 1), ("8xh100", 1), ("16xh100", 2), ("cpu", 1),
    ],
)  # fmt: skip
def test_hosts(chip, many):
    assert hosts(parse_target(chip)) == many


def test_each_host_writes_its_part_of_a_checkpoint():
    config = config_of("gpt2")
    use = spend(config, parse_target("v5e-256"), 0.03, 40.0, 9 * 3600, None)
    saves, part = -(-use.steps // 100), 12 * 124_439_808 / 64
    assert use.checkpoint_s == pytest.approx(saves * part / 2e9 + part / 200e6)
    words = "each of the 64 hosts copies its part of the state at 2 GB/s and writes it at 200 MB/s"
    assert words in use.assumed


def test_no_more_is_evaluated_than_is_held_out(tmp_path):
    config = config_of("gpt2")  # asks for 1,048,576 tokens and holds out 0.5%
    use = spend(config, parse_target("h100"), 1.0, 60.0, 36000, 199_000)
    assert use.evaluation_s == pytest.approx(-(-use.steps // 250) * 1000 / 524288 / 3)
    splits = {"train": {"tokens": 199_000}, "heldout": {"tokens": 20_000}}
    (tmp_path / "manifest.json").write_text(json.dumps({"splits": splits}))
    counted = replace(config, data=replace(config.data, paths=(str(tmp_path),)))
    use = spend(counted, parse_target("h100"), 1.0, 60.0, 36000, 199_000)
    assert use.evaluation_s == pytest.approx(-(-use.steps // 250) * 20_000 / 524288 / 3)


def test_what_takes_more_than_a_twentieth_of_the_session_is_said_with_what_makes_it_less():
    config, target = config_of("gpt2", eval_every=1), parse_target("v5e-8")
    asked = (target, 0.01, 40.0)
    use = spend(config, *asked, 9 * 3600, None)
    assert use.checkpoint_s > 0.4 * 9 * 3600
    saves, evaluations = overhead_notes(config, *asked, use, None)
    for note, flag, section in ((saves, "--checkpoint-every", "run"), (evaluations, "--eval-every", "train")):
        assert "of the session" in note
        every = int(re.search(flag + r" (\d+)", note)[1])
        field = "checkpoint_every" if section == "run" else "eval_every"
        better = replace(config, **{section: replace(getattr(config, section), **{field: every})})
        then = spend(better, *asked, 9 * 3600, None)
        part_s = then.checkpoint_s if section == "run" else then.evaluation_s
        assert part_s <= 0.05 * 9 * 3600 and f"{part_s / 32400:.1%}" in note
    config = config_of("gpt2")
    assert overhead_notes(config, target, 0.8, 40.0, spend(config, target, 0.8, 40.0, 9 * 3600, None), None) == []
    short = spend(config_of("gpt2-xl"), target, 2.0, 40.0, 300, None)  # its one checkpoint takes 103 s
    (note,) = overhead_notes(config_of("gpt2-xl"), target, 2.0, 40.0, short, None)
    assert note.startswith("checkpoints take 3") and "no --checkpoint-every" in note
