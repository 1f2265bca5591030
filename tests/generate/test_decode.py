"""Decoding against the uncached forward pass, one token at a time, and what ends a row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.config import ModelConfig
from podling.errors import InputError
from podling.generate.decode import Timing, Tokens, bucket, generate
from podling.generate.settings import Settings
from podling.generate.steps import decode
from podling.model.gpt import forward, logits
from podling.model.spec import Params, abstract_params
from podling.parallel.mesh import make_mesh

CFG = ModelConfig(layers=2, heads=2, embed=16, mlp=32, context=24, vocab_size=37)
EOT = 0


@pytest.fixture(scope="module")
def params(draw_params) -> Params:
    return draw_params(CFG, 0.25)


@pytest.fixture(scope="module")
def next_scores(params):
    """Scores of the next token from the whole sequence, without a cache: right padding cannot be seen."""

    @jax.jit
    def scores(tokens, length):
        return logits(params, forward(params, tokens[None], CFG), CFG)[0, length - 1, : CFG.vocab_size]

    def of(ids: list[int]) -> np.ndarray:
        return np.asarray(scores(jnp.asarray(ids + [0] * (CFG.context - len(ids))), len(ids)))

    return of


def collect(events) -> tuple[list[list[int]], list[str]]:
    ids: dict[int, list[int]] = {}
    finish: dict[int, str] = {}
    for event in events:
        assert isinstance(event, Tokens) and event.row not in finish
        ids.setdefault(event.row, []).extend(event.ids)
        if event.finish:
            finish[event.row] = event.finish
    assert sorted(ids) == sorted(finish)
    return [ids[row] for row in sorted(ids)], [finish[row] for row in sorted(ids)]


def greedy_reference(next_scores, prompt: list[int], max_tokens: int) -> tuple[list[int], str]:
    ids, new = list(prompt), []
    while len(new) < max_tokens:
        token = int(next_scores(ids).argmax())
        if token == EOT:
            return new, "end_of_text"
        new.append(token)
        if len(ids) == CFG.context:
            return new, "length" if len(new) == max_tokens else "context_full"
        ids.append(token)
    return new, "length"


@pytest.mark.parametrize("tokens_per_call", [1, 8])
def test_greedy_equals_the_uncached_model_for_every_row(params, next_scores, tokens_per_call):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, CFG.vocab_size, n).tolist() for n in (1, 3, 8, 15, 24)]
    got, finish = collect(
        generate(
            params, CFG, prompts, Settings(max_tokens=11, temperature=0.0), end_id=EOT, tokens_per_call=tokens_per_call
        )
    )
    want = [greedy_reference(next_scores, prompt, 11) for prompt in prompts]
    assert list(zip(got, finish, strict=True)) == want
    assert "length" in finish and finish[-1] == "context_full" and len(got[-1]) == 1


def test_a_row_gives_what_it_gives_alone_with_its_own_seed(params):
    prompts = [[5], [9, 3, 7, 7, 1], [5], [2] * 12]
    settings = Settings(max_tokens=9, temperature=5.0, top_k=30, top_p=0.97, seed=40)
    together, finish = collect(generate(params, CFG, prompts, settings, end_id=EOT))
    for row, prompt in enumerate(prompts):
        alone = collect(
            generate(params, CFG, [prompt], dataclasses.replace(settings, seed=40 + row), end_id=EOT, tokens_per_call=3)
        )
        assert alone == ([together[row]], [finish[row]])
    assert together[0] != together[2]  # the same prompt twice is two samples


def test_end_of_text_and_stop_ids_end_a_row_and_are_not_part_of_it(params, next_scores):
    prompt = [4, 11]
    whole, _ = greedy_reference(next_scores, prompt, 8)
    stop = whole[2]
    settings = Settings(max_tokens=8, temperature=0.0)
    got, finish = collect(generate(params, CFG, [prompt], settings, end_id=EOT, stop_ids=(stop,)))
    assert got == [whole[: whole.index(stop)]] and finish == ["stop"]
    got, finish = collect(generate(params, CFG, [prompt], settings, end_id=stop))
    assert got == [whole[: whole.index(stop)]] and finish == ["end_of_text"]


def test_forbidden_and_padding_ids_are_never_drawn(params):
    never = tuple(range(1, 30))
    settings = Settings(max_tokens=20, temperature=3.0)
    got, _ = collect(generate(params, CFG, [[3]] * 16, settings, end_id=EOT, never_ids=never))
    assert {i for row in got for i in row} <= set(range(30, CFG.vocab_size))


def test_an_empty_prompt_starts_from_end_of_text(params):
    settings = Settings(max_tokens=5, temperature=0.0)
    empty = collect(generate(params, CFG, [[]], settings, end_id=EOT))
    assert empty == collect(generate(params, CFG, [[EOT]], settings, end_id=EOT))


def test_sharded_parameters_and_a_set_mesh_change_nothing(params):
    settings = Settings(max_tokens=6, temperature=0.0)
    want = collect(generate(params, CFG, [[5], [6, 7]], settings, end_id=EOT))
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    placed = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), params, abstract_params(CFG, mesh))
    with jax.set_mesh(mesh):
        assert collect(generate(placed, CFG, [[5], [6, 7]], settings, end_id=EOT)) == want


def test_other_prompts_and_settings_do_not_compile_again(params):
    collect(generate(params, CFG, [[5], [6, 7]], Settings(max_tokens=9), end_id=EOT))
    timing = Timing()
    before = decode._cache_size()
    events = generate(
        params,
        CFG,
        [[1, 2, 3], [4]],
        Settings(max_tokens=9, temperature=0.5, top_k=3, seed=9),
        end_id=EOT,
        timing=timing,
    )
    ids, finish = collect(events)
    assert decode._cache_size() == before
    # what the timing counts is what came out: all but each row's first token, ends included
    assert timing.decoded == sum(map(len, ids)) - 2 + finish.count("end_of_text")
    assert timing.prefill_s > 0 and timing.decode_s > 0


def test_every_problem_is_named_at_once(params):
    with pytest.raises(InputError) as caught:
        next(generate(params, CFG, [[1] * 25, [40], [-1]], Settings(top_p=0.0), end_id=EOT))
    text = str(caught.value)
    assert "--top-p" in text and "prompt 1: 25 tokens, and the model's context is 24" in text
    assert "prompt 2: token id 40" in text and "prompt 3: token id -1" in text


def test_few_programs_serve_every_length():
    sizes = [bucket(length, 1024) for length in range(1, 1025)]
    assert all(length <= size < max(33, 1.5 * length) for length, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert bucket(70, 80) == 80  # never more positions than the model has
