"""The cost model on numbers worked by hand."""

import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import adaptive

VERIFY = {1: 10.0, 2: 11.0, 3: 12.0, 5: 20.0}
DRAFT = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


def test_speedups_by_hand():
    found = adaptive.speedups(VERIFY, DRAFT, [0.5, 0.25, 0.2, 0.1])
    assert found == pytest.approx({0: 1.0, 1: 1.5 * 10 / 12, 2: 1.75 * 10 / 14, 4: 2.05 * 10 / 24})  # four rows were not measured


@pytest.mark.parametrize("acceptance, best", [([0.5, 0.25, 0.2, 0.1], 1), ([0.9, 0.8, 0.7, 0.6], 2), ([0.1, 0.0, 0.0, 0.0], 0), ([0.9], 1), ([], 0)])
def test_the_best_length_follows_the_acceptance(acceptance, best):
    assert adaptive.best_num_draft(VERIFY, DRAFT, acceptance) == best


def test_a_slow_verify_pass_favours_short_drafts():
    assert adaptive.best_num_draft({rows: 10.0 for rows in range(1, 6)}, DRAFT, [0.8, 0.7, 0.6, 0.5]) == 4
    assert adaptive.best_num_draft({rows: 10.0 * rows for rows in range(1, 6)}, DRAFT, [0.8, 0.7, 0.6, 0.5]) == 0


def test_the_one_token_step_is_needed():
    with pytest.raises(config_lib.ConfigError, match=r"verify_seconds has \[2\] rows: must have 1"):
        adaptive.best_num_draft({2: 1.0}, DRAFT, [0.5])
