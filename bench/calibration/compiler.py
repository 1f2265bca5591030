"""One case through the TPU compiler, without a TPU. As a program: writes the optimised program to a file."""

import os
import sys
from typing import Any

from podling.topology import compiler_environment, devices, parse_topology

os.environ.update(compiler_environment())
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax  # noqa: E402
from cases import CASES, Case  # noqa: E402
from jax.experimental import mesh_utils  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402


def lower_case(case: Case) -> Any:
    """The program, ready to be compiled. Where the case says nothing: rows over `data`, all else on every device."""
    found = devices(parse_topology(case.topology))
    mesh = Mesh(mesh_utils.create_device_mesh(tuple(case.mesh.values()), found), tuple(case.mesh))
    copied = NamedSharding(mesh, PartitionSpec())
    step, *arguments = case.build(mesh)

    def placed(tree: Any, rows: bool = False) -> Any:
        def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            tokens = rows and leaf.dtype == "int32"
            spec = PartitionSpec(*[None] * case.rows_axis, "data") if tokens else PartitionSpec()
            sharding = leaf.sharding or NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(place, tree)

    params, moments, batch = placed(arguments[0]), placed(arguments[1]), placed(arguments[2], rows=True)
    shardings = (*jax.tree.map(lambda leaf: leaf.sharding, (params, moments)), copied)
    with mesh:
        return jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings).lower(params, moments, batch)


if __name__ == "__main__":
    name, path = sys.argv[1:]
    text = lower_case(next(case for case in CASES if case.name == name)).compile().as_text()
    with open(path + ".part", "w") as file:
        file.write(text)
    os.replace(path + ".part", path)
