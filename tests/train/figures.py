"""What a run has to show: the figures of a step, an evaluation and a whole run."""

import types

BASELINE = types.SimpleNamespace(unigram_loss=5.98714, bigram_loss=4.41234, bigram_parse_share=0.05)
EVALUATION = {"step": 30, "val_loss": 3.45678, "val_perplexity": 31.714, "val_bits_per_byte": 1.41234}
SUMMARY = {
    "run": "runs/my book",
    "params": 3_456_789,
    "tokens": 2_457_600,
    "steps": 600,
    "train_loss": 3.2,
    "val_loss": 3.45678,
    "val_bits_per_byte": 1.41234,
    "unigram_loss": 5.98714,
    "bigram_loss": 4.41234,
    "tokens_per_s": 12_345.6,
    "mfu": 0.4123,
    "data_wait_share": 0.0021,
    "retraces": 0,
    "wall_s": 201.3,
    "export": "runs/my book/export",
}


def record(step, **more):
    return {
        "step": step,
        "loss": 4.5 - step / 100,
        "lr": 1.9e-3,
        "grad_norm": 0.9,
        "tokens": step * 4096,
        "step_s": 0.3,
        "tokens_per_s": 12_345.6,
        "mfu": 0.4123,
        "data_wait_share": 0.0021,
        "left_s": 125.2,
        "elapsed_s": 9.0,
        "retraces": 0,
    } | more
