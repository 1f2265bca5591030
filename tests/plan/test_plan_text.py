"""What a person reads of a plan, and what a program does."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from sample import hbm, option, plan

from podling.cost.records import CATEGORIES, KINDS
from podling.plan.record import record
from podling.plan.records import Loss, Size
from podling.plan.tables import CATEGORY_WORDS, KIND_WORDS, seconds
from podling.plan.target import parse_target
from podling.plan.text import show


def shown(made, width: int = 80) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False)
    show(made, console)
    return stream.getvalue()


def flat(text: str) -> str:
    """As if no line had been wrapped."""
    return " ".join(text.split())


def test_the_answer_comes_first_and_nothing_is_left_out():
    lines = shown(plan()).splitlines()
    assert lines[0] == "gpt2, 124M parameters, on v5e-8 (8 x v5e)"
    assert lines[1] == "fits: 6.00 GiB of 15.75 GiB on each device, 9.75 GiB to spare"
    assert lines[2] == "step: 0.500 s (0.400 s to 0.600 s), 1.05M tokens/s, MFU 41.2% of 8 x 197 TFLOP/s"
    assert lines[3] == "layout: data=8, 8 x 64 rows, remat dots, loss chunks of 256"
    text = flat(" ".join(lines))
    for words in (
        "within 20% of two runs",
        "4 programs compiled now",
        "params.blocks.mlp_up parameters f32[12,768,3072] 108.0 MiB",
        "jvp(mlp)/dot_general matmul 12 0.200 s",
        "copy.3 memory",
        "matrix products 0.300 s",
        "waiting for collectives 50.0 ms",
        "9:00:00: starting 1:00, compiling 0:45, training 8:38:15, evaluating 15:00, checkpoints 4:00, "
        "samples and export 1:00",
        "32.6B tokens in 62,190 steps, 3.26 epochs of the data",
        "held-out loss of 3.05 to 3.21 nats/token: Hoffmann et al. 2022; missed two public runs by up to 3%",
        "taken for granted: a checkpoint takes 3 s",
        "needs 19.00 GiB of 15.75 GiB, most of it logits",
        "/tmp/plan/compiler.txt",
        "- a note",
    ):
        assert words in text
    assert lines[-1] == f"  {plan().command}"  # in one line, to be copied


def test_runners_up_stand_below_the_chosen_with_what_they_lose():
    rows = [line.split() for line in shown(plan()).splitlines()]
    chosen = next(row for row in rows if row[:1] == ["data=8"])
    assert chosen == ["data=8", "8", "x", "64", "dots", "256", "6.00", "GiB", "0.500", "s", "chosen"]
    assert next(row for row in rows if row[:1] == ["fsdp=8"])[-1] == "+10%"
    whole = next(row for row in rows if row[:1] == ["data=2,fsdp=4"])
    assert whole[1:4] == ["64", "dots", "-"] and whole[-1] == "+40%"
    beside = plan(runners_up=(option("fsdp=8", 0.55, 5.0, source="estimate"),))
    assert "+10% est." in shown(beside)


def test_an_estimate_is_called_one():
    made = plan(chosen=replace(option(source="estimate"), compile_s=None), runners_up=())
    assert "an estimate: no compiler has seen this program" in shown(made)
    assert "an estimate" not in shown(plan())
    assert "all from the cache" in flat(shown(plan(compiled=0)))
    assert record(made)["source"] == "estimate" and record(plan())["source"] == "compiler"


def test_what_does_not_fit_says_so():
    refused = option(step_s=None, gib=19.0, refusal="needs 19.00 GiB of 15.75 GiB")
    text = shown(plan(chosen=refused, runners_up=(), budget=None, loss=None, mfu=None))
    assert text.splitlines()[1] == "does not fit: needs 19.00 GiB of 15.75 GiB"
    assert "\nfits:" not in text and "nats/token" not in text
    assert record(plan(chosen=refused))["fits"] is False
    over = plan(chosen=replace(option(), hbm=hbm(19.0)))  # timed, but too large
    assert "does not fit: 19.00 GiB of 15.75 GiB" in shown(over)


def test_a_loss_without_a_law_and_an_unknown_mfu():
    text = shown(plan(loss=Loss(None, "no law holds for 2M parameters"), mfu=None))
    assert "no forecast of the loss: no law holds for 2M parameters" in text and "MFU -" in text
    assert record(plan(loss=Loss(None, "none")))["loss_range"] is None


def test_an_approximate_target_is_marked_once():
    target = replace(parse_target("v4-8"), approximate="its compiler has 8 cores where there are 4 chips")
    text = shown(plan(target=target, notes=(target.approximate, "another")))
    assert text.count("its compiler has 8 cores") == 1 and "approximate: its compiler" in text and "another" in text


def test_the_sizes_compared_are_shown_with_the_chosen_first():
    sizes = (
        Size("gpt2", 124439808, 32605470720, 1048576.0, (3.05, 3.21), True, True, 3.0512),
        Size("gpt2-medium", 354823168, 9000000000, 300000.0, (3.1, 3.3), False, True),
        Size("gpt2-xl", 1557611200, 0, 0.0, None, False, False),
    )
    text = shown(plan(sizes=sizes))
    rows = [line.split() for line in text.splitlines()]
    first = next(row for row in rows if row[:1] == ["gpt2"])
    assert first == ["gpt2", "124M", "32.6B", "1.05M", "3.051", "3.05", "to", "3.21", "chosen"]
    assert next(row for row in rows if row[:1] == ["gpt2-medium"])[-1] == "est."
    assert "does not fit" in next(line for line in text.splitlines() if line.startswith("gpt2-xl"))
    assert record(plan(sizes=sizes))["model"] == "gpt2"
    assert [size["name"] for size in record(plan(sizes=sizes))["sizes"]] == ["gpt2", "gpt2-medium", "gpt2-xl"]


@pytest.mark.parametrize("width", [80, 200])
def test_eighty_columns_hold_the_widest_mesh(width):
    wide = option("data=256,fsdp=16,tensor=16", 123.4, 15.2, micro_batch=65536, accumulation=128)
    text = shown(plan(chosen=wide, runners_up=(wide,)), width)
    assert "…" not in text and "data=256,fsdp=16,tensor=16" in text and "128 x 65536" in text
    assert all(len(line) <= width for line in text.splitlines()[:-1])


def test_words_for_every_kind_and_category():
    assert set(KIND_WORDS) == set(KINDS)
    assert set(CATEGORY_WORDS) <= set(CATEGORIES)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0123, "12.3 ms"),
        (0.0, "0 ms"),
        (0.2, "0.200 s"),
        (99.99, "100 s"),
        (0.2545, "0.255 s"),
        (12.34, "12.3 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_seconds(value, words):
    assert seconds(value) == words


def test_the_record_has_every_key_and_survives_json():
    found = json.loads(json.dumps(record(plan()), allow_nan=False))
    keys = "fits chip devices model mesh micro_batch accumulation remat loss_chunk hbm_bytes hbm_limit_bytes step_s "
    keys += "step_s_range tokens_per_s mfu tokens loss_range compile_s command runners_up"
    assert set(keys.split()) <= set(found)
    assert (found["fits"], found["chip"], found["devices"], found["model"]) == (True, "v5e-8", 8, "gpt2")
    assert (found["mesh"], found["micro_batch"], found["accumulation"]) == ("data=8", 64, 8)
    assert sum(found["hbm_by_category"].values()) == found["hbm_bytes"] == 6 * 2**30
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"])
    assert found["step_s_range"] == [0.4, 0.6] and found["loss_range"] == [3.05, 3.21]
    assert (found["tokens"], found["steps"], found["compile_s"]) == (32605470720, 62190, 41.0)
    assert [other["mesh"] for other in found["runners_up"]] == ["fsdp=8", "data=2,fsdp=4"]
    assert found["runners_up"][0]["step_s"] == 0.55
    assert found["refused"][0]["refusal"].startswith("needs 19") and found["refused"][0]["step_s"] is None
    assert found["ops"][0]["name"] == "fusion.7" and found["hbm_largest"][1]["name"] == "logits"


def test_what_is_chosen_for_the_chip_is_shown_with_its_measurement():
    made = plan()
    attention = next(choice for choice in made.choices if choice.field == "attention")
    assert attention.value == "fused" and attention.why and f"chosen: {attention}" in flat(shown(made))
    assert {"field": "attention", "value": "fused", "why": attention.why, "said": True} in record(made)["choices"]
    told = replace(made, config=replace(made.config, train=replace(made.config.train, attention="reference")))
    assert "chosen: attention" not in shown(told) and "attention" not in {c["field"] for c in record(told)["choices"]}


def test_without_a_budget_the_tokens_are_the_configurations_own():
    found = record(plan(budget=None))
    assert (found["tokens"], found["steps"], found["budget"]) == (19073 * 524288, 19073, None)
    assert found["train_s"] == pytest.approx(19073 * 0.5)
    text = flat(shown(plan(budget=None)))
    assert "the 19,073 steps of the configuration, 10.0B tokens, take 2:38:56 (--budget TIME plans a session)" in text


def test_a_model_of_another_shape_is_not_called_by_its_presets_name():
    config = plan().config
    wider = replace(config, model=replace(config.model, layers=6, embed=1536))
    name = "gpt2 with 6 layers, 12 heads, embed 1536, mlp 3072"
    assert shown(plan(config=wider)).startswith(f"{name}, ") and record(plan(config=wider))["model"] == name
    sizes = (Size("gpt2-45m", 45_000_000, 1, 1.0, None, True, True),)
    assert record(plan(config=wider, sizes=sizes))["model"] == "gpt2-45m"
    longer = replace(config, model=replace(config.model, context=2048, dropout=0.1, vocab_size=300))
    assert record(plan(config=longer))["model"] == "gpt2"  # its shape is


def test_bars_of_memory_are_as_long_as_what_they_stand_for():
    def bars(made) -> dict[str, str]:
        lines = [line.split() for line in shown(plan(chosen=made)).splitlines()]
        return {line[0]: " ".join(line[3:]) for line in lines if line[2:3] == ["GiB"] and line[0] != "fits:"}

    half = bars(option(gib=15.75 / 2))
    assert half["parameters"] == "██████ 50%" and half["together"] == "█" * 12
    lines = shown(plan(chosen=option(gib=15.75 / 2))).splitlines()
    assert next(line for line in lines if line.startswith("its memory")).split()[-1] == "█" * 24
    over = shown(plan(chosen=option(gib=31.5))).splitlines()
    assert next(line for line in over if line.startswith("its memory")).split()[-1] == "█" * 12
    little = shown(plan(chosen=option(gib=0.1))).splitlines()
    assert next(line for line in little if line.startswith("parameters")).split()[-2] == "█" * 12
    assert next(line for line in little if line.startswith("its memory")).split()[-1] == "GiB"


def test_the_peak_of_one_device_is_named_and_one_that_is_not_known_is_not():
    one = shown(plan(target=parse_target("t4"), peak_flops=8.1e12))
    assert "MFU 41.2% of 8.1 TFLOP/s\n" in one and record(plan())["peak_flops"] == 197e12
    assert "TFLOP" not in shown(plan(mfu=None, peak_flops=None))


def test_instructions_of_one_line_are_shown_as_one():
    found = plan().chosen.time
    assert found is not None
    first, other = found.ops
    again = replace(first, name="fusion.9", times=4, step_s=0.1, kind="memory")
    text = shown(plan(chosen=replace(option(), time=replace(found, ops=(first, other, again)))))
    lines = [line.split() for line in text.splitlines() if "jvp(mlp)/dot_general" in line]
    assert lines == [["jvp(mlp)/dot_general", "matmul", "16", "0.300", "s"]]
