"""What is chosen for a TPU beside attention, and that a person's own choice stays."""

from dataclasses import replace

import pytest

from podling.config import Config
from podling.presets import preset_config
from podling.tuning import settled


def on_tpu(preset: str, vocab: int = 50257, **train: object) -> Config:
    config = preset_config(preset)
    config = replace(config, model=replace(config.model, vocab_size=vocab))
    return settled(replace(config, train=replace(config.train, **train)), "tpu", "TPU v5 lite")


@pytest.mark.parametrize(
    ("preset", "loop"), [("gpt2", "unroll"), ("gpt2-medium", "unroll"), ("gpt2-large", "scan"), ("gpt2-xl", "scan")]
)
def test_a_model_of_few_layers_runs_them_one_after_another(preset: str, loop: str):
    assert on_tpu(preset).train.layer_loop == loop


def test_a_large_vocabulary_is_scored_in_chunks():
    assert on_tpu("gpt2").train.loss_chunk == 256
    assert on_tpu("gpt2", vocab=1024).train.loss_chunk == 0
    assert on_tpu("gpt2-nano").train.loss_chunk == 0  # its context of 128 is one chunk


def test_what_a_person_sets_stays():
    mine = on_tpu("gpt2", layer_loop="scan", loss_chunk=0)
    assert (mine.train.layer_loop, mine.train.loss_chunk) == ("scan", 0)


def test_these_choices_are_for_tpus():
    config = preset_config("gpt2")
    config = replace(config, model=replace(config.model, vocab_size=50257))
    assert settled(config, "gpu", "NVIDIA H200").train.layer_loop == "scan"
