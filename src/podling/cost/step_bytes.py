"""What one device holds during a step, from sizes alone: the terms of the estimate of its memory.

The coefficients are read off programs of the TPU compiler: which arrays a layer keeps, and the memory that it asks for
beyond them, gaps included. 18 layouts of GPT-2's four sizes on v5e, v5p and v6e (bfloat16, every remat, 2 to 32 rows a
device, meshes of all three axes, up to 256 chips) lie within 9% of what it asked for in all.
"""

from podling.config import Config
from podling.cost.records import Tensor
from podling.cost.shares import Share
from podling.model.fit import padded_vocab
from podling.model.form import Form

PROGRAM_BYTES, LAYER_PROGRAM_BYTES = 20_000_000, 14_000_000
"""Instructions on TPUs: 17 to 25 MB for GPT-2 in a loop over layers; 340 MB for 24 layers one after another."""


def step_tensors(mine: Share) -> list[Tensor]:
    """What one device holds at the worse of two moments: while a layer is differentiated, or the loss is."""
    params, layers = mine.held_params, mine.model.layers
    f32, compute = f"f32[{params:,}]", "bf16" if mine.itemsize == 2 else f"f{8 * mine.itemsize}"
    copies = _copy_bytes(mine.itemsize) * params
    always = [
        _tensor("parameters", "parameters", 4 * params, f32),
        _tensor("moments, two of each parameter", "moments", 8 * params, f32),
        _tensor(f"parameters in {compute}", "parameters", copies, f"{compute}[{params:,}]"),
        _tensor("what layers keep for the backward pass", "activations", layers * kept_bytes(mine), f"{layers} layers"),
        _tensor("instructions", "program", PROGRAM_BYTES + mine.unrolled * layers * LAYER_PROGRAM_BYTES, ""),
    ]
    accumulates = mine.accumulation > 1
    gradients = gradient_bytes(accumulates=accumulates, unrolled=mine.unrolled) * params
    # When the loss is differentiated the only gradient is the table's; unless others are being added up.
    table = 4 * padded_vocab(mine.model) * mine.model.embed / (mine.sizes["fsdp"] * mine.sizes["tensor"])
    in_layer = [
        _tensor("gradients", "gradients", gradients, f32),
        _tensor("one layer and its gradients", "temporary", layer_bytes(mine), "activations"),
    ]
    in_loss = [
        _tensor("gradients", "gradients", gradients if accumulates else table, f32),
        _tensor("logits and their gradient", "logits", logits_bytes(mine), f"f32[{mine.chunk_scores:,.0f}] and more"),
    ]
    return [tensor for tensor in always + max(in_layer, in_loss, key=_sum) if tensor.device_bytes]


def needed_bytes(mine: Share) -> int:
    """All that a step takes of a device, but instructions."""
    return _sum([tensor for tensor in step_tensors(mine) if tensor.category != "program"])


def _tensor(name: str, category: str, size: float, shape: str) -> Tensor:
    return Tensor(name, category, shape, round(size))


def _sum(tensors: list[Tensor]) -> int:
    return sum(tensor.device_bytes for tensor in tensors)


def bytes_per_parameter(itemsize: int, *, accumulates: bool) -> int:
    """Bytes that a step holds for a parameter: 12 for it and its two moments in float32, its gradient, and the copies.

    These are the weights in the compute dtype, which the TPU compiler casts once for all layers.

    Args:
        itemsize: bytes of the compute dtype.
        accumulates: whether the batch is cut into micro-batches.
    """
    return 12 + gradient_bytes(accumulates=accumulates) + _copy_bytes(itemsize)


def gradient_bytes(*, accumulates: bool, unrolled: bool = False) -> int:
    """Bytes of a parameter's gradient in float32; with micro-batches a second one, and as much in copies and gaps.

    (124M on a v5e chip: four micro-batches of 8 rows for one take 920 MB more, 7.4 bytes a parameter. With layers one
    after another there are no copies of stacks.)
    """
    if not accumulates:
        return 4
    return 8 if unrolled else 12


def _copy_bytes(itemsize: int) -> int:
    return itemsize if itemsize < 4 else 0


def row_bytes(config: Config, itemsize: int) -> int:
    """Bytes that one sequence needs on a device of its own: what is kept for the backward pass, a layer, or logits."""
    form = Form.of(config.train)
    alone = {"data": 1, "fsdp": 1, "tensor": 1}
    mine = Share(config.model, alone, 1, 1, form.remat, form.loss_chunk or config.model.context, itemsize)
    return round(config.model.layers * kept_bytes(mine) + max(layer_bytes(mine), logits_bytes(mine)))


def kept_bytes(mine: Share) -> float:
    """Bytes that one layer's forward pass keeps for its backward pass.

    `dots` keeps q, k, v, what a kernel attended to, the two projections' sums and the MLP's hidden layer; `full` the
    layer's input.
    """
    model, item = mine.model, mine.itemsize
    if mine.remat == "full":
        return item * mine.tokens * model.embed
    if mine.kernel and mine.unrolled and mine.remat == "none":  # the compiler makes LayerNorms and GELU again
        return item * mine.tokens * (6 * model.embed + model.mlp)
    if mine.remat == "dots":
        return item * mine.tokens * ((6 if mine.kernel else 5) * model.embed + model.mlp)
    return _everything(mine)


def _everything(mine: Share) -> float:
    """Every intermediate result of a layer, but gathered ones.

    As the TPU compiler's program has them: six copies of the hidden layer and six of width embed in the compute dtype,
    six more of width embed in float32 (LayerNorm), and scores once in float32 and once as they are multiplied.
    """
    model, item = mine.model, mine.itemsize
    return mine.tokens * (model.embed * (6 * item + 24) + model.mlp * 6 * item) + mine.seen_scores * (4 + item)


def layer_bytes(mine: Share) -> float:
    """Bytes of one layer while it is differentiated, beside what was kept of it; gaps in memory included.

    8 rows of gpt2 on v5e: 1.99 GB with dots, 1.15 with full, 0.90 with none.
    """
    computed = {
        "none": 8 * mine.seen_scores,
        "dots": _everything(mine) + 8 * mine.seen_scores,
        "full": _everything(mine),
    }
    return computed[mine.remat] + _gathered_bytes(mine)


def _gathered_bytes(mine: Share) -> float:
    """Two layers' gathered weights, one in use and one on its way, and the gathered table with its gradient."""
    if mine.sizes["fsdp"] == 1:
        return 0.0
    table = padded_vocab(mine.model) * mine.model.embed / mine.sizes["tensor"]
    return 2 * mine.itemsize * (table + (mine.gathered_params - table) / mine.model.layers)


def logits_bytes(mine: Share) -> float:
    """Bytes of the logits that exist at a time and of their gradient, in float32."""
    return 2 * 4 * mine.chunk_scores
