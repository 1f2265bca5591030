"""The compiled step holds and moves what the layout implies, and nothing more.

Sizes are chosen so that a number of elements tells what an array is: every activation's is a multiple of 13 (the rows
of a batch), no parameter's is, and no two leaves, whole or by layer, differ by a power of two only.
"""

import dataclasses
import functools
import math
import sys
from collections import Counter
from itertools import combinations, product
from typing import Any

import jax
import numpy as np
import pytest

from podling.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from podling.hlo.collectives import find_collectives
from podling.hlo.memory import held
from podling.hlo.program import Program, read_program
from podling.model.spec import Leaf, Params, compute_params, param_specs
from podling.parallel.mesh import MESH_AXES, batch_sharding, make_mesh
from podling.presets import preset_config
from podling.train import step as step_module
from podling.train.step import DeviceBatch, init_state, make_train_step

ROWS = 8 * 13
CONFIG = Config(
    model=ModelConfig(layers=5, heads=8, embed=56, mlp=88, context=16, vocab_size=2170),
    optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1),
    train=TrainConfig(steps=10, seed=1),
)
MODEL = CONFIG.model
# The layout as docs/design.md promises it, written out, so that a wrong rule cannot excuse itself.
SPLIT = {"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "mlp": "tensor", "position": "tensor"}
EVERY_MESH = [
    ",".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, split, strict=True))
    for split in product((1, 2, 4, 8), repeat=3)
    if math.prod(split) == 8
]
STEPS = [  # mesh, micro-batches
    ("fsdp=8", 1),
    ("tensor=8", 1),
    ("fsdp=2,tensor=4", 1),
    ("data=2,fsdp=2,tensor=2", 1),
    ("data=8", 3),
    ("data=2,fsdp=4", 3),
    ("data=2,fsdp=2,tensor=2", 3),
]


def sizes(text: str) -> dict[str, int]:
    return dict.fromkeys(MESH_AXES, 1) | {axis: int(size) for axis, size in (p.split("=") for p in text.split(","))}


def compiled(text: str, micro_steps: int = 1, config: Config = CONFIG) -> Program:
    mesh = make_mesh(text)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(lambda: init_state(config))
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed(x, mesh)), state)
        where = batch_sharding(mesh, "micro", "batch", "sequence")
        shape = (micro_steps, ROWS, MODEL.context)
        ids, weights = (jax.ShapeDtypeStruct(shape, dtype, sharding=where) for dtype in (np.int32, np.float32))
        step = jax.jit(make_train_step(config, np.float32), donate_argnums=0)
        return read_program(step.lower(state, DeviceBatch(ids, ids, weights)).compile().as_text())


def placed(x: Any, mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """Where a leaf of the abstract state rests; a scalar lies everywhere."""
    spec = jax.sharding.PartitionSpec() if x.sharding is None else x.sharding.spec
    return jax.sharding.NamedSharding(mesh, spec)


as_it_is = functools.cache(compiled)


def leaves(model: ModelConfig) -> dict[str, Leaf]:
    paths = jax.tree_util.tree_leaves_with_path(param_specs(model))
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in paths}


LEAVES = leaves(MODEL)


def split_over(leaf: Leaf, mesh: dict[str, int]) -> dict[str, int]:
    """The mesh axes that a leaf is split over, of more than one device, with their sizes."""
    axes = (SPLIT[axis] for axis in leaf.axes if axis in SPLIT)
    return {axis: mesh[axis] for axis in axes if mesh[axis] > 1}


# ---- state


def state_bytes(model: ModelConfig, mesh: dict[str, int]) -> int:
    """Parameters and two moments in float32, and the three counters of steps, on one device."""
    pieces = (math.prod(leaf.shape) // math.prod(split_over(leaf, mesh).values()) for leaf in leaves(model).values())
    return 3 * 4 * sum(pieces) + 3 * 4


def device_bytes(state: Any, mesh: jax.sharding.Mesh) -> int:
    return sum(math.prod(placed(x, mesh).shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))


@pytest.mark.parametrize("text", ["fsdp=8", "data=2,fsdp=2,tensor=2"])
def test_a_device_keeps_its_share_of_the_state_to_the_byte(text: str):
    with jax.set_mesh(make_mesh(text)):
        state = jax.jit(lambda: init_state(CONFIG))()
    for device in jax.devices():
        on_it = [s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards if s.device == device]
        assert sum(on_it) == state_bytes(MODEL, sizes(text))


@pytest.mark.parametrize(
    ("preset", "text"),
    [("gpt2", mesh) for mesh in EVERY_MESH if "tensor=8" not in mesh]  # its 12 heads do not divide
    + [("gpt2-medium", mesh) for mesh in EVERY_MESH],
)
def test_the_share_of_a_published_size_is_an_even_one(preset: str, text: str):
    config = preset_config(preset)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=50257))
    mesh = make_mesh(text)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(lambda: init_state(config))
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    share = device_bytes(state, mesh)
    assert share == state_bytes(config.model, sizes(text))
    assert share == pytest.approx(total / (sizes(text)["fsdp"] * sizes(text)["tensor"]), rel=0.02)


# ---- what the program holds


def whole_leaves(program: Program, text: str) -> list[str]:
    """Arrays of the program as large as a leaf would be with one of its splits undone, all layers at once.

    A leaf without layers (an embedding) is a layer of its own: gathered over fsdp it is what the layer in hand is.
    """
    forbidden: dict[int, list[str]] = {}
    for name, leaf in LEAVES.items():
        split = split_over(leaf, sizes(text))
        here = math.prod(leaf.shape) // math.prod(split.values())
        undone = {here * math.prod(part) for n in range(len(split)) for part in combinations(split.values(), n + 1)}
        allowed = {here} if leaf.axes[0] == "layers" else {here, here * split.get("fsdp", 1)}
        for size in undone - allowed:
            forbidden.setdefault(size, []).append(name)
    return [
        f"{name}: {array.shape} made by {array.instruction.opcode} {array.instruction.op_name}"
        for array in held(program)
        for name in forbidden.get(array.shape.size, [])
    ]


@pytest.mark.parametrize(("text", "micro_steps"), STEPS)
def test_no_device_holds_a_whole_leaf(text: str, micro_steps: int):
    program = as_it_is(text, micro_steps)
    assert whole_leaves(program, text) == []
    if text != "data=8":  # the search finds what is there: the layer in hand, and what rests
        found = {array.shape.size for array in held(program)}
        split = split_over(LEAVES["blocks.up_kernel"], sizes(text))
        piece = math.prod(LEAVES["blocks.up_kernel"].shape) // math.prod(split.values())
        assert {piece, piece * split.get("fsdp", 1) // MODEL.layers} <= found


def test_the_search_sees_a_leaf_that_rests_whole(monkeypatch: pytest.MonkeyPatch):
    right = param_specs

    def misnamed(cfg: ModelConfig) -> Params:
        specs = right(cfg)
        up_kernel = dataclasses.replace(specs.blocks.up_kernel, axes=("layers", "norm", "mlp"))
        return dataclasses.replace(specs, blocks=dataclasses.replace(specs.blocks, up_kernel=up_kernel))

    for module in [m for name, m in sys.modules.items() if name.startswith("podling.")]:
        if getattr(module, "param_specs", None) is right:
            monkeypatch.setattr(module, "param_specs", misnamed)
    found = whole_leaves(compiled("fsdp=8"), "fsdp=8")
    assert any(line.startswith("blocks.up_kernel") and "parameter" in line for line in found)
    assert not any(line.startswith("blocks.qkv_kernel") for line in found)


def test_the_search_sees_a_gather_before_the_layers(monkeypatch: pytest.MonkeyPatch):
    forward = step_module.forward

    def gathered_first(params: Any, tokens: Any, cfg: ModelConfig, **how: Any) -> Any:
        blocks = compute_params(params.blocks, param_specs(cfg).blocks, how["dtype"])
        return forward(dataclasses.replace(params, blocks=blocks), tokens, cfg, **how)

    monkeypatch.setattr(step_module, "forward", gathered_first)
    found = whole_leaves(compiled("data=2,fsdp=2,tensor=2"), "data=2,fsdp=2,tensor=2")
    kernels = {name for name in LEAVES if name.endswith("_kernel")}
    assert {line.partition(":")[0] for line in found} == kernels


def test_the_search_sees_gathered_weights_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("podling.model.gpt.rematerialised", lambda layer, remat, in_loop: layer)
    assert any("dynamic_update_slice" in line for line in whole_leaves(compiled("fsdp=8"), "fsdp=8"))


# ---- what the program moves


def expected_collectives(mesh: dict[str, int], micro_steps: int) -> Counter:
    """(kind, axes, elements) of every array that travels in a step and is no scalar, counted.

    Elements are those of the whole on one device: what an all-gather gives and what a reduction takes.
    """
    rows, layers = ROWS // (mesh["data"] * mesh["fsdp"]), MODEL.layers
    stream, each = rows * MODEL.context * MODEL.embed, Counter()  # each: in every micro-batch
    once: Counter = Counter()
    for leaf in LEAVES.values():
        split = split_over(leaf, mesh)
        here = math.prod(leaf.shape) // math.prod(split.values())
        copied = tuple(axis for axis in MESH_AXES if mesh[axis] > 1 and axis not in split)
        if copied:  # one sum over all devices that hold a copy
            once["all-reduce", copied, here] += 1
        if "fsdp" in split:
            stacked = leaf.axes[0] == "layers"
            one_layer = here * split["fsdp"] // (layers if stacked else 1)
            each["reduce-scatter", ("fsdp",), one_layer] += layers if stacked else 1
            if stacked:  # forward, and again in the backward pass
                each["all-gather", ("fsdp",), one_layer] += 2 * layers
            else:  # the same for all micro-batches
                once["all-gather", ("fsdp",), one_layer] += 1
    if mesh["tensor"] > 1:
        # Into attention and MLP in both passes and once more to recompute; their transposes; the loss; the embedding.
        each["all-gather", ("tensor",), stream] += 6 * layers + 2
        each["reduce-scatter", ("tensor",), stream] += 4 * layers + 2
        # Of the loss: the maximum, the sum of exponentials and the target's score of every token.
        each["all-reduce", ("tensor",), rows * MODEL.context] += 3
    if mesh["fsdp"] > 1:
        each["all-to-all", ("fsdp",), stream // mesh["tensor"]] += 2  # embedding rows, and their gradient
        each["all-gather", ("fsdp",), rows * mesh["fsdp"] * MODEL.context] += 1  # token ids
    return once + Counter({key: count * micro_steps for key, count in each.items()})


def found_collectives(program: Program, mesh: dict[str, int]) -> tuple[Counter, Counter]:
    """The same of a compiled program, and its scalars by (kind, axes)."""
    arrays: Counter = Counter()
    scalars: Counter = Counter()
    for one in find_collectives(program, mesh):
        assert not any(one.cut), f"{one.name} reduces what it then drops: {one.op_name}"
        wholes = [shape.size for shape in (one.results if one.kind == "all-gather" else one.operands)]
        if one.kind == "all-to-all":  # the CPU compiler writes one operand for each device
            wholes = [sum(wholes)]
        for size in wholes:
            if size > 1:
                arrays[one.kind, one.axes, size] += one.times
            else:
                scalars[one.kind, one.axes] += one.times
    return arrays, scalars


@pytest.mark.parametrize(("text", "micro_steps"), STEPS)
def test_a_step_moves_what_the_layout_implies(text: str, micro_steps: int):
    program = as_it_is(text, micro_steps)
    arrays, scalars = found_collectives(program, sizes(text))
    assert arrays == expected_collectives(sizes(text), micro_steps)
    # Loss, weights, and a norm of each leaf (the compiler may take one twice): once a step, whatever is accumulated.
    assert {kind for kind, _ in scalars} <= {"all-reduce"}
    assert scalars.total() <= 2 + 4 * len(LEAVES)
    assert program.unknown_loops == []


@pytest.mark.parametrize("text", ["tensor=8", "fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2"])
def test_logits_stay_split(text: str):
    mesh = sizes(text)
    whole = ROWS // (mesh["data"] * mesh["fsdp"]) * MODEL.context * 2176
    made = {array.shape.size for array in held(as_it_is(text, 1))}
    assert whole // mesh["tensor"] in made
    assert not {whole // size for size in (1, 2, 4) if size < mesh["tensor"]} & made
