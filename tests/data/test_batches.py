"""Batches are a pure function of seed and step, and an epoch sees every window once."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podling.data.batches import Batches, heldout_windows
from podling.data.shards import Prepared, TokenArray
from podling.errors import InputError


class Counted:
    """Prepared data whose token at place i is i: a window's content tells where it was taken from."""

    path = "counted"

    class tokenizer:
        eot_id = 0

        @staticmethod
        def token_bytes():
            return [1] * 100_000

    def __init__(self, train, heldout=50):
        self.sizes = {"train": train, "heldout": heldout}

    def tokens(self, split):
        whole = np.arange(self.sizes[split], dtype=np.uint32)
        return TokenArray(np.array_split(whole, 3))

    def document_at(self, split, place):
        return f"document {place // 1000}"


@settings(max_examples=25)
@given(
    tokens=st.integers(9, 400),
    rows=st.integers(1, 5),
    micro_steps=st.integers(1, 3),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 2),
)
def test_rows_are_a_permutation_of_the_windows_in_every_epoch(tokens, rows, micro_steps, seed, epoch):
    batches = Batches(Counted(tokens), context=8, rows=rows, micro_steps=micro_steps, seed=seed)
    size = rows * micro_steps
    first, last = epoch * batches.windows, (epoch + 1) * batches.windows
    starts = [
        int(s) for step in range(first // size, -(-last // size)) for s in batches.batch(step).inputs[..., 0].ravel()
    ]
    starts = starts[first % size : first % size + batches.windows]
    wanted = [*range(0, tokens - 1 - 8, 8), tokens - 1 - 8]
    assert sorted(starts) == wanted


def test_rows_are_windows_with_the_next_tokens_as_targets():
    batch = Batches(Counted(5000), context=16, rows=3, micro_steps=2, seed=1).batch(7)
    assert batch.inputs.shape == batch.targets.shape == batch.weights.shape == (2, 3, 16)
    assert (batch.inputs.dtype, batch.targets.dtype, batch.weights.dtype) == (np.int32, np.int32, np.float32)
    assert (np.diff(batch.inputs, axis=-1) == 1).all()
    assert (batch.targets == batch.inputs + 1).all() and (batch.weights == 1).all()


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed, epoch):
        batches = Batches(Counted(8 * 64 + 1), context=8, rows=64, micro_steps=1, seed=seed)
        return batches.starts(epoch).tolist()

    orders = [order(0, 0), order(0, 1), order(1, 0), sorted(order(0, 0))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert order(0, 1) == order(0, 1)


def test_a_batch_does_not_depend_on_what_was_asked_before():
    make = lambda: Batches(Counted(3000), context=8, rows=4, micro_steps=2, seed=5)  # noqa: E731
    used = make()
    for step in (3, 900, 2):
        used.batch(step)
    assert (used.batch(41).inputs == make().batch(41).inputs).all()


def test_rows_and_accumulation_share_one_order():
    """The same batch size in more, smaller pieces is the same batch: accumulation changes nothing."""
    whole = Batches(Counted(3000), context=8, rows=6, micro_steps=1, seed=5).batch(9)
    parts = Batches(Counted(3000), context=8, rows=2, micro_steps=3, seed=5).batch(9)
    assert (whole.inputs.reshape(6, 8) == parts.inputs.reshape(6, 8)).all()


@pytest.mark.parametrize("mine", [[0, 1], [2, 3, 5], [4]])
def test_a_process_reads_its_rows_and_no_others(mine):
    """What it holds are those rows of the whole batch; the others are never taken from the disk."""
    whole = Batches(Counted(3000), context=8, rows=6, micro_steps=2, seed=5).batch(9)
    batches = Batches(Counted(3000), context=8, rows=6, micro_steps=2, seed=5, mine=mine)
    taken, tokens = [], batches._tokens

    class Watched:
        def __len__(self):
            return len(tokens)

        def __getitem__(self, place):
            taken.append(place.start)
            return tokens[place]

    batches._tokens = Watched()
    part = batches.batch(9)
    for name in ("inputs", "targets", "weights"):
        assert (getattr(part, name) == getattr(whole, name)[:, mine]).all()
    assert sorted(taken) == sorted(batches.starts(9).reshape(2, 6)[:, mine].ravel())
    assert (batches.whole(9).inputs == whole.inputs).all()


def test_the_digest_is_of_the_batch_and_not_of_how_it_is_cut():
    make = lambda tokens=3000, **cut: Batches(Counted(tokens), context=8, seed=5, **cut)  # noqa: E731
    digest = make(rows=6, micro_steps=1).digest(9)
    assert digest == make(rows=2, micro_steps=3).digest(9) == make(rows=6, micro_steps=1, mine=[3]).digest(9)
    assert len({digest, make(rows=6, micro_steps=1).digest(10), make(2500, rows=6, micro_steps=1).digest(10)}) == 3


def test_the_overlap_of_the_last_window_is_stated():
    assert Batches(Counted(8 * 10 + 1), context=8, rows=1, micro_steps=1, seed=0).note == ""
    batches = Batches(Counted(8 * 10 + 4), context=8, rows=2, micro_steps=1, seed=0)
    assert batches.note == "the last of 11 windows overlaps the one before it by 5 tokens"
    assert batches.steps_per_epoch == 5.5


def test_text_shorter_than_one_context():
    with pytest.raises(InputError, match="training text has 8 tokens, fewer than one context of 8 and the token after"):
        Batches(Counted(8), context=8, rows=1, micro_steps=1, seed=0)
    assert Batches(Counted(9), context=8, rows=1, micro_steps=1, seed=0).windows == 1
    with pytest.raises(InputError, match="held-out text has 1 tokens"):
        heldout_windows(Counted(100, heldout=1), 8, 0)


def test_documents_of_a_step():
    batches = Batches(Counted(5000), context=10, rows=50, micro_steps=1, seed=0)
    wanted = dict.fromkeys(f"document {start // 1000}" for start in batches.starts(0))
    assert batches.documents(0) == list(wanted) and len(wanted) > 2


def test_the_iterator_gives_the_steps_in_order_and_stops_its_thread():
    batches = Batches(Counted(3000), context=8, rows=4, micro_steps=1, seed=5)
    iterator = batches.iterate(17)
    for step in range(17, 40):
        assert (next(iterator).inputs == batches.batch(step).inputs).all()
    iterator.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "podling-batches"]


def test_the_iterator_works_ahead():
    batches = Batches(Counted(3000), context=8, rows=4, micro_steps=1, seed=5)
    made = []
    plain, batches.batch = batches.batch, lambda step: made.append(step) or plain(step)
    iterator = batches.iterate(0)
    next(iterator)
    deadline = time.monotonic() + 10
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(made) >= 5
    iterator.close()


def test_an_error_in_the_thread_reaches_the_caller():
    batches = Batches(Counted(3000), context=8, rows=4, micro_steps=1, seed=5)
    plain = batches.batch

    def fail(step):
        if step == 2:
            raise OSError("disk gone")
        return plain(step)

    batches.batch = fail
    iterator = batches.iterate(0)
    next(iterator), next(iterator)
    with pytest.raises(OSError, match="disk gone"):
        next(iterator)


@given(tokens=st.integers(2, 300), context=st.integers(1, 20), most=st.integers(0, 350))
def test_held_out_targets_are_scored_once(tokens, context, most):
    windows = heldout_windows(Counted(9, heldout=tokens), context, most)
    scored = windows.targets[windows.weights > 0]
    assert len(set(scored.tolist())) == scored.size == windows.bytes
    assert (windows.targets - windows.inputs)[windows.weights > 0].tolist() == [1] * scored.size
    assert set(np.unique(windows.weights)) <= {0.0, 1.0}
    if most == 0 or most >= tokens + context:
        assert scored.tolist() == list(range(1, tokens))
    if most >= context:
        assert scored.size <= most


def test_a_capped_evaluation_is_spread_evenly():
    windows = heldout_windows(Counted(9, heldout=1001), 10, 200)
    assert windows.inputs.shape == (20, 10)
    assert windows.inputs[:, 0].tolist() == list(range(0, 1000, 50))


def test_bytes_are_those_of_the_scored_targets(prepared_folder):
    prepared = Prepared.open(prepared_folder)
    windows = heldout_windows(prepared, 32, 0)
    first = prepared.tokenizer.token_bytes()[prepared.tokens("heldout")[0]]
    assert windows.bytes == prepared.bytes("heldout") - first


def test_a_batch_of_real_data_is_text(prepared_folder):
    prepared = Prepared.open(prepared_folder)
    batches = Batches(prepared, context=64, rows=2, micro_steps=1, seed=0)
    start = int(batches.starts(3)[1])
    text = prepared.tokenizer.decode(prepared.tokens("train")[start : start + 64])
    assert prepared.tokenizer.decode(batches.batch(3).inputs[0, 1]) == text
