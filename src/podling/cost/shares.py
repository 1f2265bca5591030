"""How much of a step falls to one device: the sizes that estimates of its memory and time are made of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax

from podling.config import Config, ModelConfig
from podling.cost.records import Layout
from podling.errors import raise_if
from podling.model.fit import padded_vocab
from podling.model.form import Form
from podling.model.spec import param_specs
from podling.parallel.axes import batch_ways, read_mesh
from podling.parallel.rules import STORAGE


@dataclass(frozen=True)
class Share:
    """One device's part of one micro-batch, and what it holds of the parameters."""

    model: ModelConfig
    sizes: dict[str, int]  # devices on each mesh axis
    rows: float  # of one micro-batch
    accumulation: int  # micro-batches a step
    remat: str
    loss_chunk: int  # positions; never 0
    itemsize: int  # bytes of the compute dtype
    kernel: bool = False  # attention never writes its scores to memory
    unrolled: bool = False  # layers one after another, so that nothing is stacked

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch, split over tensor as the residual stream, heads and MLP are."""
        return self.rows * self.model.context / self.sizes["tensor"]

    @property
    def scores(self) -> float:
        """Attention scores of one layer: [rows, heads, context, context]."""
        return self.rows * self.model.heads * self.model.context**2 / self.sizes["tensor"]

    @property
    def seen_scores(self) -> float:
        """Scores that go through memory."""
        return 0.0 if self.kernel else self.scores

    @property
    def chunk_scores(self) -> float:
        """Logits that exist at a time: [rows, chunk, vocabulary]."""
        return self.rows * self.loss_chunk * padded_vocab(self.model) / self.sizes["tensor"]

    @property
    def held_params(self) -> int:
        return held_params(self.model, **self.sizes)

    @property
    def gathered_params(self) -> int:
        """Parameters that a device uses in the course of a forward pass, gathered over fsdp."""
        return held_params(self.model, tensor=self.sizes["tensor"])


def share(config: Config, layout: Layout, itemsize: int) -> Share:
    """The share of each device.

    Args:
        config: resolved (`vocab_size` known) and settled for the device; its own layout is not looked at.
        layout: the one in question.
        itemsize: bytes of the compute dtype.

    Raises:
        InputError: the layout's mesh is none.
    """
    sizes, problems = read_mesh(layout.mesh)
    raise_if(problems)
    return Share(
        model=config.model,
        sizes=sizes,
        rows=layout.micro_batch / batch_ways(sizes),
        accumulation=layout.accumulation,
        remat=layout.remat,
        loss_chunk=layout.loss_chunk or config.model.context,
        itemsize=itemsize,
        kernel=Form.of(config.train).attention != "reference",
        unrolled=Form.of(config.train).layers == "unroll",
    )


@lru_cache(maxsize=1024)
def held_params(model: ModelConfig, data: int = 1, fsdp: int = 1, tensor: int = 1) -> int:
    """Parameters on each device: every leaf's share, as the spec tree and the table of axes say."""
    sizes: Mapping[str | None, int] = {"data": data, "fsdp": fsdp, "tensor": tensor, None: 1}
    return sum(
        math.prod(-(-size // sizes[STORAGE[axis]]) for size, axis in zip(leaf.shape, leaf.axes, strict=True))
        for leaf in jax.tree.leaves(param_specs(model))
    )
