"""A trace too many is counted, and what caused it is named."""

import jax
import jax.numpy as jnp

from podling.train.retrace import TraceCounter


def test_one_trace_for_many_calls():
    counter = TraceCounter(lambda x, y: x + y)
    step = jax.jit(counter)
    assert counter.retraces == 0
    for value in range(3):
        assert step(jnp.float32(value), jnp.float32(1)) == value + 1
    assert counter.retraces == 0 and counter.last_change() == ""


def test_the_changed_argument_is_named_with_both_types():
    counter = TraceCounter(lambda x, options: x * options["scale"])
    step = jax.jit(counter)
    step(jnp.ones((2, 3)), {"scale": jnp.float32(2)})
    step(jnp.ones((2, 4)), {"scale": jnp.float32(2)})
    assert counter.retraces == 1
    assert counter.last_change() == "[0]: float32[2,3] -> float32[2,4]"
    step(jnp.ones((2, 4)), {"scale": jnp.int32(2)})
    assert counter.last_change() == "[1]['scale']: float32[] -> int32[]"


def test_a_weak_type_is_visible():
    """A Python number where an array used to be: the commonest cause, and no difference in shape or dtype."""
    counter = TraceCounter(lambda x: x + 1)
    step = jax.jit(counter)
    step(jnp.float32(1))
    step(1.0)
    assert counter.retraces == 1 and counter.last_change() == "[0]: float32[] -> ~float32[]"


def test_an_argument_that_appears_is_named():
    counter = TraceCounter(lambda x: jax.tree.leaves(x)[0])
    step = jax.jit(counter)
    step({"a": jnp.float32(1)})
    step({"a": jnp.float32(1), "b": jnp.float32(1)})
    assert counter.last_change() == "[0]['b']: absent -> float32[]"
