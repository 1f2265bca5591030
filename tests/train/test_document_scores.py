"""Documents dealt to eight devices come to what one ordinary gradient of each comes to."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podling.config import Config, DataConfig, ModelConfig
from podling.data.documents import document_tokens, list_documents
from podling.data.prepare import prepare
from podling.data.shards import Prepared
from podling.model.gpt import forward
from podling.model.loss import cross_entropy
from podling.model.spec import init_params
from podling.train import document_scores
from podling.train.document_scores import score_documents, windows_at_once

pytestmark = pytest.mark.usefixtures("quick_compile")

CONTEXT = 16
CONFIG = Config(model=ModelConfig(layers=1, heads=2, embed=16, mlp=32, context=CONTEXT, vocab_size=257))
TEXTS = ["", "a", "b" * CONTEXT, "c" * (CONTEXT - 1), "windows of a longer text " * 12, "é 日本", *map(str, range(30))]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("data")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = DataConfig(paths=(str(folder / "rows.jsonl"),), tokenizer="bytes", holdout=0.5)
    return Prepared.open(prepare(config, folder / "out"))


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: jax.tree.map(lambda x: 3 * x, init_params(CONFIG.model, key=jax.random.key(0))))()


@pytest.fixture(scope="module")
def by_loop(prepared, params) -> dict[int, tuple[int, float, float]]:
    """Tokens, nats per token and gradient norm of each document, all its windows as the rows of one batch."""

    @jax.jit
    @jax.value_and_grad
    def mean_loss(params, inputs, targets, weights):
        nll, count = cross_entropy(params, forward(params, inputs, CONFIG.model), targets, weights, CONFIG.model)
        return nll / count

    expected = {}
    for document in list_documents(prepared, ("train", "heldout")):
        tokens = document_tokens(prepared, document)
        rows = -(-len(tokens) // CONTEXT)
        stream = np.full(rows * CONTEXT + 1, 256, np.int32)
        stream[1 : len(tokens) + 1] = tokens
        weights = np.arange(rows * CONTEXT) < len(tokens)
        arrays = (stream[:-1], stream[1:], weights.astype(np.float32))
        loss, grad = mean_loss(params, *(array.reshape(rows, CONTEXT) for array in arrays))
        norm = math.sqrt(sum(float(np.square(np.asarray(leaf, np.float64)).sum()) for leaf in jax.tree.leaves(grad)))
        expected[document.index] = (len(tokens), float(loss), norm)
    return expected


@pytest.mark.parametrize(("devices", "at_once"), [(8, 2), (1, 5)])
def test_equal_to_a_loop(prepared, params, by_loop, devices, at_once, monkeypatch):
    monkeypatch.setattr(document_scores, "windows_at_once", lambda *_: at_once)
    told: list[str] = []
    splits, dtype = ("train", "heldout"), jnp.float32
    scores = score_documents(
        params, CONFIG, prepared, splits, devices=jax.devices()[:devices], dtype=dtype, tell=told.append
    )
    records = {record["number"]: record for record in (score.record() for score in scores)}
    assert len(scores) == len(records) and records.keys() == by_loop.keys() == set(range(1, len(TEXTS)))
    for number, (tokens, loss, norm) in by_loop.items():
        record = records[number]
        assert (record["tokens"], record["bytes"]) == (tokens, tokens - 1)
        goes_on = "…" * (len(TEXTS[number]) > 64)
        assert record["text"] == TEXTS[number][:64].strip() + goes_on and record["document"].endswith(
            f"(document {number})"
        )
        np.testing.assert_allclose(record["nats_per_token"], loss, rtol=2e-6)
        np.testing.assert_allclose(record["grad_norm"], norm, rtol=1e-5)
        np.testing.assert_allclose(record["bits_per_byte"], loss / math.log(2) * tokens / (tokens - 1), rtol=2e-6)
    if devices == 1:
        assert told and told[-1].startswith(("9", "100%"))


def test_a_large_model_goes_window_by_window():
    """Each window in a call needs a gradient of its own, as large as the model."""
    model = ModelConfig(layers=12, heads=12, embed=768, mlp=3072, context=1024, vocab_size=50257)
    assert windows_at_once(Config(model=model), 4, "gpu", 8 * 10**9) == 1
    assert 1 < windows_at_once(Config(model=model), 4, "gpu", 80 * 10**9) < document_scores.MOST_WINDOWS
    assert windows_at_once(CONFIG, 4, "tpu", 8 * 10**9) == document_scores.MOST_WINDOWS
    assert windows_at_once(CONFIG, 4, "cpu", 8 * 10**9) == 1
