"""The accept rule and the cut, on rows typed by hand, under jit."""

import jax
import numpy as np
import pytest

from mtp_jax.decoding import verify

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
