"""How a step's tokens become rows and micro-batches."""

import dataclasses
import math

import jax
import pytest

from podling.config import Config, ModelConfig, TrainConfig
from podling.cost.step_bytes import bytes_per_parameter, row_bytes
from podling.errors import InputError
from podling.model.spec import param_specs
from podling.train.batch_plan import device_memory_bytes, plan_batch

MODEL = ModelConfig(layers=4, heads=4, embed=128, mlp=512, context=128, vocab_size=1024)
PLENTY = 64 << 30
PARAMS = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_specs(MODEL)))


def config(**train) -> Config:
    """The loss in chunks: with all logits at once, these and not the layers are what takes most."""
    return Config(model=MODEL, train=TrainConfig(**{"batch_tokens": 128 * 48, "loss_chunk": 16, **train}))


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> dict[str, int]:
    return {"data": data, "fsdp": fsdp, "tensor": tensor}


def test_everything_in_one_piece_when_it_fits():
    plan = plan_batch(config(), mesh(4), 4, PLENTY)
    assert (plan.rows, plan.micro_batch, plan.micro_steps, plan.tokens) == (48, 48, 1, 6144)
    assert str(plan) == "6,144 tokens a step: 48 rows of 128, in one piece"


def test_the_micro_batch_that_was_asked_for():
    plan = plan_batch(config(micro_batch=16), mesh(8), 4, PLENTY)
    assert (plan.micro_batch, plan.micro_steps) == (16, 3)
    assert str(plan) == "6,144 tokens a step: 48 rows of 128, 3 micro-batches of 16 rows"


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
@pytest.mark.parametrize("rows_that_fit", [0.5, 1, 2.5, 3, 7, 100])
def test_the_derived_micro_batch_is_the_largest_that_divides_and_fits(ways, rows_that_fit):
    cfg = config()
    memory = int((rows_that_fit * row_bytes(cfg, 4) + 24 * PARAMS) / 0.75) + 8
    plan = plan_batch(cfg, mesh(ways), 4, memory)
    assert plan.micro_batch * plan.micro_steps == 48 and plan.micro_batch % ways == 0
    per_device = [size for size in range(1, 49) if 48 % (size * ways) == 0 and size <= max(rows_that_fit, 1)]
    assert plan.micro_batch == max(per_device) * ways


def test_in_one_piece_there_is_no_second_gradient_to_find_room_for():
    cfg = config()
    assert (bytes_per_parameter(4, accumulates=False), bytes_per_parameter(2, accumulates=True)) == (16, 26)
    enough = int((48 * row_bytes(cfg, 4) + 16 * PARAMS) / 0.75) + 8
    assert plan_batch(cfg, mesh(1), 4, enough).micro_steps == 1
    assert plan_batch(cfg, mesh(1), 4, enough - 64).micro_batch == 24
    # The copy in bfloat16 is always there.
    enough = int((48 * row_bytes(cfg, 2) + 18 * PARAMS) / 0.75) + 8
    assert plan_batch(cfg, mesh(1), 2, enough).micro_steps == 1
    assert plan_batch(cfg, mesh(1), 2, enough - 64).micro_batch == 24


def test_logits_in_one_piece_need_room_of_their_own():
    wide = dataclasses.replace(MODEL, vocab_size=8192)
    chunks, whole = (dataclasses.replace(config(loss_chunk=chunk), model=wide) for chunk in (16, 0))
    params = PARAMS + (8192 - 1024) * 128
    memory = int((48 * row_bytes(chunks, 4) + 16 * params) / 0.75) + 8
    assert plan_batch(chunks, mesh(1), 4, memory).micro_batch == 48
    assert plan_batch(whole, mesh(1), 4, memory).micro_batch == 24


def test_one_row_is_called_a_row():
    plan = plan_batch(config(micro_batch=1), mesh(1), 4, PLENTY)
    assert str(plan).endswith("48 rows of 128, 48 micro-batches of 1 row")
    assert str(plan_batch(config(batch_tokens=128), mesh(1), 4, PLENTY)).endswith("1 row of 128, in one piece")


@pytest.mark.parametrize("sizes", [mesh(fsdp=4), mesh(fsdp=2, tensor=2), mesh(tensor=4)])
def test_a_sharded_state_leaves_room_for_rows(sizes):
    cfg = config()
    # Vectors as long as embed lie on every device; of what is split over fsdp two layers' weights are there whole, and
    # the table with its gradient.
    whole = 2 * 4 * (1024 * 128 + (PARAMS - 1024 * 128) / 4)
    more = 24 * 10_000 + (whole / sizes["tensor"] if sizes["fsdp"] > 1 else 0)
    memory = int((3 * row_bytes(cfg, 4) / sizes["tensor"] + 24 * PARAMS / 4 + more) / 0.75)
    assert plan_batch(cfg, sizes, 4, memory).micro_batch == 3 * sizes["data"] * sizes["fsdp"]
    assert plan_batch(cfg, mesh(4), 4, memory).micro_batch < 3 * 4


def test_one_row_a_device_even_when_nothing_seems_to_fit():
    assert plan_batch(config(), mesh(4), 4, 1).micro_batch == 4


@pytest.mark.parametrize(
    ("train", "ways", "words"),
    [
        ({}, 5, ["--batch-tokens", "6144 tokens are not whole rows of 128 over data x fsdp = 5", "multiple of 640"]),
        ({"batch_tokens": 6145}, 1, ["--batch-tokens", "multiple of 128"]),
        ({"micro_batch": 6}, 4, ["--train.micro-batch", "6 rows at a time", "multiple of 4 that divides 48"]),
        ({"micro_batch": 32}, 4, ["--train.micro-batch", "32 rows at a time"]),  # 48 rows would become 32
        ({"batch_tokens": 128 * 6, "micro_batch": 3}, 4, ["--batch-tokens", "--train.micro-batch"]),
    ],
)
def test_what_does_not_divide_is_refused_and_never_rounded(train, ways, words):
    with pytest.raises(InputError) as error:
        plan_batch(config(**train), mesh(ways), 4, PLENTY)
    for word in words:
        assert word in str(error.value)


def test_memory_is_what_the_runtime_reports():
    class Chip:
        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 17 << 30, "bytes_in_use": 5}

    assert device_memory_bytes([Chip(), Chip()]) == 17 << 30


def test_emulated_devices_share_the_memory_of_the_machine():
    eight, one = device_memory_bytes(jax.devices()), device_memory_bytes(jax.devices()[:1])
    assert one // 8 == eight and 1 << 28 < one < 1 << 45
