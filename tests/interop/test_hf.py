"""Hugging Face folders: what we write we read, in every style others write, and what we cannot do we name."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from podling.config import ModelConfig
from podling.data.vocabulary import bytes_tokenizer
from podling.errors import InputError, RunError
from podling.interop import hf
from podling.interop.hf import export_hf, import_hf
from podling.model.spec import param_specs

CFG = ModelConfig(layers=2, heads=2, embed=8, mlp=32, context=16, vocab_size=257, preset="gpt2")


@pytest.fixture(scope="module")
def params():
    return draw(CFG)


def draw(cfg: ModelConfig):
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: 0.2 * rng.standard_normal(leaf.shape, np.float32), param_specs(cfg))
    params.token_embed[cfg.vocab_size :] = 0  # padding rows are zero
    return params


@pytest.fixture(scope="module")
def original(params, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "hf"
    export_hf(params, CFG, bytes_tokenizer(), folder)
    assert [path.name for path in folder.parent.iterdir()] == ["hf"]
    return folder


@pytest.fixture
def exported(original, tmp_path) -> Path:
    return shutil.copytree(original, tmp_path / "hf")


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(dict(tensors)), folder / "model.safetensors", metadata={"format": "pt"})


def test_what_is_written_is_read(params, exported):
    found = import_hf(exported)
    assert found.config == CFG and same(found.params, params) and found.notes == []
    assert found.tokenizer == str(exported / "tokenizer.json")
    assert sorted(p.name for p in exported.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert load_file(exported / "model.safetensors")["transformer.wte.weight"].shape == (257, 8)


def test_both_key_styles_mask_buffers_and_a_tied_head(params, exported):
    def old_style(tensors):
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        for layer in range(CFG.layers):
            tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 16, 16), np.uint8))
            tensors[f"h.{layer}.attn.masked_bias"] = np.full((), -1e4, np.float32)
        return tensors | {"lm_head.weight": tensors["wte.weight"]}

    rewrite(exported, old_style)
    assert same(import_hf(exported).params, params)


def test_sharded_files(params, exported):
    tensors = load_file(exported / "model.safetensors")
    (exported / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for part in range(2):
        file = f"model-{part + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[part::2]}, exported / file)
        weight_map |= dict.fromkeys(names[part::2], file)
    (exported / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert same(import_hf(exported).params, params)
    (exported / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match="missing: model-00002-of-00002.safetensors"):
        import_hf(exported)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_to_float32_and_said(params, exported, dtype):
    rewrite(exported, lambda tensors: {name: tensor.astype(dtype) for name, tensor in tensors.items()})
    found = import_hf(exported)
    assert same(found.params, jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32), params))
    assert found.notes == [f"{np.dtype(dtype).name} weights are kept as float32"]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"activation_function": "relu"}, "activation 'relu' is not implemented"),
        ({"scale_attn_by_inverse_layer_idx": True}, "attention scaled by layer"),
        ({"reorder_and_upcast_attn": True}, "reordered attention"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"scale_attn_weights": False}, "unscaled attention"),
        ({"tie_word_embeddings": False}, "untied"),
        ({"layer_norm_epsilon": 1e-6}, "1e-06 is not implemented"),
        ({"model_type": "llama"}, "'llama' is not implemented"),
        ({"n_embd": None}, "n_embd: None is not a size"),
        ({"n_head": 3}, "3 heads do not divide 8"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_a_variant_is_refused_by_name(exported, change, said):
    edit_config(exported, **change)
    with pytest.raises(InputError) as caught:
        import_hf(exported)
    assert said in str(caught.value) and "config.json" in str(caught.value)


def test_all_variants_are_named_at_once(exported):
    edit_config(exported, activation_function="silu", add_cross_attention=True, n_layer=0)
    with pytest.raises(InputError) as caught:
        import_hf(exported)
    assert len(caught.value.problems) == 3


def test_an_untied_head_in_the_weights_is_refused(exported):
    rewrite(exported, lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1})
    with pytest.raises(InputError, match="lm_head.weight differs"):
        import_hf(exported)


def test_missing_unknown_and_misshapen_tensors_are_all_listed(exported):
    def spoil(tensors):
        del tensors["transformer.h.1.ln_2.bias"], tensors["transformer.ln_f.weight"]
        tensors["transformer.wpe.weight"] = np.zeros((15, 8), np.float32)
        return tensors | {"transformer.h.2.ln_1.bias": np.zeros(8, np.float32)}

    rewrite(exported, spoil)
    with pytest.raises(InputError) as caught:
        import_hf(exported)
    text = str(caught.value)
    assert "2 tensors are missing: h.1.ln_2.bias, ln_f.weight" in text
    assert "1 tensors are none of GPT-2's: transformer.h.2.ln_1.bias" in text
    assert "wpe.weight is [15, 8], and its config.json makes it [16, 8]" in text


def test_numbers_that_are_not_finite_are_refused(exported):
    def spoil(tensors):
        tensors["transformer.h.1.mlp.c_fc.bias"][3] = np.nan
        return tensors

    rewrite(exported, spoil)
    with pytest.raises(InputError, match=r"h.1.mlp.c_fc.bias: holds numbers that are not finite"):
        import_hf(exported)


def test_a_cut_file_is_named(exported):
    file = exported / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        import_hf(exported)


def test_pickled_weights_and_missing_files_are_answered(exported):
    (exported / "model.safetensors").rename(exported / "pytorch_model.bin")
    with pytest.raises(InputError, match="save_pretrained"):
        import_hf(exported)
    (exported / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match="holds no model.safetensors"):
        import_hf(exported)
    (exported / "config.json").unlink()
    with pytest.raises(InputError, match="holds no config.json"):
        import_hf(exported)
    with pytest.raises(InputError, match="is not a folder"):
        import_hf(exported / "nowhere")


def test_an_export_replaces_an_export_and_nothing_else(params, exported, tmp_path):
    doubled = jax.tree.map(lambda x: 2 * x, params)
    export_hf(doubled, CFG, bytes_tokenizer(), exported)
    assert same(import_hf(exported).params, doubled)
    foreign = tmp_path / "notes"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not an export of podling"):
        export_hf(params, CFG, bytes_tokenizer(), foreign)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError):
        export_hf(params, CFG, bytes_tokenizer(), tmp_path / "file")
    with pytest.raises(InputError):
        export_hf(params, CFG, bytes_tokenizer(), tmp_path / "file" / "below")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "hf", "notes"]
    assert [p.name for p in foreign.iterdir()] == ["thesis.txt"]


def test_equal_models_are_equal_files(params, original, tmp_path):
    """The library orders the two entries of the metadata by chance: of eight files one would differ."""
    wanted = {path.name: path.read_bytes() for path in original.iterdir()}
    assert b'{"__metadata__":{"format":"pt","producer":"podling"},' in wanted["model.safetensors"][:100]
    for _ in range(8):
        export_hf(params, CFG, bytes_tokenizer(), tmp_path / "hf")
        assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == wanted


def test_a_failed_read_back_leaves_the_earlier_export(params, exported, monkeypatch):
    """The check is no formality: weights that change on the way to the disk are found, and nothing is replaced."""
    written = hf.to_hf

    def spoiled(params, cfg):
        tensors = written(params, cfg)
        tensors["h.0.mlp.c_fc.weight"] = tensors["h.0.mlp.c_fc.weight"][:, ::-1].copy()
        return tensors

    monkeypatch.setattr(hf, "to_hf", spoiled)
    with pytest.raises(RunError, match="reads the export back"):
        export_hf(jax.tree.map(lambda x: 2 * x, params), CFG, bytes_tokenizer(), exported)
    assert same(import_hf(exported).params, params)
    assert [p.name for p in exported.parent.iterdir()] == ["hf"]


def test_unequal_mlp_width_survives(tmp_path):
    cfg = ModelConfig(layers=1, heads=2, embed=8, mlp=20, context=4, vocab_size=257, preset="gpt2")
    params = draw(cfg)
    export_hf(params, cfg, bytes_tokenizer(), tmp_path / "hf")
    found = import_hf(tmp_path / "hf")
    assert found.config == cfg and same(found.params, params)
