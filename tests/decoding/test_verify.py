"""The accept rules and the cut, on rows typed by hand and against numpy, under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import sampling, verify

matching = jax.jit(verify.matching)


@jax.jit
def ends_at(targets, stops):
    return (targets[..., None] == stops).any(axis=-1)


def cut(targets, accepted, remaining, stops):
    return jax.jit(verify.cut)(ends_at(targets, np.array(stops, int)), accepted, remaining)


def test_matching_counts_the_leading_matches():
    drafts = np.array([[7, 8, 9], [7, 8, 9], [7, 8, 9], [7, 8, 9], [7, 8, 9]])
    targets = np.array([[7, 8, 9, 1], [7, 8, 5, 3], [7, 5, 9, 3], [5, 8, 9, 3], [8, 9, 1, 7]])
    assert matching(drafts, targets).tolist() == [3, 2, 1, 0, 0]


def test_matching_without_drafts_is_zero():
    assert matching(np.zeros((2, 0), int), np.array([[4], [5]])).tolist() == [0, 0]


def rejection_by_numpy(drafts, q, logits, positions, keys):
    """Speculative sampling in float64, one row and one draft at a time; random numbers by the keys that sampling.py describes."""
    accepted, committed = [], []
    for row, key in enumerate(keys):
        tokens = []
        for place, position in enumerate(positions[row]):
            draft = drafts[row, place] if place < drafts.shape[1] else -1
            p = np.exp(logits[row, place].astype(np.float64))
            p /= p.sum()
            if draft >= 0:
                proposed = np.eye(len(p))[draft] if q is None else q[row, place].astype(np.float64)
                uniform = float(jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, sampling.ACCEPT), position)))
                if uniform < min(1, p[draft] / proposed[draft]):
                    tokens.append(int(draft))
                    continue
                p = np.maximum(p - proposed, 0)
                p /= p.sum()
            with np.errstate(divide="ignore"):
                tokens.append(int(jax.random.categorical(jax.random.fold_in(key, position), jnp.asarray(np.log(p), jnp.float32))))
            break
        accepted.append(len(tokens) - 1)
        committed.append(tokens)
    return accepted, committed


@pytest.mark.parametrize("with_probs", [True, False])
def test_rejection_against_numpy(with_probs):
    """Random rows, some of them filtered and some without a draft."""
    rng = np.random.default_rng(0)
    rows, num_draft, vocab = 120, 3, 7
    logits = rng.normal(size=(rows, num_draft + 1, vocab)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[..., 0] = 1.0  # something is left
    q = rng.dirichlet(np.ones(vocab), (rows, num_draft)).astype(np.float32) if with_probs else None
    drafts = rng.integers(0, vocab, (rows, num_draft)) if q is None else np.array([[rng.choice(vocab, p=one / one.sum()) for one in row] for row in q])
    drafts[rng.random(drafts.shape) < 0.1] = -1
    positions = rng.integers(1, 900, (rows, 1)) + np.arange(num_draft + 1)
    keys = sampling.row_keys(3, range(rows))
    accepted, targets = jax.jit(verify.rejection)(drafts, q, logits, positions, keys)
    expected, committed = rejection_by_numpy(drafts, q, logits, positions, keys)
    assert accepted.tolist() == expected
    assert [row[: count + 1] for row, count in zip(targets.tolist(), expected, strict=True)] == committed
    assert set(expected) == {0, 1, 2, 3}


def judged(drafts, q, p, rows=200):
    """Drafts kept and tokens committed of one drafted position, in rows that differ by their keys alone."""
    logits = jnp.log(jnp.broadcast_to(jnp.asarray([p, [0.0, 0.0, 1.0]], jnp.float32), (rows, 2, 3)))
    probs = None if q is None else jnp.broadcast_to(jnp.asarray(q, jnp.float32), (rows, 1, 3))
    accepted, targets = jax.jit(verify.rejection)(
        jnp.full((rows, 1), drafts), probs, logits, jnp.tile(jnp.arange(2), (rows, 1)), sampling.row_keys(0, range(rows))
    )
    return set(accepted.tolist()), set(map(tuple, targets.tolist()))


@pytest.mark.parametrize(
    "draft, q, p, accepted, first",
    [
        (1, [0.2, 0.5, 0.3], [0.2, 0.5, 0.3], {1}, {1}),  # equal: always kept, though nothing is left to recover from
        (1, [0.1, 0.3, 0.6], [0.1, 0.5, 0.4], {1}, {1}),  # more probable than drafted: always kept
        (1, [0.0, 1.0, 0.0], [0.5, 0.0, 0.5], {0}, {0, 2}),  # impossible: never kept
        (1, [0.0, 0.5, 0.5], [0.3, 0.2, 0.5], {0, 1}, {0, 1}),  # recovered only where p exceeds q
        (1, None, [0.0, 1.0, 0.0], {1}, {1}),
        (1, None, [0.5, 0.0, 0.5], {0}, {0, 2}),
        (1, None, [0.3, 0.7, 0.0], {0, 1}, {0, 1}),  # never the rejected draft, never what the filters took away
        (-1, None, [0.3, 0.7, 0.0], {0}, {0, 1}),  # no draft: the backbone's own
        (-1, [0.0, 0.0, 1.0], [0.3, 0.7, 0.0], {0}, {0, 1}),
    ],
)
def test_rejection_by_hand(draft, q, p, accepted, first):
    kept, targets = judged(draft, q, p)
    assert kept == accepted and {row[0] for row in targets} == first
    assert {row[1] for row in targets} == {2}, "the bonus"


def test_without_drafts_rejection_is_vanilla_sampling():
    """The same keys: every token is that of `sampling.choose`."""
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(50, 3, 9)), jnp.float32)
    positions, keys = jnp.tile(jnp.arange(3), (50, 1)), sampling.row_keys(0, range(50))
    vanilla = sampling.choose(logits, positions, keys, config_lib.DecodeConfig(temperature=1.0))
    accepted, targets = verify.rejection(jnp.full((50, 2), -1), None, logits, positions, keys)
    assert not accepted.any() and targets.tolist() == vanilla.tolist()
    accepted, targets = verify.rejection(jnp.zeros((50, 0), int), None, logits[:, :1], positions[:, :1], keys)
    assert not accepted.any() and targets.tolist() == vanilla[:, :1].tolist()


@pytest.mark.parametrize(
    "stops, expected, stopped",
    [
        ((), [4, 3, 1, 2], [False, False, False, False]),
        ((5,), [4, 2, 1, 2], [False, True, False, False]),  # row 1: a stop token inside the block; row 2: one beyond what was accepted
        ((5, 9), [1, 2, 1, 1], [True, True, False, True]),
        ((6,), [4, 3, 1, 2], [False, True, False, True]),  # as the last committed token, and as the last of the budget
    ],
)
def test_cut_by_hand(stops, expected, stopped):
    targets = np.array([[9, 1, 2, 3], [1, 5, 6, 2], [4, 5, 5, 5], [9, 6, 1, 1]])
    accepted = np.array([3, 2, 0, 3])
    remaining = np.array([9, 9, 9, 2])
    committed, ended = cut(targets, accepted, remaining, stops)
    assert (committed.tolist(), ended.tolist()) == (expected, stopped)


def test_a_stop_token_behind_the_budget_does_not_stop():
    committed, ended = cut(np.array([[1, 2, 5, 3]]), np.array([3]), np.array([2]), (5,))
    assert (committed.tolist(), ended.tolist()) == ([2], [False])
