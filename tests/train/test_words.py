"""Figures and lines of a run as words."""

import pytest
from figures import BASELINE, EVALUATION, record

from podling.data.events import PrepareEvent
from podling.train.progress import words


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (725, "12:05"), (3599.6, "1:00:00"), (10965, "3:02:45")],
)
def test_durations(seconds, shown):
    assert words.duration(seconds) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (None, "-"),
        (0, "0"),
        (950, "950"),
        (999.6, "1.00K"),
        (12_345.6, "12.3K"),
        (100_000, "100K"),
        (999_960, "1.00M"),
        (124_439_808, "124M"),
        (6.64e9, "6.64B"),
    ],
)
def test_counts(number, shown):
    assert words.count(number) == shown


def test_a_step_in_one_line():
    assert words.step_line(record(30), 1200) == (
        "step    30/1,200  loss 4.2000  lr 1.90e-03  12.3K tokens/s  MFU 41.2%  data wait 0.2%  left 2:05"
    )
    unknown = {"step": 1, "loss": 4.0, "lr": None, "tokens_per_s": None, "mfu": None}
    assert words.step_line(unknown, 9) == "step 1/9  loss 4.0000  lr -  - tokens/s  MFU -  data wait -  left -"


def test_an_evaluation_in_one_line():
    line = "step 30  held-out loss 3.4568 nats/token, 1.4123 bits/byte, perplexity 31.71"
    assert words.evaluation_line(EVALUATION) == line
    assert words.evaluation_line(EVALUATION, BASELINE) == line + " (bigram 4.4123)"
    assert "bits" not in words.evaluation_line(EVALUATION | {"val_bits_per_byte": None})


def test_preparing_in_one_line():
    event = PrepareEvent("tokenizing", 3_000_000, 12_600_000, 8.12, 1.4, 1_000_000)
    assert words.prepare_line(event) == "tokenizing: 3.0 MB of 12.6 MB, 8.1 MB/s, 1.00M tokens, 0:01 left"
    assert words.prepare_line(PrepareEvent("hashing", 5, None, 0.0, None, 0)) == "hashing: 5 bytes, 0.0 MB/s"


def test_the_curve_keeps_its_shape_in_bounded_memory():
    curve = words.Curve()
    for step in range(100_000):
        curve.add(10 - step / 10_000)
        curve.add(float("nan"))
    assert len(curve._means) < 2 * curve.SIZE
    drawn = curve.draw(16)
    assert drawn == "".join(sorted(drawn, reverse=True)) and (drawn[0], drawn[-1], len(drawn)) == ("█", "▁", 16)
    assert words.Curve().draw(10) == ""
    flat = words.Curve()
    flat.add(1.0)
    assert flat.draw(10) == "▁"


def test_model_output_cannot_steer_the_terminal():
    assert words.printable("a\x1b[31m\tb\r\n日本\x00\x9b") == "a�[31m\tb�\n日本��"
    assert words.first_lines("\n" + "x\n" * 20, most=3) == "x\nx\nx\n... 17 more lines"
