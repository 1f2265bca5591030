"""What a run shows: the right figures, in the form that fits where they go, and never a reason to fail."""

import io
import os
import pty
import re
import subprocess
import sys
import types

import pytest
from figures import BASELINE, EVALUATION, SUMMARY, record
from rich.console import Console

from podling.data.events import PrepareEvent
from podling.train.progress import LiveReporter, NotebookReporter, PlainReporter, make_reporter, words
from podling.train.progress.notebook import View, in_notebook
from podling.train.progress.summary import summary_view


def run_through(reporter, steps=35):
    with reporter.preparing() as progress:
        progress(PrepareEvent("tokenizing", 3_000_000, 12_600_000, 8.12, 1.4, 1_000_000))
    reporter.say("data: 12 documents")
    reporter.begin(40, 0, BASELINE)
    with reporter.status("compiling the training step", 40):
        pass
    for step in range(1, steps + 1):
        reporter.step(record(step))
    reporter.evaluation(EVALUATION)
    reporter.sample("def f():\n    return 1\n")


def test_plain_lines_have_no_bar_and_no_control_codes():
    out = io.StringIO()
    reporter = PlainReporter(40, log_every=10, stream=out)
    run_through(reporter, steps=40)
    reporter.summary(SUMMARY)
    reporter.close()
    text = out.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    assert re.findall(r"^step +(\d+)/40 ", text, re.MULTILINE) == ["10", "20", "30", "40"]
    for line in (
        "tokenizing ...",
        "data: 12 documents",
        "to beat: unigram 5.9871, bigram 4.4123 nats/token",
        "compiling the training step, about 40 s ...",
        "    return 1",
    ):
        assert line in text


def test_the_last_step_has_its_line_whatever_the_interval():
    out = io.StringIO()
    reporter = PlainReporter(7, log_every=5, stream=out)
    for step in range(1, 8):
        reporter.step(record(step))
    assert re.findall(r"step (\d)/7", out.getvalue()) == ["5", "7"]


def test_how_far_something_is():
    assert words.how_far(0.25, 30.0) == "25%, 1:30 left"
    assert words.how_far(1.0, 30.0) == "100%, 0:00 left"


def test_a_long_status_says_now_and_then_how_far_it_is():
    stream, now = io.StringIO(), iter([0.0, 3.0, 12.0, 12.0, 15.0, 20.0])
    with PlainReporter(9, stream=stream, clock=lambda: next(now)).status("evaluating") as tell:
        tell("3%")  # at 3 s: too early for a line
        tell("12%")
        tell("15%")
    lines = ["evaluating ...", "evaluating: 12%", "evaluating: done in 20 s"]
    assert stream.getvalue().splitlines() == lines


def test_a_long_status_says_how_long_it_took():
    out, now = io.StringIO(), [0.0]
    reporter = PlainReporter(1, stream=out, clock=lambda: now[0])
    with reporter.status("compiling", 40):
        now[0] += 38.2
    with reporter.preparing() as progress:
        for now[0] in (100.0, 101.0, 111.5):
            progress(PrepareEvent("tokenizing", 5, 10, 1.0, 2.0, 0))
    assert out.getvalue().splitlines() == [
        "compiling, about 40 s ...",
        "compiling: done in 38 s",
        "tokenizing ...",
        "tokenizing: 5 bytes of 10 bytes, 1.0 MB/s, 0:02 left",
    ]


def test_a_reader_that_goes_away_does_not_stop_the_run(monkeypatch):
    tries = []

    class Gone(io.StringIO):
        def flush(self):
            tries.append(True)
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    reporter = PlainReporter(40)
    run_through(reporter)
    reporter.summary(SUMMARY)
    assert len(tries) == 1


def test_a_stream_that_cannot_show_a_character_shows_another():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainReporter(1, stream=stream).say("2 → 3")
    assert stream.buffer.getvalue() == b"2 ? 3\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_the_live_view_fits_and_shows_every_figure(width):
    out = io.StringIO()
    reporter = LiveReporter(40, stream=out, width=width)
    run_through(reporter)
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(reporter)
    text = capture.get()
    assert max(map(len, text.splitlines())) <= min(width, 100)
    flat = re.sub(r"[│\s]+", " ", text)
    for figure in ("35/40", "88% left 2:05", "loss 4.1500", "3.4568 at step 30", "bigram 4.4123", "unigram 5.9871",
                   "1.90e-03", "12.3K tokens/s", "MFU 41.2%", "data wait 0.2%"):  # fmt: skip
        assert figure in flat, figure
    assert "retraces" not in flat
    reporter.step(record(36, retraces=2))
    with console.capture() as capture:
        console.print(reporter)
    assert "retraces 2" in re.sub(r"[│\s]+", " ", capture.get())
    reporter.close()
    reporter.close()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_summary_says_all_and_what_to_type_next(width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(
            summary_view(SUMMARY | {"parse_share": 0.65, "bigram_parse_share": 0.05, "example_prompt": "def "}, width)
        )
    text = capture.get()
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"unigram model +5\.9871", text)
    assert re.search(r"bigram model +4\.4123 +5%", text)
    assert re.search(r"this model +3\.4568 +65%", text)
    flat = re.sub(r"[│\s]+", " ", text)
    for figure in (
        "3.46M parameters",
        "600 steps, 2.46M tokens in 3:21",
        "12.3K tokens/s, MFU 41.2%",
        "3.2000",
        "1.4123",
    ):
        assert figure in flat
    commands = text.split("next:\n")[1]
    assert "podling generate 'runs/my book' --prompt 'def '" in commands
    assert "podling export 'runs/my book' --to hf DIR" in commands


def test_the_summary_holds_the_prediction_against_what_was_measured():
    foretold = {"step_s": 0.8, "step_s_range": [0.7, 0.9], "measured_step_s": 0.832}
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(summary_view(SUMMARY | {"prediction": foretold}, 100))
    flat = re.sub(r"[│\s]+", " ", capture.get())
    assert (
        "prediction 800 ms a step (700 ms to 900 ms), measured 832 ms: took 4% longer than predicted training" in flat
    )


def test_the_summary_without_optional_figures():
    console = Console(width=80, color_system=None)
    unknown = SUMMARY | dict.fromkeys(["mfu", "val_bits_per_byte", "export", "unigram_loss", "data_wait_share"])
    with console.capture() as capture:
        console.print(summary_view(unknown | {"retraces": 3}, 80))
    text = capture.get()
    assert "parse" not in text and "export  " not in text and "None" not in text
    assert "MFU -" in text and "traced again 3 times" in text and re.search(r"unigram model +-", text)
    assert "--prompt 'The '" in text


def test_the_notebook_updates_one_display_in_place(capsys):
    shown = []

    class Handle:
        def update(self, view):
            shown.append(view)

    def display(view, display_id):
        assert display_id is True and not shown
        shown.append(view)
        return Handle()

    reporter = NotebookReporter(40, display=display)
    run_through(reporter, steps=40)
    assert {type(view) for view in shown} == {View}
    assert any("compiling the training step, about 40 s" in repr(view) for view in shown)
    last = shown[-1]._repr_html_()
    for figure in ("40/40", "4.1000", "3.4568 at step 30", "bigram 4.4123", "12.3K tokens/s, MFU 41.2%"):
        assert figure in last
    assert "now" not in dict(shown[-1].rows)
    printed = capsys.readouterr().out
    assert "data: 12 documents" in printed and "loss 4." not in printed
    assert View([("<b>", "&")])._repr_html_().count("&lt;b&gt;") == 1


def test_the_form_fits_where_the_output_goes(monkeypatch):
    assert type(make_reporter(1)) is PlainReporter
    assert "IPython" not in sys.modules and not in_notebook()
    kernel = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert not in_notebook()


def test_with_json_nothing_goes_to_stdout(capsys):
    reporter = make_reporter(40, json=True)
    run_through(reporter)
    reporter.summary(SUMMARY)
    captured = capsys.readouterr()
    assert captured.out == "" and "this model" in captured.err


ON_TERMINAL = """
import json, sys
from podling.train.progress import make_reporter
reporter = make_reporter(40)
print(type(reporter).__name__)
reporter.begin(40, 0)
reporter.step({"step": 3, "loss": 1.0, "lr": 0.1})
raise SystemExit("a failure nobody expected")
"""


def on_terminal(**environment):
    ours, theirs = pty.openpty()
    env = (
        {k: v for k, v in os.environ.items() if k != "JPY_PARENT_PID"}
        | {"TERM": "xterm", "COLUMNS": "80"}
        | environment
    )
    process = subprocess.Popen([sys.executable, "-c", ON_TERMINAL], stdout=theirs, stderr=theirs, stdin=theirs, env=env)
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    process.wait(timeout=30)
    return output.decode()


def test_a_terminal_gets_the_live_view_and_its_cursor_back_after_a_failure():
    text = on_terminal()
    assert text.startswith("LiveReporter") and "3/40" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") > 0


@pytest.mark.parametrize("environment", [{"JPY_PARENT_PID": "1"}, {"TERM": "dumb"}])
def test_what_only_looks_like_a_terminal_gets_plain_lines(environment):
    text = on_terminal(**environment)
    assert text.startswith("PlainReporter") and "\x1b" not in text
