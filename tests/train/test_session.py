"""The data gate and the device gate."""

import dataclasses
import random
import shutil

import jax
import numpy as np
import pytest
from collector import Collector

from podling.config import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from podling.data.ngram import NgramBaseline
from podling.errors import InputError
from podling.model.spec import Params
from podling.parallel import device
from podling.parallel.mesh import make_mesh
from podling.run.checkpoint import Checkpoints, hash_state
from podling.run.folder import RunFolder
from podling.train.baselines import baselines
from podling.train.initial import initial_params
from podling.train.session import Session
from podling.train.start import init_problems, prepare_data
from podling.train.step import init_state

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Config:
    draw = random.Random(1)
    folder = tmp_path_factory.mktemp("session")
    text = folder / "code"
    text.mkdir()
    for index in range(40):
        names = [draw.choice(["left", "right", "total", "count"]) for _ in range(29)]
        lines = [f"{name} = {draw.randint(0, 9)}" for name in names]
        (text / f"part{index}.py").write_text("\n".join(lines) + "\n")
    return Config(
        model=ModelConfig(preset="gpt2-nano", layers=1, heads=2, embed=16, mlp=32, context=16),
        data=DataConfig(paths=(str(text),), tokenizer="bytes", cache=str(folder / "cache"), holdout=0.2),
        optimizer=OptimizerConfig(warmup_steps=1),
        train=TrainConfig(steps=5, batch_tokens=256, eval_tokens=512, samples=3),
        run=RunConfig(mesh="data=2,fsdp=2,tensor=2"),
    )


@pytest.fixture(scope="module")
def session(base) -> Session:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_measure_gemm", lambda chip: 1e11)
        return Session.open(*prepare_data(base, Collector()), Collector())


def test_the_data_settle_vocabulary_and_steps(base):
    train = dataclasses.replace(base.train, tokens=1000)
    reporter = Collector()
    config, prepared = prepare_data(dataclasses.replace(base, train=train), reporter)
    assert config.model.vocab_size == prepared.tokenizer.vocab_size == 257
    assert (config.train.steps, config.train.tokens) == (4, 0)
    assert reporter.said[0].startswith("data: ") and "1,000 tokens are 4 steps of 256" in reporter.text


def test_a_vocabulary_size_that_is_not_the_tokenizers_is_refused(base):
    config = dataclasses.replace(base, model=dataclasses.replace(base.model, vocab_size=300))
    with pytest.raises(InputError, match=r"--model.vocab-size: is 300, and the tokenizer has 257 tokens"):
        prepare_data(config, Collector())
    right = dataclasses.replace(base, model=dataclasses.replace(base.model, vocab_size=257))
    assert prepare_data(right, Collector())[0].model.vocab_size == 257


@pytest.mark.parametrize(
    ("mesh", "words"), [("tensor=8", "--model.heads: 2 heads"), ("data=3", "3 devices, and there are 8")]
)
def test_a_mesh_that_does_not_fit_is_refused_by_the_device_gate(session, mesh, words):
    config = dataclasses.replace(session.config, run=RunConfig(mesh=mesh))
    with pytest.raises(InputError, match=words):
        Session.open(config, session.prepared, Collector())


def test_what_auto_chose_is_said(session):
    reporter = Collector()
    config = dataclasses.replace(session.config, run=RunConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_measure_gemm", lambda chip: 1e11)
        opened = Session.open(config, session.prepared, reporter)
    assert dict(opened.mesh.shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    fit = "weights, moments, gradients and their copies (135.2 KiB) fit on every device, so only gradients travel"
    assert f"mesh: data=8; {fit}" in reporter.said


def test_the_abstract_state_is_the_state_without_its_bytes(session):
    with jax.set_mesh(session.mesh):
        state, like = session.init_state(), session.abstract_state()
    assert jax.tree.structure(state) == jax.tree.structure(like)
    for (path, leaf), struct in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(like), strict=True):
        name = jax.tree_util.keystr(path)
        assert (leaf.shape, leaf.dtype) == (struct.shape, struct.dtype), name
        assert leaf.sharding.is_equivalent_to(struct.sharding, leaf.ndim), name


def test_the_initial_state_is_compiled_in_a_hurry_and_has_the_same_values(session, monkeypatch):
    asked = []
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, **more: asked.append(more["compiler_options"]) or jit(f, **more))
    with jax.set_mesh(session.mesh):
        state = session.init_state()
        best = jit(init_state, static_argnums=0, compiler_options={"xla_backend_optimization_level": 3})(session.config)
    assert asked == [{"xla_backend_optimization_level": 1}]
    assert hash_state(state) == hash_state(best)


def test_a_batch_is_laid_out_over_data_and_fsdp(session):
    batch = session.batches.batch(0)
    placed = session.put(batch)
    for name in ("inputs", "targets", "weights"):
        array = getattr(placed, name)
        np.testing.assert_array_equal(array, getattr(batch, name))
        assert {piece.data.shape for piece in array.addressable_shards} == {(1, 4, 16)}, name


def test_steps_do_not_trace_again_and_evaluation_agrees_with_training_data(session):
    with jax.set_mesh(session.mesh):
        state = session.init_state()
        first, before = state, session.evaluate(state.params).loss
        for index in range(5):
            state, metrics = session.step(state, session.batches.batch(index))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))  # donated
        assert session.counter.retraces == 0 and int(state.step) == 5
        assert session.evaluate(state.params).loss < before - 0.02
        assert abs(before - np.log(257)) < 0.1 and float(metrics.loss) < before


def test_the_end_of_a_text_that_fills_no_window_is_said(base):
    reporter = Collector()
    config, prepared = prepare_data(dataclasses.replace(base, run=RunConfig()), reporter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_measure_gemm", lambda chip: 1e11)
        opened = Session.open(config, prepared, reporter)
    assert (len(prepared.tokens("train")) - 1) % 16 and f"data: {opened.batches.note}" in reporter.said


def test_baselines_are_counted_once_and_kept(session, tmp_path, monkeypatch):
    with RunFolder.open(tmp_path / "run", session.config, {}) as folder:
        found = baselines(session, folder, Collector())
        monkeypatch.setattr(NgramBaseline, "fit", lambda *_: pytest.fail("counted again"))
        assert baselines(session, folder, Collector()) == found
    train = np.asarray(session.prepared.tokens("train")[: len(session.prepared.tokens("train"))])
    share = np.bincount(train, minlength=257) / len(train)
    heldout = np.asarray(session.prepared.tokens("heldout")[:513])
    unigram = -np.log(np.maximum(share[heldout[1:]], 1e-9)).mean()
    assert found.unigram_loss == pytest.approx(unigram, abs=0.15)  # other windows, and smoothed
    assert found.bigram_loss < found.unigram_loss - 0.5
    assert found.bigram_parse_share is not None and 0 <= found.bigram_parse_share <= 1


@pytest.fixture(scope="module")
def source(session, tmp_path_factory):
    """A run folder with two checkpoints."""
    path = tmp_path_factory.mktemp("source") / "run"
    with RunFolder.open(path, session.config, {}) as folder, jax.set_mesh(session.mesh):
        session.prepared.tokenizer.save(folder.paths.tokenizer)
        checkpoints = Checkpoints(folder.paths.checkpoints)
        states = {3: session.init_state()}
        states[7] = dataclasses.replace(states[3], params=jax.tree.map(lambda leaf: leaf + 1, states[3].params))
        for step, metric in ((3, 1.0), (7, 2.0)):
            checkpoints.save(step, states[step], {"step": step}, metric=metric)
        checkpoints.close()
    return path, states


def like_on(mesh: str, config: Config) -> Params:
    with jax.set_mesh(make_mesh(mesh)):
        shapes = jax.eval_shape(lambda: init_state(config)).params
        target = make_mesh(mesh)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=jax.NamedSharding(target, leaf.sharding.spec)
            ),
            shapes,
        )


def test_init_takes_the_best_checkpoint_onto_this_runs_mesh(session, source):
    path, states = source
    reporter = Collector()
    like = like_on("data=4,tensor=2", session.config)
    params = initial_params(path, like, reporter)
    assert f"starting from {path}, step 3" in reporter.text
    for got, expected, struct in zip(*map(jax.tree.leaves, (params, states[3].params, like)), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.sharding.is_equivalent_to(struct.sharding, got.ndim)


def test_init_from_another_model_names_every_difference(session, source):
    path, _ = source
    model = dataclasses.replace(session.config.model, layers=2, mlp=64, dropout=0.3)
    problems = init_problems(path, dataclasses.replace(session.config, model=model), session.prepared)
    differences = [(problem.what, problem.fix) for problem in problems]
    assert differences == [  # dropout may differ
        ("layers is 1, this run's is 2", "use --model.layers 1"),
        ("mlp is 32, this run's is 64", "use --model.mlp 32"),
    ]


def test_init_from_what_is_no_run(session, tmp_path):
    with pytest.raises(InputError, match="is not a run folder"):
        init_problems(tmp_path, session.config, session.prepared)


@pytest.mark.parametrize("damage", [lambda tokens: tokens[::7].fill(5), lambda tokens: tokens[3:4].fill(60000)])
def test_tokens_that_changed_since_they_were_prepared_are_refused(session, tmp_path, damage):
    """A run went on with them, and JAX clamped the ids that no vocabulary has."""
    folder = tmp_path / "prepared"
    shutil.copytree(session.prepared.path, folder)
    shard = sorted(folder.glob("train-*.bin"))[0]
    tokens = np.fromfile(shard, session.prepared.manifest["dtype"])
    damage(tokens)
    tokens.tofile(shard)
    config = dataclasses.replace(session.config, data=DataConfig(paths=(str(folder),)))
    with pytest.raises(InputError, match=str(shard)):
        prepare_data(config, Collector())


def test_text_shorter_than_a_context_is_refused_before_jax_starts(session, tmp_path):
    model = dataclasses.replace(session.config.model, context=10**6)
    with pytest.raises(InputError, match="fewer than one context of 1,000,000"):
        prepare_data(dataclasses.replace(session.config, model=model), Collector())
