"""The input pipeline: every batch by its step, the same from any start, on any thread, and after its state is restored."""

import threading

import numpy as np
import pytest
from test_data import example, many

from mtp_jax.config import TrainConfig
from mtp_jax.training import data, pipeline

CONFIG = TrainConfig(steps=12, batch_size=4, max_length=64, num_draft=2, rows_per_sequence=8, seed=3)
FIELDS = ("tokens", "lengths", "answer", "rows", "row_mask", "index")


def same(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


@pytest.fixture(scope="module")
def examples():
    return many(19)


@pytest.fixture(scope="module")
def by_step(examples):
    return [data.batch_at(examples, CONFIG, step) for step in range(CONFIG.steps)]


@pytest.mark.parametrize("start", [0, 5, 11, 12])
def test_batches_from_any_start_in_order(examples, by_step, start):
    found = list(pipeline.batches(examples, CONFIG, start))
    assert len(found) == CONFIG.steps - start
    assert all(features is None and same(batch, want) for (batch, features), want in zip(found, by_step[start:], strict=True))


def test_random_access(examples, by_step):
    dataset = pipeline.dataset(examples, CONFIG, 2)
    for place in (9, 0, 4, 0):
        assert same(dataset[place][0], by_step[2 + place])


def test_a_restored_state_goes_on_as_a_start_there_would(examples, by_step):
    iterator = pipeline.batches(examples, CONFIG, 1)
    for _ in range(4):
        next(iterator)
    state = iterator.get_state()
    other = pipeline.batches(examples, CONFIG, 1)
    next(other)
    other.set_state(state)
    for restored, started, want in zip(other, pipeline.batches(examples, CONFIG, 5), by_step[5:], strict=True):
        assert same(restored[0], want) and same(started[0], want)


def test_features_are_read_ahead_by_other_threads(examples, by_step):
    """`read` has been called for later batches before the first is asked for again, not by this thread, and each result is beside its batch."""
    ahead, threads, calls = threading.Event(), set(), []

    def read(batch):
        threads.add(threading.get_ident())
        calls.append(batch.index)
        if len(calls) > 1:
            ahead.set()
        return batch.index.copy()

    iterator = pipeline.batches(examples, CONFIG, read=read)
    batch, features = next(iterator)
    assert ahead.wait(timeout=20) and threading.get_ident() not in threads
    assert same(batch, by_step[0]) and np.array_equal(features, by_step[0].index)
    for (batch, features), want in zip(iterator, by_step[1:], strict=True):
        assert same(batch, want) and np.array_equal(features, want.index)


def test_an_error_in_a_thread_reaches_the_caller(examples):
    def read(batch):
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        next(pipeline.batches(examples, CONFIG, read=read))


def test_examples_that_cannot_be_used_are_named_at_once(examples):
    with pytest.raises(data.DataError, match="sequence 19: its answer mask is empty"):
        pipeline.batches([*examples, example([1, 2, 3], 3)], CONFIG)
