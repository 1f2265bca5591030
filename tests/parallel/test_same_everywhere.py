"""Training on any mesh of eight devices is training on one: same losses, same parameters, leaves where they belong."""

import functools
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from podling.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from podling.model.spec import Params
from podling.parallel.mesh import MESH_AXES, batch_sharding, make_mesh
from podling.train.step import DeviceBatch, TrainState, init_state, make_train_step, sum_gradients

pytestmark = pytest.mark.usefixtures("quick_compile")

STEPS, ROWS = 20, 16
CONFIG = Config(
    model=ModelConfig(layers=2, heads=8, embed=16, mlp=24, context=8, vocab_size=100),
    optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1),
    train=TrainConfig(steps=STEPS, seed=1),
)
CHUNKED = replace(CONFIG, train=replace(CONFIG.train, remat="dots", loss_chunk=4))
SGD_LR = 0.3
MESHES = [
    ",".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, sizes, strict=True))
    for sizes in itertools.product((1, 2, 4, 8), repeat=3)
    if math.prod(sizes) == 8
]
ONE = "data=1,fsdp=1,tensor=1"

WHERE = {  # the layout as docs/design.md promises it, written out
    "token_embed": ("tensor", "fsdp"),
    "pos_embed": ("tensor", "fsdp"),
    "blocks.ln1_scale": (None, None),
    "blocks.ln1_bias": (None, None),
    "blocks.qkv_kernel": (None, None, "fsdp", "tensor"),
    "blocks.qkv_bias": (None, None, "tensor"),
    "blocks.out_kernel": (None, "tensor", "fsdp"),
    "blocks.out_bias": (None, None),
    "blocks.ln2_scale": (None, None),
    "blocks.ln2_bias": (None, None),
    "blocks.up_kernel": (None, "fsdp", "tensor"),
    "blocks.up_bias": (None, "tensor"),
    "blocks.down_kernel": (None, "tensor", "fsdp"),
    "blocks.down_bias": (None, None),
    "final_scale": (None,),
    "final_bias": (None,),
}


class Run(NamedTuple):
    """Twenty steps on one mesh."""

    losses: list[float]
    before: dict[str, str]  # types of the state's leaves
    after: dict[str, str]
    specs: dict[str, dict[str, PartitionSpec]]  # of parameters and both moments, at birth
    born: dict[str, tuple[tuple[int, ...], set[tuple[int, ...]]]]  # shape of each parameter, and shapes of its pieces
    params: dict[str, np.ndarray]
    mu: dict[str, np.ndarray]


def by_name(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def types(state: TrainState) -> dict[str, str]:
    return {name: str(jax.typeof(leaf)) for name, leaf in by_name(state).items()}


def trees(state: TrainState) -> dict[str, Params]:
    mu, nu = (optax.tree_utils.tree_get(state.opt_state, name) for name in ("mu", "nu"))
    return {"params": state.params, "mu": mu, "nu": nu}


def batch(step: int, micro_steps: int) -> DeviceBatch:
    """Sixteen rows, a fifth of the targets not scored, cut into micro-batches."""
    rng = np.random.default_rng(step)
    # Low ids are frequent, so that there is something to learn.
    tokens = (rng.random((ROWS, CONFIG.model.context + 1)) ** 3 * CONFIG.model.vocab_size).astype(np.int32)
    weights = (rng.random((ROWS, CONFIG.model.context)) < 0.8).astype(np.float32)
    shape = (micro_steps, ROWS // micro_steps, CONFIG.model.context)
    return DeviceBatch(tokens[:, :-1].reshape(shape), tokens[:, 1:].reshape(shape), weights.reshape(shape))


def batches(mesh: Mesh, micro_steps: int) -> Iterator[DeviceBatch]:
    sharding = batch_sharding(mesh, "micro", "batch", "sequence")
    return (jax.device_put(batch(index, micro_steps), sharding) for index in range(STEPS))


def mesh_of(text: str) -> Mesh:
    return make_mesh(text, jax.devices()[:1] if text == ONE else jax.devices())


@functools.cache
def run(text: str) -> Run:
    """AdamW, in one piece."""
    mesh = mesh_of(text)
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: init_state(CONFIG))()
        before = types(state)
        specs = {kind: {n: leaf.sharding.spec for n, leaf in by_name(t).items()} for kind, t in trees(state).items()}
        born = {
            name: (leaf.shape, {piece.data.shape for piece in leaf.addressable_shards})
            for name, leaf in by_name(state.params).items()
        }
        step = jax.jit(make_train_step(CONFIG, np.float32), donate_argnums=0)
        losses = []
        for piece in batches(mesh, 1):
            state, metrics = step(state, piece)
            assert bool(metrics.finite)
            losses.append(float(metrics.loss))
        host = {kind: {n: np.asarray(leaf) for n, leaf in by_name(t).items()} for kind, t in trees(state).items()}
        return Run(losses, before, types(state), specs, born, host["params"], host["mu"])


@functools.cache
def run_sgd(text: str, micro_steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Plain gradient descent, accumulating, with remat and a chunked loss: losses and parameters."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params: Params, piece: DeviceBatch) -> tuple[Params, jax.Array]:
        nll, count, grads = sum_gradients(params, piece, CHUNKED, np.float32, None)
        return jax.tree.map(lambda p, g: p - SGD_LR * g / count, params, grads), nll / count

    mesh, losses = mesh_of(text), []
    with jax.set_mesh(mesh):
        params = jax.jit(lambda: init_state(CHUNKED).params)()
        for piece in batches(mesh, micro_steps):
            params, loss = step(params, piece)
            losses.append(float(loss))
        return losses, {name: np.asarray(leaf) for name, leaf in by_name(params).items()}


def test_there_are_ten_meshes():
    assert len(MESHES) == 10


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_trains_as_one_device_does(mesh):
    got, expected = run(mesh), run(ONE)
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-5)
    assert expected.losses[0] - expected.losses[-1] > 0.1  # something was learned, so something was compared
    for name, value in expected.params.items():
        other, largest = got.params[name], np.abs(value).max()
        if name == "blocks.qkv_bias":
            # The key bias shifts all scores of a query alike: its gradient is zero but for rounding, which Adam
            # turns into steps of full size. Judged by the gradient, of which the first moment is a mean.
            value, other = value[:, [0, 2]], other[:, [0, 2]]
            assert np.abs(got.mu[name][:, 1]).max() < 1e-5 * np.abs(got.mu[name]).max()
        np.testing.assert_allclose(other, value, atol=2e-4 * largest, rtol=0, err_msg=name)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_accumulates_as_one_device_descends_in_one_piece(mesh):
    """Gradient descent magnifies nothing, so that a gradient of the wrong size or place is seen."""
    (losses, params), (expected_losses, expected) = run_sgd(mesh, 2), run_sgd(ONE, 1)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert expected_losses[0] - expected_losses[-1] > 0.1
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, atol=1e-5 * np.abs(value).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_leaves_every_type_and_sharding_as_it_was(mesh):
    result = run(mesh)
    assert result.before == result.after


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_and_moments_rest_where_the_rules_say(mesh):
    sizes = {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d)", mesh)}
    for kind, specs in run(mesh).specs.items():
        for name, spec in specs.items():
            parts = tuple(spec) + (None,) * (len(WHERE[name]) - len(spec))
            # An axis of one device says nothing.
            got = tuple(axis if sizes.get(axis, 1) > 1 else None for axis in parts)
            assert got == tuple(axis if sizes.get(axis, 1) > 1 else None for axis in WHERE[name]), (kind, name)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_leaf_is_born_in_pieces(mesh):
    sizes = {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d)", mesh)}
    for name, (shape, pieces) in run(mesh).born.items():
        expected = tuple(size // sizes.get(axis, 1) for size, axis in zip(shape, WHERE[name], strict=True))
        assert pieces == {expected}, name


def test_no_device_makes_more_than_its_piece():
    """In the program that initialises, the shapes of whole sharded leaves do not occur."""
    with jax.set_mesh(make_mesh("data=2,fsdp=2,tensor=2")):
        text = jax.jit(lambda: init_state(CONFIG)).lower().compile().as_text()
    made = set(re.findall(r"\b[fsu]32\[([\d,]+)\]", text))
    whole = {name: ",".join(map(str, shape)) for name, (shape, _) in run("data=2,fsdp=2,tensor=2").born.items()}
    sharded = {name for name, axes in WHERE.items() if any(axes)}
    assert len(sharded) == 8
    assert not {name for name in sharded if whole[name] in made}
    assert whole["final_scale"] in made  # the search finds what is there
