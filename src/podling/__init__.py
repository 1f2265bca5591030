"""Train GPT-2-class language models with JAX, from a laptop CPU to a TPU pod."""

__version__ = "0.1.0"
