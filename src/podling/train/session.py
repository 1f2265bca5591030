"""The device gate, and everything a training process holds once it has passed."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from podling.config import Config
from podling.data.batches import Batch, Batches, EvalWindows, heldout_windows
from podling.data.shards import Prepared
from podling.model.form import Form
from podling.parallel.axes import mesh_text
from podling.parallel.device import Peak, peak_flops
from podling.train.batch_plan import BatchPlan
from podling.train.evaluate import Evaluator
from podling.train.lowering import abstract_batch, abstract_state, compiled_here, initial_state
from podling.train.progress import Reporter
from podling.train.retrace import TraceCounter
from podling.train.rows import batch_layout, checksum, device_checksum, put_batch, rows_here
from podling.train.setup import Setup
from podling.train.step import DeviceBatch, StepMetrics, TrainState, make_train_step


@dataclass(frozen=True)
class Shared:
    """What the processes of a run have to know of one another before each opens its session."""

    device_bytes: int
    """Memory of one device, the smallest of all."""
    processes_here: int
    """Processes of the run on this machine."""
    cpu_flops: float | None
    """FLOP/s of this process's share of the CPU; None on an accelerator."""


@dataclass(frozen=True)
class Session:
    """The device gate passed: mesh, compiled functions and data, ready to run."""

    config: Config
    prepared: Prepared
    mesh: Mesh
    plan: BatchPlan
    dtype: Any
    peak: Peak
    batches: Batches
    windows: EvalWindows  # what is scored, by the model and by the baselines
    evaluate: Evaluator
    counter: TraceCounter
    train_step: Any
    processes_here: int = 1  # of the run, on this machine

    @classmethod
    def open(cls, config: Config, prepared: Prepared, reporter: Reporter, shared: Shared | None = None) -> "Session":
        """Choose devices, mesh and batch plan, and say what was chosen.

        Args:
            config: resolved.
            prepared: the run's data.
            reporter: told what was chosen.
            shared: what the processes of the run have agreed on, where there are several.

        Raises:
            InputError: the device asked for is not there, or mesh and batch do not fit it.
        """
        setup = Setup.of(config, shared.device_bytes if shared else None)
        config, mesh, plan, dtype = setup.config, setup.mesh, setup.plan, setup.dtype
        peak = peak_flops(setup.here, dtype, shared.cpu_flops if shared else None)
        for line in setup.said():
            reporter.say(line)
        context = config.model.context
        batches = Batches(
            prepared,
            context=context,
            rows=plan.micro_batch,
            micro_steps=plan.micro_steps,
            seed=config.train.seed,
            mine=rows_here(batch_layout(mesh), plan.micro_batch, axis=1),
        )
        if batches.note:
            reporter.say(f"data: {batches.note}")
        windows = heldout_windows(prepared, context, config.train.eval_tokens)
        scored, heldout = int(np.count_nonzero(windows.weights)), len(prepared.tokens("heldout"))
        reporter.say(f"evaluation: {scored:,} of {heldout:,} held-out tokens, the same ones every time")
        counter = TraceCounter(make_train_step(config, dtype))
        return cls(
            config=config,
            prepared=prepared,
            mesh=mesh,
            plan=plan,
            dtype=dtype,
            peak=peak,
            batches=batches,
            windows=windows,
            evaluate=Evaluator(
                config.model, windows, mesh, rows=plan.micro_batch, dtype=dtype, form=Form.of(config.train)
            ),
            counter=counter,
            train_step=jax.jit(counter, donate_argnums=0),
            processes_here=shared.processes_here if shared else 1,
        )

    @property
    def layout(self) -> dict[str, str]:
        """What rounding depends on besides the configuration, by name."""
        return {
            "mesh": mesh_text(self.mesh.shape),
            "compute dtype": self.dtype.name,
            "micro-batch": f"{self.plan.micro_batch} rows",
        }

    def init_state(self) -> TrainState:
        """The state at step 0, every leaf born where it is stored."""
        return initial_state(self.config, self.mesh)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, without any of its bytes."""
        return abstract_state(self.config, self.mesh)

    def compile_step(self) -> jax.stages.Compiled:
        """The step's program, compiled before there is a batch; `step` then runs this very program.

        JAX keeps it with the jitted function: a step of these types neither traces nor compiles again, and one of other
        types does both, and is counted.
        """
        batch = abstract_batch(self.config, self.mesh, self.plan.micro_batch, self.plan.micro_steps)
        return compiled_here(self.train_step.lower(self.abstract_state(), batch), self.mesh)

    def put(self, batch: Batch) -> DeviceBatch:
        """Lay a batch out over the mesh: this process's rows go to its devices."""
        return put_batch(batch, self.mesh, self.plan.micro_batch)

    def batch_on_devices(self, step: int) -> tuple[int, int]:
        """Checksums of a step's inputs: of the whole batch as it should be, and as all devices together hold it."""
        whole = self.batches.whole(step)
        return int(checksum(whole.inputs)), device_checksum(self.put(self.batches.batch(step)).inputs)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Dispatch one step; its state is donated."""
        placed = self.put(batch)
        with jax.transfer_guard("disallow"):
            return self.train_step(state, placed)
