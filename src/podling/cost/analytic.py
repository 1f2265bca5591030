"""Memory and time of a step from sizes alone, without compiling it.

This ranks layouts before the compiler is asked, answers where there is none (GPUs, other platforms), and tells training
how many rows fit. The time is a roofline (Williams et al. 2009): operations of each part of the step at the peak, bytes
at full bandwidth, bytes over links where nothing hides them. How many times a part's arrays pass through memory is read
off what the TPU compiler made of GPT-2 on v5e, v5p and v6e: of the time that `cost.step_time` gives its program, 18
layouts of four sizes on 1 to 256 chips lie within 5%, and 4 rows without remat 9% above.
"""

import math
from dataclasses import replace
from functools import lru_cache

from podling.chips import Chip
from podling.config import Config
from podling.cost.calibration import calibration, give_or_take
from podling.cost.links import Links, join
from podling.cost.records import CATEGORIES, Hbm, Kind, Layout, StepTime
from podling.cost.shares import Share, share
from podling.cost.step_bytes import kept_bytes, step_tensors
from podling.model.fit import padded_vocab

MATMUL = 0.95
"""Share of the peak that large matrix products reach."""
MISSES = 1.15
"""How far estimates have been from the time of the compiled program, as a factor; the calibration's range is on top."""
UNCOMPILED = "estimated from sizes, not compiled"
ROOFLINE = {
    "gpu": (0.6, 1.8, "a roofline from published figures: podling has nothing measured on this chip"),
    "cpu": (0.2, 5.0, "a guess, with the figures of two laptop cores: a CPU is measured, not looked up"),
}
CPU_FLOPS, CPU_BYTES_PER_S = {"float32": 180e9, "bfloat16": 20e9}, 28e9

# How often each part's arrays pass through memory, if that were as fast as published: in the programs for v5e, with the
# cycles that the compiler counts. Arrays of scores, of logits and of parameters are in float32, others in the compute
# dtype.
SCORES = {"forward": 3.2, "again": 3.0, "backward": 9.9}
"""Attention scores, materialised: written, read by the softmax, multiplied; and their gradients."""
VMEM_BYTES = {"v5e": 128 << 20, "v6e": 128 << 20, "v5p": 128 << 20}
"""On-chip memory (Austin et al. 2025, "How to Scale Your Model"), which the compiler uses like device memory."""
IN_VMEM = 0.5
"""Time of a pass over the scores of a layer where they fit there: 2 rows of gpt2 (101 MB) do, 4 rows do not."""
STREAM = {"forward": 21.5, "again": 19.5, "backward": 21.5}
"""Arrays of the residual stream's size: LayerNorms, biases, GELU, transpositions around the scores."""
KERNEL_STREAM = {"forward": 9.0, "again": 8.0, "backward": 20.0}
"""The same where a kernel takes the projections as they are: 75 ms of gpt2-medium's 1060 on v5e."""
KERNEL = {"v5e": 0.76, "v6e": 0.22}
"""Share of the peak that our kernels reach with heads of 64, as scheduled, calibrated; elsewhere half."""
KEPT = {"none": 4.4, "dots": 5.7, "full": 13.0}
"""In a loop, what is kept is copied into the buffer of all layers, and read from it again."""
KERNEL_KEPT = 9.0
"""Where kernels read and write it, in passes: gpt2 on v5e takes 117 ms for 16 rows in a loop and 95 without."""
LOSS = 2.7
TABLE = 5.0
"""For each chunk of the loss the table is read for its three products, and its gradient read and written."""
OPTIMIZER = 17.9
"""AdamW reads weight, gradient and moments and writes three of them; casts, the norm and the division by the count."""
ACCUMULATE, ACCUMULATE_UNROLLED = 5.9, 3.0
"""A micro-batch's gradients are added to those before it."""
EXPOSED, ENTERING = 0.3, 0.67
"""Of the time that gathered weights, and the residual stream over tensor, travel, the share that is waited for."""
UNCUT = 1.25
"""The compiler makes an all-reduce, of twice the bytes, of the qkv kernel's reduce-scatter: a quarter of a layer."""
SLOWNESS = {"v5p": 1.25, "v6e": 0.88}
"""Time of such a pass on a TPU, with what vector units add, against the passes above; 0.95 for the others."""
KERNEL_SLOWNESS = {"v6e": 1.9}
"""The same where attention is a kernel: what is left are logits in float32, sums over rows and the optimizer."""
AT_FULL_BANDWIDTH = 0.6
"""Part of the passes that are left where nothing but memory slows them down."""


LANES, UNPACKED = 128, 8.0
"""A tile's columns; passes over weights that arrive in narrower parts, times the root of how much of them is empty.
Gpt2 and gpt2-xl compiled for 32 to 256 v5e chips took a third longer than without it."""


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
    if chip.platform == "cpu":
        chip = replace(chip, peak_flops=CPU_FLOPS, hbm_bytes_per_s=CPU_BYTES_PER_S)
    pass_s = _slowness(chip, mine) / chip.hbm_bytes_per_s
    peak = _peak(chip, itemsize)
    matmul_s = micro * (_flops(mine) / MATMUL + _kernel_flops(mine) / KERNEL.get(chip.name, 0.5)) / peak
    compute_s = micro * _stream_bytes(mine) * pass_s
    inside = 1.1 * 4 * mine.seen_scores <= VMEM_BYTES.get(chip.name, 0)
    scores_bytes = _scores_bytes(mine) * (IN_VMEM if inside else 1.0)
    padding = _padding_bytes(mine) if chip.platform == "tpu" else 0.0
    memory_s = (micro * (scores_bytes + _micro_bytes(mine) + padding) + _step_bytes(mine)) * pass_s
    hidden_s, waited_s = _links_s(mine, chip, max(1, target_devices // joined))
    # Most of the weights are gathered while a layer is computed; what takes longer than that is waited for too.
    late_s = max(EXPOSED * hidden_s, hidden_s - 0.7 * (matmul_s + compute_s + memory_s))
    parts: dict[Kind, float] = {
        "matmul": matmul_s,
        "compute": compute_s,
        "memory": memory_s,
        "collective": waited_s + late_s,
    }
    step_s = sum(parts.values())
    if chip.platform != "tpu":
        low, high, words = ROOFLINE[chip.platform]
        return StepTime(step_s, (low * step_s, high * step_s), parts, words)
    known = calibration(chip.name)
    low, high = known.low / MISSES, known.high * MISSES
    words = f"{UNCOMPILED}; {give_or_take(known.basis, high)}"
    return StepTime(step_s, (low * step_s, high * step_s), parts, words)


def _slowness(chip: Chip, mine: Share) -> float:
    """Time of a pass, of those that the compiler counts for v5e.

    Calibration shortens cycles, but no pass through memory: of 8 rows of gpt2 on v5e all but matrix products takes
    135 ms with the cycles as they are, 104 with 0.8 of them, 85 with 0.6 and 76 with 0.4.
    """
    if chip.platform != "tpu":
        return AT_FULL_BANDWIDTH
    factor = calibration(chip.name).factor
    slowness = (KERNEL_SLOWNESS if mine.kernel else SLOWNESS).get(chip.name, 0.95)
    return slowness * (0.5 + 0.5 * factor**2.6)


def _peak(chip: Chip, itemsize: int) -> float:
    """FLOP/s in the compute dtype; float32 on a TPU takes six passes of bfloat16 (precision "highest")."""
    if itemsize == 2:
        return chip.peak_flops["bfloat16"]
    return chip.peak_flops.get("float32") or chip.peak_flops["bfloat16"] / 6


def _flops(mine: Share) -> float:
    """Matrix products of one micro-batch on one device, recomputed ones too.

    Those of attention scores are left out: with 64 wide heads their time is that of the scores' way through memory.
    """
    model = mine.model
    width = model.heads * model.head_dim
    projections = 2 * mine.tokens * (4 * model.embed * width + 2 * model.embed * model.mlp)
    # The last product of a block is of no use to its backward pass.
    again = projections - 2 * mine.tokens * model.embed * model.mlp if mine.remat == "full" else 0.0
    loss = 2 * mine.tokens * padded_vocab(model) * model.embed
    return model.layers * (3 * projections + again) + 3 * loss


def _kernel_flops(mine: Share) -> float:
    """Products of an attention kernel in one micro-batch: two forward and five backward, below the diagonal."""
    if not mine.kernel:
        return 0.0
    times = 7 + 2 * (mine.remat == "full")
    return times * mine.model.layers * mine.scores * mine.model.head_dim


def _times(mine: Share) -> tuple[str, ...]:
    """How often a layer is computed."""
    return ("forward", "backward") if mine.remat == "none" else ("forward", "again", "backward")


def _stream_bytes(mine: Share) -> float:
    """Bytes of what is done to each element of the residual stream and the hidden layer, in one micro-batch."""
    passes = sum((KERNEL_STREAM if mine.kernel else STREAM)[time] for time in _times(mine))
    return mine.model.layers * passes * mine.itemsize * mine.tokens * mine.model.embed


def _scores_bytes(mine: Share) -> float:
    """Bytes of attention scores, written and read again, in one micro-batch."""
    return mine.model.layers * 4 * mine.seen_scores * sum(SCORES[time] for time in _times(mine))


def _micro_bytes(mine: Share) -> float:
    """Bytes of all else through memory for one micro-batch on one device."""
    model = mine.model
    stacked = 0.0 if mine.unrolled else KERNEL_KEPT if mine.kernel and mine.remat != "full" else KEPT[mine.remat]
    kept = stacked * kept_bytes(mine)
    loss = LOSS * 4 * mine.tokens * padded_vocab(model)
    table = mine.itemsize * padded_vocab(model) * model.embed / mine.sizes["tensor"]
    loss += TABLE * table * model.context / mine.loss_chunk
    # Every product reads its weights from memory once; in the backward pass again, and their gradient is written.
    read = 4 * mine.itemsize * mine.gathered_params
    passes = ACCUMULATE_UNROLLED if mine.unrolled else ACCUMULATE
    added = passes * 4 * mine.held_params if mine.accumulation > 1 else 0.0
    return model.layers * kept + loss + read + added


def _padding_bytes(mine: Share) -> float:
    """Bytes through a TPU's memory for one micro-batch because weights arrive in parts that are less than a tile wide.

    A shard of fewer than 128 columns is padded to 128; gathered, it is unpacked, and gradients are packed again.
    """
    columns = mine.model.embed / mine.sizes["fsdp"]
    if mine.sizes["fsdp"] == 1 or columns >= LANES:
        return 0.0
    return UNPACKED * mine.itemsize * mine.gathered_params * math.sqrt(LANES / columns - 1)


def _step_bytes(mine: Share) -> float:
    """Bytes through memory once a step: the optimizer."""
    return OPTIMIZER * 4 * mine.held_params


def _links_s(mine: Share, chip: Chip, slices: int) -> tuple[float, float]:
    """Seconds of a step on the links: what is sent while something is computed, and what is waited for."""
    if chip.platform == "cpu":  # emulated devices: what they send stays in one memory
        return 0.0, 0.0
    sizes, layers, item = mine.sizes, mine.model.layers, mine.itemsize
    links = _links(chip, tuple(sizes.items()), slices)
    hidden_s = waited_s = 0.0
    if sizes["fsdp"] > 1:  # layer by layer: gathered forward and again backward, gradients summed and cut
        whole = item * mine.gathered_params / layers
        part = whole / sizes["fsdp"]
        times = mine.accumulation * layers
        hidden_s = 2 * times * links.seconds("all-gather", ("fsdp",), round(part), round(whole))
        waited_s += UNCUT * times * links.seconds("reduce-scatter", ("fsdp",), round(whole), round(part))
    if sizes["tensor"] > 1:
        part = item * mine.tokens * mine.model.embed
        times = mine.accumulation * layers * (11 if mine.remat == "full" else 10)
        each_s = links.seconds("all-gather", ("tensor",), round(part), round(part * sizes["tensor"]))
        waited_s += ENTERING * times * each_s
    if sizes["data"] > 1:
        gradients = 4 * mine.held_params
        waited_s += links.seconds("all-reduce", ("data",), gradients, gradients)
    return hidden_s, waited_s


@lru_cache(maxsize=256)
def _links(chip: Chip, mesh: tuple[tuple[str, int], ...], slices: int) -> Links:
    sizes = dict(mesh)
    # A mesh whose data axis does not go over the slices is reckoned as one that does: the best of what it could be.
    return join(chip, sizes, slices=math.gcd(slices, sizes["data"]))
