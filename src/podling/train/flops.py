"""The work in a token, for MFU (Chowdhery et al. 2022, PaLM, appendix B)."""

from podling.config import ModelConfig


def flops_per_token(cfg: ModelConfig) -> int:
    """FLOPs of forward and backward for one token.

    6 for each weight of a matrix product, and 12 x layers x width x context for attention, counted in full as is usual,
    though half of it is masked. Recomputation does not count as work.
    """
    width = cfg.heads * cfg.head_dim
    weights = cfg.layers * (4 * cfg.embed * width + 2 * cfg.embed * cfg.mlp) + cfg.vocab_size * cfg.embed
    return 6 * weights + 12 * cfg.layers * width * cfg.context
