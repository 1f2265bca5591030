"""Three ways to write data parallelism, and podling's own step, train the same model."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podling.parallel.mesh import make_mesh
from podling.train import step as podling_step

pytestmark = pytest.mark.usefixtures("quick_compile")

PROGRAMS = ("pmap", "shard_map", "explicit")
STEPS = 10


@pytest.fixture(params=["sgd", "adamw"])
def optimizer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def programs(root: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of examples/spmd, with SGD in place of AdamW where that was asked for, in podling's step too."""
    monkeypatch.syspath_prepend(str(root / "examples" / "spmd"))
    names = ("shared", *PROGRAMS)
    modules = {name: importlib.import_module(name) for name in names}
    if optimizer == "sgd":
        sgd = optax.sgd(0.1)
        monkeypatch.setattr(modules["shared"], "optimizer", sgd)
        monkeypatch.setattr(podling_step, "make_optimizer", lambda *_: sgd)
    yield modules
    for name in names:
        del sys.modules[name]


def own_step(shared: Any) -> tuple[Any, list[float]]:
    """Parameters and losses of `make_train_step` on the batches that the programs see."""
    mesh, losses = make_mesh("auto"), []
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: podling_step.init_state(shared.CONFIG))()
        train_step = jax.jit(podling_step.make_train_step(shared.CONFIG, jnp.float32))
        rows = jax.NamedSharding(mesh, jax.P(None, ("data", "fsdp")))
        for number in range(STEPS):
            inputs, targets = shared.batch(number)
            arrays = (inputs[None], targets[None], np.ones_like(targets[None], np.float32))
            state, metrics = train_step(state, podling_step.DeviceBatch(*jax.device_put(arrays, rows)))
            losses.append(float(metrics.loss))
    return jax.device_get(state.params), losses


def test_all_train_the_same_parameters(programs: dict[str, ModuleType], optimizer: str) -> None:
    expected, losses = own_step(programs["shared"])
    assert losses[-1] < losses[0] - 0.5
    limit = {"sgd": 1e-5, "adamw": 2e-4}[optimizer]
    for name in PROGRAMS:
        params, found = programs[name].train(STEPS)
        np.testing.assert_allclose(found, losses, rtol=1e-5, err_msg=name)
        if name != "pmap":  # one array each, whole on every device
            assert params.token_embed.is_fully_replicated and len(params.token_embed.addressable_shards) == 8
        for (path, leaf), wanted in zip(
            jax.tree_util.tree_leaves_with_path(jax.device_get(params)), jax.tree.leaves(expected), strict=True
        ):
            difference = np.abs(leaf - wanted).max() / np.abs(wanted).max()
            assert difference <= limit, f"{name}: {jax.tree_util.keystr(path)} differs by {difference:.1e}"


@pytest.mark.parametrize("optimizer", ["sgd"], indirect=True)
def test_replicated_copies_have_a_leading_axis(programs: dict[str, ModuleType]) -> None:
    embed = programs["pmap"].replicate(programs["shared"].init()).token_embed
    assert embed.shape == (8, 256, 64)
    assert [shard.data.shape for shard in embed.addressable_shards] == [(1, 256, 64)] * 8


@pytest.mark.parametrize("optimizer", ["sgd"], indirect=True)
def test_pmap_refuses_another_mesh(programs: dict[str, ModuleType]) -> None:
    with jax.set_mesh(make_mesh("auto")), pytest.raises(ValueError, match="context mesh"):
        programs["pmap"].train(1)


@pytest.mark.slow
def test_the_programs_run(root: Path) -> None:
    """As a person starts them, on the eight devices that they make of a CPU."""
    folder = root / "examples" / "spmd"
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    running = [
        subprocess.Popen([sys.executable, folder / f"{name}.py"], stdout=subprocess.PIPE, text=True, env=env)
        for name in PROGRAMS
    ]
    for process in running:
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 0
        assert out.startswith("8 x cpu\n")
        losses = [float(loss) for loss in re.findall(r"([\d.]+) nats per byte", out)]
        assert len(losses) == 6 and losses[-1] < losses[0] - 1.5
