"""Folders both programs read: ours by transformers, theirs by us, with every kind of tokenizer."""

from pathlib import Path

import jax
import numpy as np
import pytest

from podling.config import DataConfig, ModelConfig
from podling.data.corpus import find_sources
from podling.data.tokenizer import Tokenizer
from podling.data.vocabulary import build_tokenizer
from podling.interop.hf import export_hf, import_hf
from podling.model.spec import init_params

pytestmark = pytest.mark.parity

TEXT = "Ein kleiner Text, naïve: 日本語のテキスト 🐈 and some English text, again and again.\n\tdef f(x):\n" * 30
PROBES = ["naïve text", " again  and\n\n日本", "def f(x):\n\treturn x", "語", "  "]


@pytest.fixture(scope="module", params=["bpe", "char", "bytes"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT + "".join(PROBES) + "return", encoding="utf-8")
    config = DataConfig(paths=(str(file),), tokenizer=request.param, vocab_size=280)
    return build_tokenizer(config, find_sources(config))


def small(tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig(layers=2, heads=2, embed=8, mlp=24, context=32, vocab_size=tokenizer.vocab_size, preset="gpt2")


def test_transformers_loads_an_export(tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cfg = small(tokenizer)
    params = jax.tree.map(lambda x: x * 5, init_params(cfg, key=jax.random.key(0)))
    done = export_hf(params, cfg, tokenizer, tmp_path / "hf", with_transformers=True)
    assert done.logits_difference == 0
    assert done.transformers_difference is not None and done.transformers_difference <= 1e-4
    words = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in PROBES:
        ids = tokenizer.encode(text)
        assert words(text).input_ids == ids and words.decode(ids) == text
    assert words.eos_token_id == tokenizer.eot_id and len(words) == tokenizer.vocab_size
    assert words.model_max_length == cfg.context
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eot_id
    assert model.get_input_embeddings().weight.shape == (cfg.vocab_size, cfg.embed)  # padding is gone
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "GPT2Model"])
def test_we_load_what_transformers_saves(tmp_path, kind):
    """The head model's keys begin with `transformer.`, the bare model's do not."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
    )
    model = getattr(transformers, kind)(config)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert Path(tmp_path / "hf" / "model.safetensors.index.json").exists()
    found = import_hf(tmp_path / "hf")
    assert found.config == ModelConfig(layers=2, heads=4, embed=16, mlp=64, context=12, vocab_size=50, preset="gpt2")
    assert found.tokenizer is None and any("dropout (0.1" in note for note in found.notes)
    state = model.state_dict()
    prefix = "transformer." if kind == "GPT2LMHeadModel" else ""
    np.testing.assert_array_equal(found.params.token_embed[:50], state[f"{prefix}wte.weight"].numpy())
    np.testing.assert_array_equal(found.params.blocks.down_bias[1], state[f"{prefix}h.1.mlp.c_proj.bias"].numpy())
    query = state[f"{prefix}h.0.attn.c_attn.weight"].numpy()[:, :16]
    np.testing.assert_array_equal(found.params.blocks.qkv_kernel[0, 0], query)
