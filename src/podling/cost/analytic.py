"""Memory and time of a step from sizes alone, without compiling it.

This ranks layouts before the compiler is asked, answers where there is none (GPUs, other platforms), and tells training
how many rows fit. The time is a roofline (Williams et al. 2009): operations of each part of the step at the peak, bytes
at full bandwidth, bytes over links where nothing hides them. How many times a part's arrays pass through memory is read
off what the TPU compiler made of GPT-2 on v5e and v6e.
"""

from podling.chips import Chip
from podling.config import Config
from podling.cost.records import CATEGORIES, Hbm, Kind, Layout, StepTime
from podling.cost.shares import Share, share
from podling.cost.step_bytes import kept_bytes, step_tensors
from podling.model.fit import padded_vocab

MATMUL = 0.95
"""Share of the peak that large matrix products reach."""
RANGE = {"tpu": (0.75, 1.35), "gpu": (0.8, 1.8), "cpu": (0.5, 2.0)}
WORDS = {
    "tpu": "estimated from sizes, not compiled",
    "gpu": "a roofline: there is no compiler for this chip here, and nothing was calibrated on it",
    "cpu": "a roofline from published figures: nothing was measured",
}

# Passes through memory; those of scores are of float32 arrays, as are those of the loss and of parameters.
SCORES = {"forward": 2.1, "again": 2.0, "backward": 6.6}
"""Attention scores, materialised: written, read by the softmax, multiplied; and their gradients."""
STREAM = {"forward": 10.0, "again": 6.0, "backward": 10.0}
"""Arrays of the residual stream's size in the compute dtype: LayerNorms, biases, GELU, transpositions."""
KEPT = 2.2
"""What is kept is copied into the buffer of all layers."""
LOSS, LOSS_CHUNKED = 1.5, 2.8
OPTIMIZER = 10.0
"""AdamW reads weight, gradient and moments and writes three of them; casts, the norm and the division by the count."""
ACCUMULATE = 5.0


def estimate_hbm(config: Config, layout: Layout, chip: Chip, itemsize: int) -> Hbm:
    """What each device holds when it holds most.

    Args:
        config: resolved (`vocab_size` known); its own layout is not looked at.
        layout: the one in question.
        chip: of which each device is one.
        itemsize: bytes of the compute dtype.

    Raises:
        InputError: the layout's mesh is none.
    """
    tensors = step_tensors(share(config, layout, itemsize))
    by_category: dict[str, int] = {category: 0 for category in CATEGORIES}
    for tensor in tensors:
        by_category[tensor.category] += tensor.device_bytes
    return Hbm(
        total_bytes=sum(by_category.values()),
        limit_bytes=chip.hbm_bytes,
        by_category=by_category,
        largest=tuple(sorted(tensors, key=lambda tensor: -tensor.device_bytes)),
        source="estimate",
    )


def estimate_time(
    config: Config, layout: Layout, target_devices: int, chip: Chip, itemsize: int, joined: int
) -> StepTime:
    """One optimizer step, accumulation included.

    Args:
        config: resolved (`vocab_size` known); its own layout is not looked at.
        layout: the one in question.
        target_devices: of the whole mesh.
        chip: of which each device is one.
        itemsize: bytes of the compute dtype.
        joined: devices between which sending is fast; beyond them it goes through the data centre's network.

    Raises:
        InputError: the layout's mesh is none.
    """
    mine = share(config, layout, itemsize)
    micro = mine.accumulation
    matmul_s = micro * _flops(mine) / (MATMUL * _peak(chip, itemsize))
    memory_s = (micro * _micro_bytes(mine) + _step_bytes(mine)) / chip.hbm_bytes_per_s
    hidden_s, waited_s = _links_s(mine, chip, min(joined, target_devices))
    # Gathered weights travel while something is computed; what takes longer than that is waited for.
    late_s = max(0.0, hidden_s - 0.7 * (matmul_s + memory_s))
    parts: dict[Kind, float] = {
        "matmul": matmul_s,
        "compute": 0.0,
        "memory": memory_s,
        "collective": waited_s + max(late_s, 0.1 * hidden_s),
    }
    step_s = sum(parts.values())
    low, high = RANGE[chip.platform]
    return StepTime(step_s, (low * step_s, high * step_s), parts, WORDS[chip.platform])


def _peak(chip: Chip, itemsize: int) -> float:
    """FLOP/s in the compute dtype; float32 on a TPU takes six passes of bfloat16 (precision "highest")."""
    if itemsize == 2:
        return chip.peak_flops["bfloat16"]
    return chip.peak_flops.get("float32") or chip.peak_flops["bfloat16"] / 6


def _flops(mine: Share) -> float:
    """Matrix products of one micro-batch on one device, recomputed ones too, as the matrix unit executes them."""
    model = mine.model
    width = model.heads * model.head_dim
    projections = 2 * mine.tokens * (4 * model.embed * width + 2 * model.embed * model.mlp)
    # The last product of a block is of no use to its backward pass.
    again = projections - 2 * mine.tokens * model.embed * model.mlp if mine.remat == "full" else 0.0
    scores = 2 * 2 * mine.scores * model.head_dim
    scores_again = scores / 2 if mine.remat != "none" else 0.0
    loss = 2 * mine.tokens * padded_vocab(model) * model.embed
    loss_times = 4 if mine.loss_chunk < model.context else 3
    return model.layers * (3 * projections + again + 3 * scores + scores_again) + loss_times * loss


def _micro_bytes(mine: Share) -> float:
    """Bytes through memory for one micro-batch on one device."""
    model, weights = mine.model, mine.held_params
    times = ("forward", "backward") if mine.remat == "none" else ("forward", "again", "backward")
    scores = 4 * mine.scores * sum(SCORES[time] for time in times)
    stream = mine.itemsize * mine.tokens * model.embed * sum(STREAM[time] for time in times)
    kept = KEPT * kept_bytes(mine)
    logits = 4 * mine.tokens * padded_vocab(model)
    loss = logits * (LOSS_CHUNKED if mine.loss_chunk < model.context else LOSS)
    # Every product reads its weights from memory once; in the backward pass again, and their gradient is written.
    read = 4 * mine.itemsize * mine.gathered_params
    added = ACCUMULATE * 4 * weights if mine.accumulation > 1 else 0.0
    return model.layers * (scores + stream + kept) + loss + read + added


def _step_bytes(mine: Share) -> float:
    """Bytes through memory once a step: the optimizer."""
    return OPTIMIZER * 4 * mine.held_params


def _links_s(mine: Share, chip: Chip, joined: int) -> tuple[float, float]:
    """Seconds of a step on the links: what is sent while something is computed, and what is waited for."""
    sizes, model = mine.sizes, mine.model
    hidden_s = waited_s = 0.0
    if (fsdp := sizes["fsdp"]) > 1:
        # Gathered forward and again backward; gradients reduce-scattered, all in the compute dtype.
        sent = 3 * mine.itemsize * mine.gathered_params * (fsdp - 1) / fsdp
        hidden_s = mine.accumulation * sent / _bandwidth(chip, fsdp * sizes["tensor"], fsdp, joined)
    if (tensor := sizes["tensor"]) > 1:
        stream = mine.itemsize * mine.tokens * tensor * model.embed * (tensor - 1) / tensor
        times = 11 if mine.remat == "full" else 10
        sent = mine.accumulation * model.layers * times * stream
        waited_s += sent / _bandwidth(chip, tensor, tensor, joined)
    if (data := sizes["data"]) > 1:
        gradients = 2 * 4 * mine.held_params
        inside = max(1, min(data, joined // (fsdp * tensor)))
        waited_s += gradients * (inside - 1) / inside / _bandwidth(chip, inside, inside, joined)
        if inside < data:  # what a slice has summed goes to the others in as many parts as it has devices
            outside = data // inside
            waited_s += gradients / inside * (outside - 1) / outside / _between(chip)
    return hidden_s, waited_s


def _bandwidth(chip: Chip, span: int, group: int, joined: int) -> float:
    """Bytes a second that a device sends around a ring of `group`, spread over `span` neighbouring devices."""
    if span > joined:
        return _between(chip)
    if chip.platform == "gpu":
        return chip.links * chip.link_bytes_per_s or float("inf")
    return chip.link_bytes_per_s * (1 if group == 2 else 2) / chip.devices_per_chip or float("inf")


def _between(chip: Chip) -> float:
    return chip.between_slices_bytes_per_s or chip.link_bytes_per_s or float("inf")
