"""Which meshes a model and its batch fit, and what is said when they do not."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace

import jax
import pytest

from podling.config import Config, DataConfig, ModelConfig, TrainConfig
from podling.model.fit import batch_problems, divided, fits, mesh_problems
from podling.model.spec import param_specs
from podling.parallel.axes import factorisations, read_mesh
from podling.parallel.rules import COMPUTE, STORAGE
from podling.presets import PRESETS


def preset(name: str, **model) -> Config:
    config = PRESETS[name].config
    return replace(config, model=replace(config.model, **{"vocab_size": 50257, **model}))


def problems(config: Config, mesh: str, devices: int) -> dict[str, str]:
    """What is wrong, by flag; each flag once."""
    found = mesh_problems(config, read_mesh(mesh)[0], devices)
    assert len({problem.where for problem in found}) == len(found)
    return {problem.where: f"{problem.what}\n{problem.fix}" for problem in found}


SMALL = Config(
    model=ModelConfig(layers=1, heads=2, embed=16, mlp=32, context=16, vocab_size=257),
    train=TrainConfig(batch_tokens=256),
)


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "data=4,tensor=2"])
def test_what_fits_has_no_problems(mesh):
    assert problems(SMALL, mesh, 8) == {} and fits(SMALL, read_mesh(mesh)[0])


def test_a_mesh_of_another_number_of_devices_lists_those_that_fit_nearest_first():
    found = problems(SMALL, "data=2,fsdp=2", 8)
    assert list(found) == ["--mesh"]
    assert "data 2 x fsdp 2 x tensor 1 is 4 devices, and there are 8" in found["--mesh"]
    # Two heads: no mesh with tensor=4 is among them.
    assert (
        "nearest --mesh that fits: data=4,fsdp=2; data=2,fsdp=4; data=2,fsdp=2,tensor=2; data=4,tensor=2 (and"
        in found["--mesh"]
    )
    found = problems(replace(SMALL, model=replace(SMALL.model, heads=1)), "data=2,fsdp=2", 8)
    assert "tensor=" not in found["--mesh"].partition("\n")[2]


def test_the_25_heads_of_gpt2_xl_on_8():
    found = problems(preset("gpt2-xl"), "tensor=8", 8)
    assert list(found) == ["--model.heads"]
    assert "25 heads do not divide over tensor=8" in found["--model.heads"]
    assert "nearest --mesh that fits: fsdp=8; data=2,fsdp=4; data=4,fsdp=2; data=8" in found["--model.heads"]
    assert "or --model.heads 16 or 32" in found["--model.heads"]


def test_the_embed_of_gpt2_xl_on_256():
    found = problems(preset("gpt2-xl"), "fsdp=256", 256)
    assert list(found) == ["--model.embed"]
    assert "an embed of 1600 does not divide over fsdp=256" in found["--model.embed"]
    assert "nearest --mesh that fits: data=4,fsdp=64;" in found["--model.embed"]
    assert "--model.embed 1536 --model.heads 24 or --model.embed 1792 --model.heads 28" in found["--model.embed"]


def test_everything_at_once():
    config = replace(
        preset("gpt2", heads=9, embed=900, mlp=1001, context=1023), train=TrainConfig(batch_tokens=1023 * 9)
    )
    found = problems(config, "fsdp=8,tensor=4", 16)
    assert list(found) == ["--mesh", "--model.heads", "--model.mlp", "--model.embed", "--context", "--batch-tokens"]
    assert "no mesh of 16 devices fits this model and batch" in found["--mesh"]
    assert "--model.mlp 1000 or 1004" in found["--model.mlp"]
    assert "--context 1020 or 1024" in found["--context"]
    assert "9207 tokens are not whole rows of 1023 over data x fsdp = 8" in found["--batch-tokens"]
    assert "--batch-tokens 8184 or 16368" in found["--batch-tokens"]


def test_a_vocabulary_that_does_not_divide_over_three_devices():
    config = replace(
        SMALL, model=replace(SMALL.model, heads=3, embed=48, mlp=96, context=48), train=TrainConfig(batch_tokens=48)
    )
    assert problems(config, "tensor=3", 3) == {}  # 384 = 3 x 128
    config = replace(config, model=replace(config.model, vocab_size=256))
    bpe = problems(config, "tensor=3", 3)
    assert "the vocabulary of 256, padded to 256 does not divide over tensor=3" in bpe["--tokenizer"]
    assert "--vocab-size 384" in bpe["--tokenizer"]
    found = problems(replace(config, data=DataConfig(tokenizer="bytes")), "tensor=3", 3)
    assert "a tokenizer of 384 tokens" in found["--tokenizer"] and "--vocab-size" not in found["--tokenizer"]
    assert problems(replace(config, model=replace(config.model, vocab_size=0)), "tensor=3", 3) == {}  # not known yet


@pytest.mark.parametrize(
    ("heads", "mesh"), [(7, "tensor=4"), (6, "fsdp=5,tensor=4"), (25, "fsdp=32,tensor=8"), (5, "fsdp=7")]
)
def test_the_sizes_that_are_offered_do_work(heads, mesh):
    """Typing any one of the remedies leaves no problem with that size."""
    sizes = read_mesh(mesh)[0]
    config = preset("gpt2", heads=heads, embed=64 * heads, mlp=64 * heads * 4, context=24)
    config = replace(config, train=TrainConfig(batch_tokens=24 * math.prod(sizes.values()) * 5))
    fields = {"--model.heads": "heads", "--model.embed": "embed", "--model.mlp": "mlp", "--context": "context"}
    found = mesh_problems(config, sizes, math.prod(sizes.values()))
    assert found
    for problem in found:
        remedy = problem.fix.partition("\n    or ")[2].partition(",")[0].replace("or --", "| --")
        for choice in remedy.split(" | "):
            words = choice.split()
            values = {0: [(words[0], value) for value in words[1:] if value != "or"]}
            pairs = (
                [[pair] for pair in values[0]]
                if words.count("--model.heads") + words.count("--model.embed") < 2
                else [list(zip(words[::2], words[1::2], strict=True))]
            )
            for pair in pairs:
                model = replace(config.model, **{fields[flag]: int(value) for flag, value in pair if flag in fields})
                left = [part.flag for part in divided(model) if part.size % sizes[part.axis]]
                assert problem.where not in left and model.embed % model.heads == 0, choice


def test_micro_batches_divide_too():
    config = replace(SMALL, train=TrainConfig(batch_tokens=16 * 48, micro_batch=6))
    assert "6 rows at a time do not divide 48 rows" in problems(config, "data=4,tensor=2", 8)["--train.micro-batch"]
    assert batch_problems(config, read_mesh("data=2")[0]) == []


@pytest.mark.parametrize(
    "model",
    [
        PRESETS["gpt2"].config.model,
        PRESETS["gpt2-xl"].config.model,
        ModelConfig(heads=6, embed=36, mlp=20, context=30, vocab_size=300),
    ],
)
def test_what_must_divide_is_what_the_table_splits(model):
    """Independent of the list in `fit`: every parameter's and activation's axes, by the table, over many sizes."""
    model = replace(model, vocab_size=model.vocab_size or 50257)
    shapes = [(leaf.shape, leaf.axes) for leaf in jax.tree.leaves(param_specs(model))]
    activations = [((model.context,), (axis,)) for axis in ("sequence", "residual", "position") if axis in COMPUTE]
    # Splitting by heads means whole heads: [embed] -> [heads, head_dim].
    activations.append(((model.heads,), ("heads",)))
    for fsdp, tensor in itertools.product(range(1, 13), range(1, 13)):
        sizes = {"data": 1, "fsdp": fsdp, "tensor": tensor}
        split = [(n, STORAGE[axis]) for shape, axes in shapes for n, axis in zip(shape, axes, strict=True)]
        split += [(n, COMPUTE[axis]) for shape, axes in activations for n, axis in zip(shape, axes, strict=True)]
        whole = all(n % sizes[mesh_axis] == 0 for n, mesh_axis in split if isinstance(mesh_axis, str))
        assert whole == all(part.size % sizes[part.axis] == 0 for part in divided(model)), sizes


def test_factorisations_are_all_of_them_once():
    assert len(factorisations(8)) == 10 and len(factorisations(256)) == 45
    assert all(math.prod(sizes.values()) == 12 for sizes in factorisations(12))
    assert len({tuple(sizes.items()) for sizes in factorisations(12)}) == len(factorisations(12)) == 18


def test_no_jax_is_needed():
    code = "import sys, podling.model.fit; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
