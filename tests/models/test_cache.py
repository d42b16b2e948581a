"""Writes go where the row's length says, and nowhere else."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.models import cache


@pytest.mark.parametrize("width", [1, 2, 3])
def test_write_places_each_row_by_its_own_length(width):
    rng = np.random.default_rng(width)
    slots = rng.normal(size=(4, 2, 7, 6)).astype(np.float32)
    new = rng.normal(size=(4, 2, width, 6)).astype(np.float32)
    start = np.array([0, 3, 7 - width, 2])  # the third row fills the last slot
    expected = slots.copy()
    for row, begin in enumerate(start):
        expected[row, :, begin : begin + width] = new[row]
    np.testing.assert_array_equal(jax.jit(cache.write)(slots, new, jnp.asarray(start)), expected)


def test_write_into_a_cache_of_one_slot():
    np.testing.assert_array_equal(cache.write(jnp.zeros((1, 1, 1, 2)), jnp.ones((1, 1, 1, 2)), jnp.zeros(1, int)), np.ones((1, 1, 1, 2)))


def test_write_keeps_the_cache_dtype():
    written = cache.write(jnp.zeros((1, 2, 4, 6), jnp.bfloat16), jnp.full((1, 2, 2, 6), 1.0 + 2**-12), jnp.ones(1, int))
    assert written.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(written[0, 0, :, 0], np.float32), [0, 1, 1, 0])


def test_empty_has_the_config_shape():
    made = cache.empty(dataclasses.replace(fakes.BACKBONE, dtype="bfloat16"), 3, 11)
    assert made.num_slots == 11 and len(made.keys) == len(made.values) == 4
    assert {(leaf.shape, leaf.dtype.name) for leaf in (*made.keys, *made.values)} == {((3, 2, 11, 6), "bfloat16")}
    np.testing.assert_array_equal(made.lengths, [0, 0, 0])
