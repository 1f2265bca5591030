"""What one device holds during a step, from sizes alone: the terms of the estimate of its memory.

The coefficients are read off programs of the TPU compiler: which arrays a layer keeps, and for what comes and goes the
temporary memory that it asks for beyond them, gaps included.
"""

from podling.cost.records import Tensor
from podling.cost.shares import Share

PROGRAM_BYTES = 20_000_000  # of instructions; 17 to 22 MB for gpt2
ACCUMULATED = 3.4  # bytes a parameter that micro-batches cost beside their two gradients: copies in the loop, and gaps


def step_tensors(mine: Share) -> list[Tensor]:
    """What one device holds at the worse of two moments: while a layer is differentiated, or the loss is."""
    params, layers = mine.held_params, mine.model.layers
    copies = mine.itemsize if mine.itemsize < 4 else 0
    tensors = [
        _tensor("params", "parameters", 4 * params, f"f32[{params:,}]"),
        _tensor("optimizer moments", "moments", 8 * params, f"f32[2, {params:,}]"),
        _tensor("gradients", "gradients", gradient_bytes(mine), f"f32[{params:,}]"),
        _tensor("weights in the compute dtype", "parameters", copies * params, f"bf16[{params:,}]"),
        _tensor("what the layers keep", "activations", layers * kept_bytes(mine), f"{layers} layers"),
        _tensor("instructions", "program", PROGRAM_BYTES, ""),
    ]
    logits, layer = logits_bytes(mine), layer_bytes(mine)
    if logits > layer:
        tensors.append(_tensor("logits and their gradient", "logits", logits, f"f32[{mine.chunk_scores:,.0f}]"))
    else:
        tensors.append(_tensor("one layer, forward and backward", "temporary", layer, f"f32[{mine.scores:,.0f}]"))
    return [tensor for tensor in tensors if tensor.device_bytes]


def _tensor(name: str, category: str, size: float, shape: str) -> Tensor:
    return Tensor(name, category, shape, round(size))


def gradient_bytes(mine: Share) -> float:
    """Float32 gradients of what a device holds; with accumulation a micro-batch's own beside the sum."""
    return mine.held_params * (8 + ACCUMULATED if mine.accumulation > 1 else 4)


def kept_bytes(mine: Share) -> float:
    """Bytes that one layer's forward pass keeps for its backward pass.

    `dots` keeps q, k, v, the two projections' sums and the MLP's hidden layer; `full` the layer's input.
    """
    model, item = mine.model, mine.itemsize
    if mine.remat == "full":
        return item * mine.tokens * model.embed
    if mine.remat == "dots":
        return item * mine.tokens * (5 * model.embed + model.mlp)
    return _everything(mine)


def _everything(mine: Share) -> float:
    """Every intermediate result of a layer, but gathered ones.

    As the TPU compiler's program has them: six copies of the hidden layer and six of width embed in the compute dtype,
    six more of width embed in float32 (LayerNorm), and scores once in float32 and once as they are multiplied.
    """
    model, item = mine.model, mine.itemsize
    return mine.tokens * (model.embed * (6 * item + 24) + model.mlp * 6 * item) + mine.scores * (4 + item)


def layer_bytes(mine: Share) -> float:
    """Bytes of one layer while it is differentiated, beside what was kept of it; gaps in memory included.

    8 rows of gpt2 on v5e: 1.99 GB with dots, 1.15 with full, 0.8 with none.
    """
    return {
        "none": 8 * mine.scores,
        "dots": _everything(mine) + 8 * mine.scores,
        "full": _everything(mine),
    }[mine.remat] + _gathered_bytes(mine)


def _gathered_bytes(mine: Share) -> float:
    """Two layers' gathered weights, one in use and one on its way."""
    if mine.sizes["fsdp"] == 1:
        return 0.0
    return 2 * mine.itemsize * mine.held_params * mine.sizes["fsdp"] / mine.model.layers


def logits_bytes(mine: Share) -> float:
    """Bytes of the logits that exist at a time and of their gradient, in float32."""
    return 2 * 4 * mine.chunk_scores
