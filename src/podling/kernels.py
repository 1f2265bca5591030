"""What the attention kernels can take, so that the configuration gate, the choice for a device and the model agree.

Needs no JAX.
"""

PLATFORM = {"fused": "tpu", "splash": "tpu", "cudnn": "gpu"}
"""Where each kernel runs; the reference runs everywhere."""
TILE = 128
"""Lanes of a TPU's registers."""
FUSED_LONGEST = {"bfloat16": 2048, "float32": 512}
"""Tokens of a sequence: a block's scores with every position lie in VMEM; the compiler refuses 1024 in float32."""
OLD_TPUS = ("TPU v2", "TPU v3")
"""Their matrix unit takes no transposed bfloat16: the compiler refuses both kernels."""


def attention_problem(which: str, length: int, head_dim: int, dropout: float, dtype: str) -> tuple[str, str]:
    """What keeps a kernel from a model, and what it would take; two empty texts where nothing does.

    Args:
        which: as `--train.attention`.
        length: tokens of a sequence.
        head_dim: of the model.
        dropout: probability of dropping an attention weight.
        dtype: compute precision, `float32` or `bfloat16`.
    """
    if which not in PLATFORM:
        return "", ""
    if dropout:
        return f"{which} attention cannot drop attention weights", "no dropout"
    if which == "cudnn":
        if dtype == "float32":
            return "cudnn attention computes in bfloat16", "bfloat16"
        return ("", "") if head_dim % 8 == 0 else (f"a head_dim of {head_dim} is no multiple of 8", "a multiple of 8")
    if length % TILE:
        return f"{which} attention cannot take {length} tokens", f"a multiple of {TILE}"
    if which == "splash":
        return "", ""
    longest = FUSED_LONGEST[dtype]
    if length > longest:
        return f"fused attention cannot take {length} tokens", f"at most {longest}"
    if TILE % head_dim and head_dim % TILE:
        return f"fused attention cannot take a head_dim of {head_dim}", f"a divisor or a multiple of {TILE}"
    return "", ""


def block(length: int, largest: int) -> int:
    """The largest whole number of tiles, up to `largest`, that divides a sequence of `length`, a multiple of a tile."""
    return next(size for size in range(min(largest, length), 0, -TILE) if length % size == 0)
