"""What is said of the links is what the compiled step does."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from podling.config import Config, ModelConfig, TrainConfig
from podling.files import show_binary
from podling.hlo.collectives import KINDS, Collective, find_collectives
from podling.hlo.program import read_program
from podling.layout.describe import Layout, describe
from podling.layout.grid import grid_of_count
from podling.layout.table import ACTIVATIONS, GRADIENTS
from podling.parallel.axes import read_mesh
from podling.parallel.mesh import batch_sharding, make_mesh
from podling.train.step import DeviceBatch, init_state, make_train_step

pytestmark = pytest.mark.usefixtures("quick_compile")
LAYERS, MICRO_STEPS = 3, 2
CONFIG = Config(
    model=ModelConfig(layers=LAYERS, heads=8, embed=40, mlp=88, context=16, vocab_size=890),
    train=TrainConfig(batch_tokens=16 * 8 * 26, micro_batch=104),
)


def described(mesh: str, config: Config = CONFIG) -> Layout:
    return describe(config, grid_of_count(8, read_mesh(mesh)[0]), "8 devices", "", 1 << 34, jnp.dtype("float32"))


def compiled(mesh_text: str, config: Config = CONFIG) -> list[Collective]:
    mesh = make_mesh(mesh_text)
    where = batch_sharding(mesh, "micro", "batch", "sequence")

    def array(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((MICRO_STEPS, 104, 16), dtype, sharding=where)

    with jax.set_mesh(mesh):
        state = jax.jit(init_state, static_argnums=0)(config)
        step = jax.jit(make_train_step(config, jnp.float32))
        batch = DeviceBatch(array(jnp.int32), array(jnp.int32), array(jnp.float32))
        return find_collectives(read_program(step.lower(state, batch).compile().as_text()), mesh.shape)


@pytest.mark.parametrize(
    ("axis", "remat"), [("data", "none"), ("fsdp", "dots"), ("tensor", "none"), ("tensor", "full")]
)
def test_the_sentence_of_an_axis_names_the_kinds_that_the_program_has(axis, remat):
    config = replace(CONFIG, train=replace(CONFIG.train, remat=remat))
    layout = described(f"{axis}=8", config)
    (sentence,) = layout.traffic.values()
    found = compiled(f"{axis}=8", config)
    assert {kind for kind in KINDS if kind in sentence} == {one.kind for one in found}
    gradients = [one for one in found if one.kind == "all-reduce" and one.times == 1]
    told = re.findall(r"[\d.]+ (?:KiB|MiB|GiB|bytes)", sentence)[-1]
    # Once a step, whatever the micro-batches: the gradients of what is copied, and a few sums of the loss.
    copied = sum(row.device_bytes for row in layout.rows if row.kind == GRADIENTS and not any(
        axis in over for over in row.mesh_axes
    ))  # fmt: skip
    assert told == show_binary(copied)
    assert 0 <= sum(one.operand_bytes for one in gradients) - copied < 5000
    if axis == "tensor":
        stream = next(row for row in layout.rows if row.kind == ACTIVATIONS and "gathered" in row.name).device_bytes
        moves = [
            one for one in found if one.kind in ("all-gather", "reduce-scatter") and one.times == LAYERS * MICRO_STEPS
        ]
        words = {6: "six", 7: "seven"}
        assert f"four a layer forward and {words[len(moves) - 4]} backward" in sentence
        for one in moves:
            whole = one.result_bytes if one.kind == "all-gather" else one.operand_bytes
            assert whole == stream
