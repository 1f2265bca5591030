"""Every prompt goes on to the end, and what was counted is what came."""

import dataclasses

import jax
import pytest

from podling.config import ModelConfig
from podling.measure import generation
from podling.measure.generation import measure_generation
from podling.model.spec import init_params

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = ModelConfig(layers=1, heads=2, embed=16, mlp=16, context=12, vocab_size=4)


def test_prompts_of_half_a_context(monkeypatch):
    read = {}

    def reading_s(device, read_bytes, dtype):
        read["bytes"] = read_bytes
        return 0.5

    timings = []
    original = generation.Timing
    monkeypatch.setattr(generation, "Timing", lambda: timings.append(original()) or timings[-1])
    monkeypatch.setattr(generation, "reading_s", reading_s)
    params = init_params(MODEL, key=jax.random.key(0))
    found = measure_generation(params, MODEL, 3, jax.devices()[0])
    assert (found.prompts, found.prompt_tokens, found.new_tokens) == (3, 6, 7)
    assert [timing.decoded for timing in timings] == [18, 18]  # the first of each comes out of the prompt
    assert found.tokens_per_s == pytest.approx(18 / timings[1].decode_s)
    assert 0 < found.first_token_s < 60
    assert found.most_tokens_per_s == 3 / 0.5
    assert found.read_share == pytest.approx(found.tokens_per_s / 6)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params)) * 4
    assert read["bytes"] == weights + 2 * 4 * 16 * 9 * 3  # keys and values of 9 positions, on average


def test_a_context_of_one_token(monkeypatch):
    monkeypatch.setattr(generation, "reading_s", lambda *_: 1.0)
    tiny = dataclasses.replace(MODEL, context=1)
    found = measure_generation(init_params(tiny, key=jax.random.key(0)), tiny, 1, jax.devices()[0])
    assert (found.prompt_tokens, found.new_tokens, found.tokens_per_s, found.read_share) == (1, 1, None, None)
