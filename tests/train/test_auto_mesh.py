"""What `--mesh auto` chooses, and what it says about it."""

from dataclasses import replace

import pytest

from podling.config import Config, ModelConfig, RunConfig, TrainConfig
from podling.cost.shares import held_params
from podling.cost.step_bytes import row_bytes
from podling.errors import InputError
from podling.files import show_binary
from podling.model.fit import fits
from podling.presets import PRESETS
from podling.train.auto_mesh import Machine, choose_mesh, joined, settle_mesh
from podling.train.batch_plan import USABLE

GIB = 2**30
V5E = int(15.75 * GIB)
NO = {"data": 1, "fsdp": 1, "tensor": 1}


def preset(name: str, **train) -> Config:
    config = PRESETS[name].config
    model = replace(config.model, vocab_size=50257)
    return replace(config, model=model, train=replace(config.train, **train))


def chosen(config: Config, devices: int, memory: int = V5E, per_process: int | None = None):
    machine = Machine(devices, per_process or devices, memory)
    choice = choose_mesh(config, machine, 2)
    assert fits(config, choice.sizes)
    return choice


def test_a_state_that_fits_goes_on_data():
    choice = chosen(preset("gpt2"), 8)
    assert choice.text == "data=8"
    # 124.5M parameters (with the padding of the vocabulary) of 26 bytes: 16, a copy in bfloat16, micro-batches' 8.
    assert choice.why == (
        "weights, moments, gradients and their copies (3.01 GiB) fit on every device, so only gradients travel"
    )


def test_a_state_that_does_not_fit_is_sharded_as_little_as_does():
    choice = chosen(preset("gpt2-xl"), 8)
    assert choice.text == "data=2,fsdp=4"
    assert "26 bytes a parameter, are 37.72 GiB, and of a device's 15.75 GiB podling plans with three qu" in choice.why
    assert "sharded over 4 they are 9.45 GiB on each" in choice.why
    assert chosen(preset("gpt2-xl"), 8, 28 * GIB).text == "data=4,fsdp=2"
    assert chosen(preset("gpt2-xl"), 8, 95 * GIB).text == "data=8"


def test_one_device_has_nothing_to_choose():
    assert (chosen(preset("gpt2"), 1).text, chosen(preset("gpt2"), 1).why) == ("data=1", "")


def test_rows_that_do_not_divide_go_to_the_other_axes_and_it_says_so():
    choice = chosen(preset("gpt2", batch_tokens=1024 * 2), 8)
    assert choice.sizes == {"data": 2, "fsdp": 1, "tensor": 4}
    assert "data=8 alone does not do: 2048 tokens are not whole rows of 1024 over data x fsdp = 8" in choice.why


def test_a_batch_that_fits_no_mesh_is_one_problem():
    for train in ({"batch_tokens": 1024 * 3}, {"batch_tokens": 1024 * 9 + 1}):
        with pytest.raises(InputError) as error:
            chosen(preset("gpt2", **train), 8)
        (problem,) = error.value.problems
        assert problem.where == "--batch-tokens" and "none is left idle: " in problem.what
        assert "a multiple of 8192: --batch-tokens 8192" in problem.fix
        assert ("show JAX" in problem.fix) == (train["batch_tokens"] % 1024 == 0)


def test_devices_are_never_left_idle():
    with pytest.raises(InputError) as error:
        chosen(preset("gpt2"), 7)
    text = str(error.value)
    assert "no mesh of all 7 devices divides this model and batch" in text and "show JAX 4 of them" in text
    assert "--batch-tokens 523264 or 530432" in text and 523264 == 73 * 7 * 1024


def test_what_fits_nowhere_is_said_and_sharded_as_far_as_it_goes():
    choice = chosen(preset("gpt2-xl"), 4, 2 * GIB)
    assert choice.text == "fsdp=4" and "expect it to run out of memory (more devices, or a smaller model" in choice.why


def test_what_only_the_part_kept_free_would_hold_is_said_with_that_part():
    one_row = row_bytes(preset("gpt2-medium"), 2)
    needed = 26 * held_params(preset("gpt2-medium").model) + one_row
    why = chosen(preset("gpt2-medium"), 1, int(needed / 0.9)).why
    assert f"activations need about {show_binary(needed)} on each device, and of a device's" in why
    assert f"three quarters ({show_binary(needed / 1.2)}), the rest being for what the compiler adds: it may run" in why
    assert chosen(preset("gpt2-medium"), 1, int(needed / 0.75) + 2).why == ""


def test_with_processes_fsdp_stays_inside_one():
    assert chosen(preset("gpt2-xl"), 16, per_process=4).text == "data=4,fsdp=4"
    # Two ways would do, but with 3 devices a process a pair would straddle two of them.
    config = Config(model=ModelConfig(layers=2, heads=6, embed=384, mlp=1536, context=128, vocab_size=1000))
    config = replace(config, train=TrainConfig(batch_tokens=128 * 24, remat="full"))
    whole = 26 * held_params(config.model)
    memory = int((0.6 * whole + row_bytes(config, 2)) / USABLE)
    assert chosen(config, 12, memory, per_process=12).text == "data=6,fsdp=2"
    assert chosen(config, 12, memory, per_process=3).text == "data=4,fsdp=3"


def test_a_mesh_that_was_asked_for_is_taken_or_refused():
    machine = Machine(8, 8, V5E)
    config = replace(preset("gpt2"), run=RunConfig(mesh="fsdp=4,data=2"))
    assert settle_mesh(config, machine, 2).sizes == {"data": 2, "fsdp": 4, "tensor": 1}
    assert settle_mesh(config, machine, 2).why == ""
    with pytest.raises(InputError, match="12 heads do not divide over tensor=8"):
        settle_mesh(replace(config, run=RunConfig(mesh="tensor=8")), machine, 2)
    with pytest.raises(InputError, match="unknown axis 'tensr'"):
        settle_mesh(replace(config, run=RunConfig(mesh="tensr=8")), machine, 2)


def test_joined_devices_are_those_of_a_process_or_of_a_slice():
    class Device:
        def __init__(self, process_index: int, **more: int):
            self.process_index = process_index
            vars(self).update(more)

    assert joined([Device(index // 4) for index in range(16)]) == 4
    assert joined([Device(index // 4, slice_index=index // 8) for index in range(16)]) == 8  # two TPU slices
    assert joined([Device(0), Device(0), Device(1)]) == 1
