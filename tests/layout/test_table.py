"""The table says what the arrays are: against real sharded arrays, and against the traced training step."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from podling.config import Config, ModelConfig, TrainConfig
from podling.cost.shares import held_params
from podling.layout.describe import describe
from podling.layout.grid import grid_of_count
from podling.layout.table import ACTIVATIONS, COUNTERS, LAYER, PARAMETERS, state_rows, step_rows, totals
from podling.model.spec import param_specs
from podling.parallel.axes import read_mesh
from podling.parallel.mesh import abstract_mesh, batch_sharding, make_mesh
from podling.train.batch_plan import plan_batch
from podling.train.step import DeviceBatch, init_state, make_train_step

pytestmark = pytest.mark.usefixtures("quick_compile")
MESHES = ["data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "fsdp=2,tensor=4"]
CONFIG = Config(
    # Sizes all different, so that no shape is mistaken for another.
    model=ModelConfig(layers=3, heads=4, embed=16, mlp=40, context=24, vocab_size=700),
    train=TrainConfig(batch_tokens=24 * 32, micro_batch=16, remat="dots", loss_chunk=8),
)


@pytest.mark.parametrize("mesh", MESHES)
def test_state_bytes_are_what_the_arrays_take(mesh):
    with jax.set_mesh(make_mesh(mesh)):
        state = jax.jit(init_state, static_argnums=0)(CONFIG)
    rows = state_rows(CONFIG, read_mesh(mesh)[0])
    leaves = jax.tree.leaves(state)
    assert len(rows) == len(leaves)
    for row, leaf in zip(rows, leaves, strict=True):
        assert {piece.data.nbytes for piece in leaf.addressable_shards} == {row.device_bytes}, row
        assert {piece.data.shape for piece in leaf.addressable_shards} == {row.shard}, row
        assert (leaf.shape, leaf.dtype.name) == (row.shape, row.dtype)
    layout = describe(CONFIG, grid_of_count(8, read_mesh(mesh)[0]), "8", "", 1 << 34, jnp.dtype("float32"))
    assert layout.state_bytes == sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    # What --mesh auto reckons with: this, and gradients as large as the weights.
    arrays = [*(leaf for leaf in leaves if leaf.ndim), *jax.tree.leaves(state.params)]
    held = held_params(CONFIG.model, **read_mesh(mesh)[0])
    assert 16 * held == sum(array.addressable_shards[0].data.nbytes for array in arrays)


def test_every_parameter_and_both_its_moments_are_there_by_name():
    rows = state_rows(CONFIG, read_mesh("fsdp=8")[0])
    names = {kind: [row.name for row in rows if row.kind == kind] for kind in totals(rows)}
    assert set(names) == {PARAMETERS, "first moments (mu)", "second moments (nu)", COUNTERS}
    assert len(names[PARAMETERS]) == len(jax.tree.leaves(param_specs(CONFIG.model))) == 16
    assert names[PARAMETERS] == names["first moments (mu)"] == names["second moments (nu)"]
    (kernel,) = [row for row in rows if row.name == "blocks.qkv_kernel" and row.kind == PARAMETERS]
    assert kernel.axes == ("layers", "qkv", "embed", "heads")
    assert kernel.mesh_axes == ((), (), ("fsdp",), ("tensor",))
    assert (kernel.shape, kernel.shard, kernel.device_bytes) == ((3, 3, 16, 16), (3, 3, 2, 16), 3 * 3 * 2 * 16 * 4)


def live(split: tuple[tuple[str, ...], ...], sizes: dict[str, int]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis for axis in over if sizes[axis] > 1) for over in split)


def traced_layouts(mesh: str, dtype: Any) -> dict[str, set[tuple[Any, ...]]]:
    """Shape, dtype and split of every array the training step computes, by what computes it, from its own trace."""
    sizes = read_mesh(mesh)[0]
    plan = plan_batch(CONFIG, sizes, 2, 1 << 34)
    abstract = abstract_mesh(sizes)
    sharding = batch_sharding(abstract, "micro", "batch", "sequence")

    def array(kind: Any) -> jax.ShapeDtypeStruct:
        shape = (plan.micro_steps, plan.micro_batch, plan.context)
        return jax.ShapeDtypeStruct(shape, kind, sharding=sharding)

    batch = DeviceBatch(array(jnp.int32), array(jnp.int32), array(jnp.float32))
    with jax.sharding.use_abstract_mesh(abstract):
        state = jax.eval_shape(lambda: init_state(CONFIG))
        traced = jax.make_jaxpr(make_train_step(CONFIG, dtype))(state, batch)
    found: dict[str, set[tuple[Any, ...]]] = {}

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            for out in equation.outvars:
                spec = getattr(getattr(out.aval, "sharding", None), "spec", None)
                if spec is not None:
                    split = tuple(
                        part if isinstance(part, tuple) else (part,) if part else () for part in spec.partitions
                    )
                    split += ((),) * (len(out.aval.shape) - len(split))
                    arrays = found.setdefault(equation.primitive.name, set())
                    arrays.add((out.aval.shape, out.aval.dtype.name, live(split, sizes)))
            for value in equation.params.values():
                for inner in value if isinstance(value, list | tuple) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        visit(inner)

    visit(traced.jaxpr)
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_activations_lie_as_in_the_traced_step(mesh):
    """Independent of the list: each activation is an intermediate of the real step, with that shape and split."""
    sizes = read_mesh(mesh)[0]
    found = traced_layouts(mesh, jnp.bfloat16)
    rows = step_rows(CONFIG, sizes, plan_batch(CONFIG, sizes, 2, 1 << 34), jnp.bfloat16)
    checked = [row for row in rows if row.kind in (ACTIVATIONS, LAYER)]
    assert len(checked) == 6 + 12
    for row in checked:
        by = ["add"] if row.name == "residual stream" else list(found)  # what blocks add to, and nothing gathered
        assert any((row.shape, row.dtype, live(row.mesh_axes, sizes)) in found[name] for name in by), row


def test_a_share_is_the_whole_divided_by_what_splits_it():
    sizes = read_mesh("data=2,fsdp=2,tensor=2")[0]
    rows = step_rows(CONFIG, sizes, plan_batch(CONFIG, sizes, 4, 1 << 34), jnp.float32) + state_rows(CONFIG, sizes)
    for row in rows:
        ways = [math.prod(sizes[axis] for axis in over) for over in row.mesh_axes]
        assert row.shard == tuple(size // way for size, way in zip(row.shape, ways, strict=True)), row
        assert row.device_bytes == math.prod(row.shard) * jnp.dtype(row.dtype).itemsize


def test_links_are_told_for_axes_of_more_than_one_device():
    def told(mesh: str, **train: Any) -> dict[str, str]:
        config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, **train))
        grid = grid_of_count(8, read_mesh(mesh)[0])
        return describe(config, grid, "8 devices", "", 1 << 34, jnp.dtype("float32")).traffic

    assert set(told("data=8")) == {"data"} and set(told("fsdp=2,tensor=4")) == {"fsdp", "tensor"}
    assert "one all-reduce a step" in told("data=8")["data"]
    assert "in each of the 2 micro-batches" in told("fsdp=8")["fsdp"]
    assert "micro-batches" not in told("fsdp=8", micro_batch=32)["fsdp"]
