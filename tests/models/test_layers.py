"""Building blocks against numpy, masks as literal grids, and the two layouts of a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from mtp_jax.models import layers

RNG = np.random.default_rng(0)


def grid(last_slot, num_slots, query_position, window):
    return np.asarray(layers.visible(jnp.asarray([last_slot]), num_slots, jnp.asarray([query_position]), window))[0].astype(int).tolist()


def test_visible_full_is_causal():
    assert grid([0, 1, 2, 3], 5, [0, 1, 2, 3], None) == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
    ]


def test_visible_window_counts_the_query_itself():
    assert grid([0, 1, 2, 3, 4], 6, [0, 1, 2, 3, 4], 3) == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
    ]


def test_visible_of_a_draft_query_loses_a_slot_to_the_pending_token():
    assert grid([1, 2, 4], 6, [2, 3, 5], 3) == [
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0],
    ]
    assert grid([4], 6, [5], 1) == [[0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("theta", [100.0, 10_000.0])
def test_rotate_is_rotate_half(theta):
    x = RNG.normal(size=(2, 3, 4, 6)).astype(np.float32)
    positions = np.array([[0, 1, 7], [3, 250, 2]])
    actual = layers.rotate(jnp.asarray(x), jnp.asarray(positions), theta)
    expected = np.stack([[reference.rope(x[b, t], positions[b, t], theta) for t in range(3)] for b in range(2)])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_rms_norm_and_mlp():
    x = RNG.normal(size=(2, 3, 8)).astype(np.float32) * 5
    scale = RNG.normal(size=8).astype(np.float32)
    actual = layers.RMSNorm(0.1).apply({"params": {"scale": scale}}, x)
    np.testing.assert_allclose(actual, reference.rms_norm(x, scale, 0.1), rtol=1e-5, atol=1e-6)
    mlp = layers.GatedMLP(8, 12)
    params = {name: {"kernel": RNG.normal(size=shape).astype(np.float32)} for name, shape in {"gate": (8, 12), "up": (8, 12), "down": (12, 8)}.items()}
    np.testing.assert_allclose(mlp.apply({"params": params}, x), reference.gated_mlp(x, params), rtol=1e-4, atol=1e-4)


def test_attend_reads_the_right_key_head_and_no_hidden_slot():
    q = RNG.normal(size=(2, 3, 4, 6)).astype(np.float32)
    k, v = RNG.normal(size=(2, 2, 2, 7, 6)).astype(np.float32)
    mask = np.zeros((2, 3, 7), bool)
    spans = [[range(0, 1), range(0, 4), range(2, 7)], [range(1, 3), range(5, 6), range(0, 0)]]
    for b in range(2):
        for t in range(3):
            mask[b, t, list(spans[b][t])] = True
    expected = np.stack([[reference.attend(q[b, t], k[b], v[b], spans[b][t]) for t in range(3)] for b in range(2)])
    actual = layers.attend(*map(jnp.asarray, (q, k, v, mask)))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert (np.asarray(actual)[1, 2] == 0).all()  # sees nothing
    k[~mask[:, 0][:, None].repeat(2, 1)] = 1e30
    v[~mask[:, 0][:, None].repeat(2, 1)] = -1e30
    again = layers.attend(*map(jnp.asarray, (q, k, v, mask)))
    np.testing.assert_array_equal(np.asarray(again)[:, 0], np.asarray(actual)[:, 0])


@pytest.mark.parametrize(
    "shape, width, pieces",
    [
        ((20, 48), 16, 1),
        ((600, 640), 16, 10),
        ((600, 592), 16, 13),
        ((10, 11 * layers.PIECE_COLUMNS), 16, 11),
        ((600, 640), 64, 10),
        ((600, 608), 64, 19),
        ((20, 24), 64, 0),
    ],
)
def test_column_blocks_hold_the_same_kernel(shape, width, pieces):
    """A small kernel stays whole, a larger one is cut, evenly where it can be; narrower blocks take over where wide ones do not fit."""
    kernel = RNG.normal(size=shape).astype(np.float32)
    blocked = layers.block_kernel(jnp.asarray(kernel), width)
    assert (len(blocked) if isinstance(blocked, tuple) else 0) == pieces
    for rows in ((2, 3), (1, 1)):
        x = RNG.normal(size=(*rows, shape[0])).astype(np.float32)
        np.testing.assert_allclose(layers.matmul(jnp.asarray(x), blocked), x @ kernel, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a property of XLA's CPU backend")
@pytest.mark.parametrize("width", sorted({layers.NARROWEST_BLOCK, layers.COLUMN_BLOCK}))
@pytest.mark.parametrize("shape, counts", [((96, 128), (1, 2, 3, 4, 5, 7, 9, 16, 33, 48)), ((600, 640), (1, 2, 5)), ((600, 592), (1, 3))])
def test_rows_in_column_blocks_are_bit_identical_whatever_their_number(shape, counts, width):
    blocked = layers.block_kernel(jnp.asarray(RNG.normal(size=shape).astype(np.float32)), width)
    x = RNG.normal(size=(layers.COLUMN_BLOCK_ROWS, shape[0])).astype(np.float32)
    matmul = jax.jit(layers.matmul)
    whole = np.asarray(matmul(x, blocked))
    for count in (count for count in counts if count <= len(x)):
        np.testing.assert_array_equal(matmul(x[:count], blocked), whole[:count], err_msg=f"{count} rows")
        np.testing.assert_array_equal(matmul(x[-count:], blocked), whole[-count:], err_msg=f"last {count} rows")


def test_to_column_blocks_joins_kernels_of_one_input():
    tree = {"attn": {name: {"kernel": np.full((4, 16), value, np.float32)} for value, name in enumerate("qkv")}, "norm": {"scale": np.ones(4)}}
    blocked = layers.to_column_blocks(tree)
    assert set(blocked["attn"]) == {"qkv"} and blocked["norm"]["scale"].shape == (4,)
    np.testing.assert_array_equal(layers.matmul(jnp.ones((1, 4)), blocked["attn"]["qkv"]["kernel"])[0], np.repeat([0.0, 4.0, 8.0], 16))
