"""The memory of a compiled step: on a program written by hand, whose answer is known, and on real ones."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from podling.config import Config, ModelConfig, TrainConfig
from podling.cost.hbm import GAPS, MemoryStats, hbm_of, memory_stats
from podling.cost.liveness import fullest
from podling.cost.records import CATEGORIES
from podling.cost.shares import held_params
from podling.hlo.program import Program, read_program
from podling.parallel.mesh import make_mesh
from podling.train.lowering import lower_step

TEXT = (Path(__file__).parent / "step.hlo").read_text()
KIB = 1024
UP, EMBED, TOKENS = 4 * 128 * 512 * 4, 256 * 128 * 4, 8 * 128 * 4
ARGUMENTS = EMBED + 3 * UP + TOKENS
STACK, STREAM, HIDDEN, LOGITS = 4 * 8 * 128 * 512 * 2, 8 * 128 * 128 * 2, 8 * 128 * 512 * 2, 8 * 128 * 256 * 4


def held(program: Program) -> dict[str, int]:
    """Bytes by name of the instruction that makes each array, at the fullest moment."""
    return {buffer.made_by.name: buffer.device_bytes for buffer in fullest(program).buffers if buffer.device_bytes}


def test_an_array_is_there_from_its_making_to_its_last_reading():
    arguments = {"param_embed": EMBED, "param_up": UP, "mu_up": UP, "nu_up": UP, "tokens": TOKENS}
    # The logits and their gradient, with what the layers keep and the cast weights; the layers' result is copied to
    # memory that does not count, and the weights' gradient is not there yet.
    program = read_program(TEXT)
    assert held(program) == arguments | {"cast": UP // 2, "stack.0": STACK, "logits": LOGITS, "errors": LOGITS}
    # Had the logits been read to the end, they would be there beside the gradient.
    later = TEXT.replace("custom-call(%errors, %kept, %cast)", "custom-call(%errors, %kept, %cast, %logits)")
    assert held(read_program(later)) == held(program) | {"gradient.1": UP}


SMALL = TEXT.replace("8,128,256", "8,8,16")  # logits so small that the loop is the fullest moment
IN_LOOP = {"cast": UP // 2, "stack.0": STACK, "start": STREAM, "hidden": HIDDEN}


def test_a_loop_holds_what_it_carries_once_and_its_own_arrays_beside():
    # The stack, written in place; the stream it carries, the next written over the last; one turn's hidden layer.
    arguments = {"param_embed": EMBED, "param_up": UP, "mu_up": UP, "nu_up": UP, "tokens": TOKENS}
    assert held(read_program(SMALL)) == arguments | IN_LOOP
    # The hidden layer is kept in place because the text shows it, whether the compiler says so or not.
    assert held(read_program(SMALL.replace('{"indices":["0","3"]}', ""))) == arguments | IN_LOOP


def test_what_shares_an_operands_memory_is_not_counted_twice():
    """A result that is neither said to share memory nor seen to be an operand with a piece replaced is a new array."""
    negated = SMALL.replace("  ROOT %pair", "  %new = bf16[8,128,512]{2,1,0} negate(%dot.1)\n  ROOT %pair")
    negated = negated.replace("tuple(%updated, %dot.1)", "tuple(%updated, %new)")
    shared = negated.replace('{"indices":["0","3"]}', '{"indices":["0","3"]},{"indices":["2","4"]}')
    assert held(read_program(negated))["hidden"] == HIDDEN
    assert "hidden" not in held(read_program(shared))  # it lies where the stream was


@pytest.mark.parametrize(
    "update",
    [
        "%kept = STACK dynamic-update-slice(%kept.0, %first, %zero.1, %zero.1, %zero.1, %zero.1)",
        "%pair.1 = (STACK, bf16[8,128,512]{2,1,0}) fusion(%kept.0, %zero.1, %last), kind=kOutput, calls=%fused_hidden\n"
        "  %kept = STACK get-tuple-element(%pair.1), index=0",
    ],
)
def test_a_piece_replaced_is_not_a_new_array(update):
    stack = "bf16[4,8,128,512]{3,2,1,0:T(8,128)(2,1)}"
    line = f"%kept = {stack} get-tuple-element(%layers), index=2"
    assert line in TEXT
    piece = '%first = bf16[1,8,128,512]{3,2,1,0} custom-call(%last), custom_call_target="product"'
    before = f"%kept.0 = {stack} get-tuple-element(%layers), index=2\n  {piece}\n  "
    text = TEXT.replace(line, before + update.replace("STACK", stack))
    assert held(read_program(text)) == held(read_program(TEXT))


def test_an_asynchronous_copy_is_one_array_from_its_start():
    """The result of the `-done` is the one that the `-start` made; its operand is there until then."""
    layout = "bf16[8,128,128]{2,1,0:T(8,128)(2,1)}"
    line = f"  %fast = {layout[:-1]}S(1)}} copy(%last)"
    assert line in TEXT
    begun = f"  %begun = ({layout}, {layout}, u32[]{{:S(2)}}) copy-start(%last)\n  %fast = {layout} copy-done(%begun)"
    text = TEXT.replace(line, begun)
    assert held(read_program(text)) == held(read_program(TEXT)) | {"begun": STREAM}


def test_padding_to_whole_tiles_counts():
    narrow = TEXT.replace("8,128,256", "8,128,200")
    assert held(read_program(narrow))["logits"] == 8 * 128 * 256 * 4


def test_the_categories_add_up_to_the_compilers_total():
    stats = MemoryStats(ARGUMENTS, 3 * UP + EMBED, 3 * UP + EMBED, temp_bytes=11 << 20, code_bytes=7 * KIB)
    found = hbm_of(read_program(TEXT), stats, 16 << 20)
    temporary = 11 * (1 << 20) - UP // 2 - STACK - 2 * LOGITS + TOKENS
    assert found.by_category == {
        "parameters": EMBED + UP + UP // 2,
        "moments": 2 * UP,
        "gradients": 0,
        "activations": STACK,
        "logits": 2 * LOGITS,
        "temporary": temporary,
        "program": 7 * KIB,
    }
    assert found.total_bytes == sum(found.by_category.values()) == stats.total_bytes
    assert (found.fits, found.spare_bytes) == (True, (16 << 20) - stats.total_bytes)
    assert not replace(found, limit_bytes=stats.total_bytes - 1).fits
    names = {tensor.name: (tensor.category, tensor.device_bytes) for tensor in found.largest}
    assert names["mlp: hidden layer, every layer"] == ("activations", STACK)
    assert names["params.blocks.up_kernel, in bf16"] == ("parameters", UP // 2)
    assert names["mu.blocks.up_kernel"] == ("moments", UP)
    assert names["gradient of the logits"] == ("logits", LOGITS)
    assert names[GAPS] == ("temporary", temporary - TOKENS)
    assert [tensor.device_bytes for tensor in found.largest] == sorted((n[1] for n in names.values()), reverse=True)


def test_gradients_and_repeated_names():
    small = TEXT.replace("8,128,256", "8,8,16").replace("[8,128,512]", "[8,128,16]").replace("4,8,128,512", "4,8,8,16")
    found = hbm_of(read_program(small), MemoryStats(0, 0, 0, 0, 0), 1)
    assert found.by_category["gradients"] == UP
    assert "gradient of params.blocks.up_kernel" in {tensor.name for tensor in found.largest}
    again = "  %again = f32[4,128,512]{2,1,0:T(8,128)} negate(%gradient.1), "
    again += 'metadata={op_name="jit(train_step)/transpose(jvp())/neg"}\n'
    twice = small.replace("  %step = (", again + "  %step = (")
    twice = twice.replace("%gradient.1), kind", "%gradient.1, %again), kind")
    twice = twice.replace('["0","4"]', '["0","5"]').replace('["1","5"]', '["1","6"]').replace('["2","6"]', '["2","7"]')
    largest = hbm_of(read_program(twice), MemoryStats(0, 0, 0, 0, 0), 1).largest
    sizes = {tensor.name: tensor.device_bytes for tensor in largest}
    assert sizes["2 x gradient of params.blocks.up_kernel"] == 2 * UP


def test_a_weight_gathered_over_devices_is_a_parameter_and_its_gradient_a_gradient():
    gathered = '  %whole = bf16[256,512]{1,0:T(8,128)(2,1)} custom-call(%param_embed), custom_call_target="gather"\n'
    text = TEXT.replace("num_partitions=1", "num_partitions=4").replace("  %logits = ", gathered + "  %logits = ")
    text = text.replace("custom-call(%fast, %param_embed)", "custom-call(%fast, %param_embed, %whole)")
    text = text.replace("custom-call(%logits, %fast)", "custom-call(%logits, %fast, %whole)")
    found = hbm_of(read_program(text), MemoryStats(0, 0, 0, 0, 0), 1)
    names = {tensor.name: tensor.category for tensor in found.largest}
    assert names["params.token_embed, gathered, in bf16"] == "parameters"
    assert "params.token_embed, gathered, in bf16" not in {
        tensor.name
        for tensor in hbm_of(
            read_program(text.replace("partitions=4", "partitions=3")), MemoryStats(0, 0, 0, 0, 0), 1
        ).largest
    }


def test_with_layers_apart_what_the_backward_pass_reads_is_kept_for_it():
    config = Config(
        model=ModelConfig(layers=3, heads=2, embed=64, mlp=192, context=48, vocab_size=500),
        train=TrainConfig(batch_tokens=48 * 7, micro_batch=7, remat="none", loss_chunk=16, layer_loop="unroll"),
    )
    mesh = make_mesh("data=1", jax.devices()[:1])
    with jax.set_mesh(mesh):
        compiled = lower_step(config, mesh, jnp.float32, 7, 1).compile()
    found = hbm_of(read_program(compiled.as_text()), memory_stats(compiled), 1 << 40)
    scores, hidden = 3 * 7 * 2 * 48 * 48 * 4, 3 * 7 * 48 * 192 * 4
    assert scores + hidden < found.by_category["activations"] < 0.7 * found.total_bytes


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_on_a_real_step_of_this_machine(remat):
    config = Config(  # sizes all different, so that no shape is mistaken for another
        model=ModelConfig(layers=3, heads=2, embed=64, mlp=192, context=48, vocab_size=500),
        train=TrainConfig(batch_tokens=48 * 14, micro_batch=7, remat=remat, loss_chunk=16, layer_loop="scan"),
    )
    mesh = make_mesh("data=1", jax.devices()[:1])
    with jax.set_mesh(mesh):
        compiled = lower_step(config, mesh, jnp.float32, 7, 2).compile()
    stats, program = memory_stats(compiled), read_program(compiled.as_text())
    found = hbm_of(program, stats, 1 << 40)
    assert set(found.by_category) == set(CATEGORIES) and sum(found.by_category.values()) == stats.total_bytes
    assert min(found.by_category.values()) >= 0
    weights = 4 * held_params(config.model)
    assert found.by_category["moments"] == 2 * weights
    assert weights <= found.by_category["parameters"] < 1.5 * weights
    assert 2 * weights <= found.by_category["gradients"] < 4 * weights  # the sum, and a micro-batch's
    tokens = 7 * 48
    scores = 3 * 7 * 2 * 48 * 48 * 4
    kept = {"none": scores, "dots": 3 * tokens * (5 * 64 + 192) * 4}[remat]
    assert found.by_category["activations"] >= kept
    if remat == "dots":
        assert found.by_category["activations"] < 1.35 * kept
    # The CPU compiler orders the program anew when it lays out memory, so its text holds somewhat more.
    live = sum(buffer.device_bytes for buffer in fullest(program).buffers)
    assert 0.9 * stats.total_bytes < live < 1.4 * stats.total_bytes
