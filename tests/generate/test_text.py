"""Prompts to text: streaming equals the whole, stop strings, finish reasons, samples and their parse share."""

from pathlib import Path

import jax
import numpy as np
import pytest

from podling.config import Config, ModelConfig
from podling.data.vocabulary import bytes_tokenizer
from podling.errors import InputError
from podling.generate import text as text_module
from podling.generate.decode import generate
from podling.generate.model import Model, load_model
from podling.generate.samples import python_parse_share, sample_text
from podling.generate.settings import Settings
from podling.generate.text import Generation, Piece, generate_text
from podling.interop.hf import export_hf
from podling.interop.importing import import_model

CFG = ModelConfig(layers=1, heads=2, embed=16, mlp=32, context=64, vocab_size=257)


@pytest.fixture(scope="module")
def model(draw_params) -> Model:
    params = draw_params(CFG, 0.08)
    return Model(params=params, config=Config(model=CFG), tokenizer=bytes_tokenizer(), step=0)


def run(model, prompts, settings) -> tuple[dict[int, list[str]], Generation]:
    *pieces, last = generate_text(model, prompts, settings)
    assert isinstance(last, Generation) and all(isinstance(piece, Piece) and piece.text for piece in pieces)
    shown: dict[int, list[str]] = {row: [] for row in range(len(prompts))}
    for row, text in pieces:
        shown[row].append(text)
    return shown, last


def test_pieces_join_to_the_completions_and_to_the_decoded_ids(model):
    prompts, settings = ["日本", "", "The cat 🐈"], Settings(max_tokens=40, seed=3)
    shown, last = run(model, prompts, settings)
    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    tokens = [model.tokenizer.encode(prompt) for prompt in prompts]
    for event in generate(model.params, CFG, tokens, settings, end_id=256):
        ids[event.row] += event.ids
    for row, completion in enumerate(last.completions):
        assert completion.text == "".join(shown[row]) == model.tokenizer.decode(ids[row])
        assert completion.tokens == len(ids[row]) and completion.prompt_tokens == len(tokens[row])
        assert completion.prompt == prompts[row]
    assert last.tokens_per_s is not None and last.tokens_per_s > 0
    assert last.tokens_per_s == pytest.approx(last.timing.decoded / last.timing.decode_s)


def test_a_stop_string_ends_the_text_before_it(model):
    whole = run(model, ["ab"], Settings(max_tokens=50, seed=1))[1].completions[0].text
    at = 11
    stop = whole[at : at + 3]
    shown, last = run(model, ["ab"], Settings(max_tokens=50, seed=1, stop=("never in there", stop)))
    completion = last.completions[0]
    assert completion.text == whole[: whole.index(stop)] == "".join(shown[0])
    assert completion.finish_reason == "stop" and completion.tokens < 50


def test_many_prompts_go_in_groups_and_give_the_same(model, monkeypatch):
    prompts, settings = [f"prompt {i}" for i in range(4)], Settings(max_tokens=8, seed=5)
    want = run(model, prompts, settings)[1].completions
    monkeypatch.setattr(text_module, "ROWS", 2)
    assert run(model, prompts, settings)[1].completions == want


def test_the_context_is_a_stated_reason_and_a_longer_prompt_is_refused(model):
    long = "x" * 60
    completion = run(model, [long], Settings(max_tokens=20, temperature=0.0))[1].completions[0]
    assert (completion.tokens, completion.finish_reason) == (5, "context_full")
    with pytest.raises(InputError) as caught:
        next(generate_text(model, ["x" * 65, "fine", "y" * 70], Settings(min_p=-1)))
    assert [problem.where for problem in caught.value.problems] == ["--min-p", "prompt 1", "prompt 3"]
    with pytest.raises(InputError, match="no prompts"):
        next(generate_text(model, [], Settings()))


def test_ids_that_the_tokenizer_lacks_are_never_drawn(draw_params):
    wide = ModelConfig(layers=1, heads=2, embed=16, mlp=32, context=64, vocab_size=300)
    padded = Model(draw_params(wide, 0.02), Config(model=wide), bytes_tokenizer(), 0)
    _, last = run(padded, [""] * 8, Settings(max_tokens=40, temperature=5.0))
    assert sum(completion.tokens for completion in last.completions) > 200


def test_samples_do_not_depend_on_how_many(model):
    five = sample_text(model.params, CFG, model.tokenizer, 5, max_tokens=12, seed=9)
    assert len(set(five)) == 5
    assert sample_text(model.params, CFG, model.tokenizer, 2, max_tokens=12, seed=9) == five[:2]
    assert sample_text(model.params, CFG, model.tokenizer, 2, max_tokens=12, seed=12) == five[3:5]


@pytest.mark.parametrize(
    "text, counts",
    [
        ("a = 1\nb = 2\nc = 3\nd = (", True),  # the last line is cut
        ("def f():\n    x = 1\n    return x\n", True),  # nested statements count
        ("def f():\n    return 1\nunfinished", False),  # two statements
        ("a = 1\nb = = 2\nc = 3\n", False),
        ("a = 1; b = 2; c = 3", False),  # no newline: nothing is left
        ("", False),
        ("a = '\\d'\nb = 1 is 1\nc = 3\n", True),  # warnings are not errors
        ("a = 1\nb = '\x00'\nc = 3\n", False),
        ("x = " + "(" * 5000 + "\na\nb\nc\n", False),
    ],
)
def test_what_counts_as_python(text, counts):
    assert python_parse_share([text, "a\nb\nc\n"]) == ((1.0, 2) if counts else (0.5, 1))


def test_share_of_nothing():
    assert python_parse_share([]) == (0.0, 0)


def test_an_imported_model_is_a_run_that_generates_and_exports_the_same(model, tmp_path):
    export_hf(model.params, CFG, model.tokenizer, tmp_path / "hf")
    said: list[str] = []
    made = import_model(tmp_path / "hf", tmp_path / "run", None, said.append)
    loaded = load_model(tmp_path / "run", said.append)
    assert (
        loaded.step == 0 and loaded.tokenizer.fingerprint == model.tokenizer.fingerprint == made.tokenizer.fingerprint
    )
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(a, b)
    settings = Settings(max_tokens=10, temperature=0.0)
    assert run(loaded, ["ab"], settings)[1].completions == run(model, ["ab"], settings)[1].completions
    # the same again changes nothing; another model is refused, and the first is still there
    import_model(tmp_path / "hf", tmp_path / "run", None, said.append)
    assert any("already" in text for text in said)
    export_hf(jax.tree.map(lambda x: 2 * x, model.params), CFG, model.tokenizer, tmp_path / "hf")
    with pytest.raises(InputError, match="weights"):
        import_model(tmp_path / "hf", tmp_path / "run", None, said.append)
    assert load_model(tmp_path / "run", said.append).step == 0


def test_a_model_without_a_tokenizer_needs_one(model, tmp_path):
    export_hf(model.params, CFG, model.tokenizer, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").rename(tmp_path / "words.json")
    with pytest.raises(InputError, match="--tokenizer"):
        import_model(tmp_path / "hf", tmp_path / "run", None, print)
    with pytest.raises(InputError, match="made from text"):
        import_model(tmp_path / "hf", tmp_path / "run", "bpe", print)
    assert not Path(tmp_path / "run").exists()
    made = import_model(tmp_path / "hf", tmp_path / "run", str(tmp_path / "words.json"), print)
    assert made.tokenizer.fingerprint == model.tokenizer.fingerprint


def test_a_tokenizer_larger_than_the_model_is_refused(draw_params, tmp_path):
    cfg = ModelConfig(layers=1, heads=1, embed=4, mlp=8, context=4, vocab_size=200)
    export_hf(draw_params(cfg, 0.02), cfg, bytes_tokenizer(), tmp_path / "hf")
    with pytest.raises(InputError, match="257 tokens, and the model's vocabulary is 200"):
        import_model(tmp_path / "hf", tmp_path / "run", None, print)
