"""The acceptance that training reports is the one that decoding has."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate
from mtp_jax.models import head as head_lib
from mtp_jax.training import fit, walk


def walked(correct_rows, length, answer_from, num_draft, rows=None):
    """`correct_rows`: row -> number of leading drafts that are right; all other rows are right to the end, which no step may use."""
    rows = np.arange(length - 2) if rows is None else np.asarray(rows)
    correct = np.ones((num_draft, len(rows)), bool)
    for place, row in enumerate(rows):
        if row in correct_rows:
            correct[:, place] = np.arange(num_draft) < correct_rows[row]
    return walk.walk(correct, rows, np.arange(length) >= answer_from)


def test_walk_by_hand():
    """Answer x_4..x_8, M = 2: row 3 commits x_5 x_6 x_7; row 6 has x_8 alone to draft."""
    assert walked({3: 2, 6: 1}, 9, 4, 2) == walk.Acceptance(2, 4, [2, 1])


def test_a_rejection_makes_a_short_step():
    """Row 3 keeps none (x_5), row 4 one (x_6 x_7), row 6 none (x_8)."""
    assert walked({3: 0, 4: 1, 6: 0}, 9, 4, 2) == walk.Acceptance(3, 4, [1, 0])


def test_what_is_right_behind_a_wrong_draft_does_not_count():
    correct = np.ones((3, 8), bool)
    correct[0, 3] = False
    found = walk.walk(correct, np.arange(8), np.arange(10) >= 4)
    assert found == walk.Acceptance(2, 5, [1, 1, 1])  # row 3 commits x_5 alone; row 4 the rest, x_6..x_9


def test_the_end_cuts_a_step():
    """Three right drafts, two tokens left: two drafts are kept and emitted, no bonus."""
    assert walked({3: 3}, 7, 4, 3) == walk.Acceptance(1, 2, [1, 1, 0])


def test_a_last_token_without_a_row_is_a_step_without_drafts():
    """x_4 x_5 x_6 with row 3 wrong: x_5; row 4 exists and drafts x_6; an answer of one token takes no step at all."""
    assert walked({3: 0, 4: 0}, 7, 4, 2) == walk.Acceptance(2, 2, [0, 0])
    assert walked({}, 5, 4, 2) == walk.Acceptance(0, 0, [0, 0])
    assert walked({3: 0}, 6, 4, 2, rows=[0, 1, 2]) == walk.Acceptance(1, 1, [0, 0])


def test_each_of_several_answers_is_walked():
    """Answers x_2..x_4 and x_8 x_9: rows 1 (one right: x_3 x_4) and 7 (x_9); what lies between them is never written."""
    answer = np.isin(np.arange(12), (2, 3, 4, 8, 9))
    correct = np.zeros((2, 10), bool)
    correct[0, 1] = True
    assert walk.walk(correct, np.arange(10), answer) == walk.Acceptance(2, 3, [1, 0])


def test_padding_is_not_row_0():
    correct = np.array([[True, True, False], [True, False, False]])
    assert walk.walk(correct, np.array([0, 1, 0]), np.arange(5) >= 1) == walk.Acceptance(1, 3, [1, 1])


def test_rates_by_hand():
    counts = walk.Acceptance(4, 10, [3, 2, 1])
    assert counts.tokens_per_step == 2.5
    assert counts.unconditional == [0.75, 0.5, 0.25]
    np.testing.assert_allclose(counts.conditional, [3 / 4, 2 / 3, 1 / 2], rtol=1e-12)
    assert walk.Acceptance(0, 0, [0]).as_dict() == {"steps": 0, "tokens_per_step": 0.0, "accept_unconditional": [0.0], "accept_conditional": [0.0]}


@pytest.mark.parametrize("which", ["trained", "random"])
def test_walk_counts_what_the_decoder_counts(request, backbone, answers, training, which):
    """On the backbone's own answers: the same steps, tokens and accepted drafts, exactly, in sum and answer by answer.

    Public trainers of such heads have reported an accept length of 3.5 in training and 1.1 when decoding; this is the test against it.
    """
    loaded = request.getfixturevalue("trained")[1] if which == "trained" else request.getfixturevalue("head")
    module = head_lib.Head(loaded.config, backbone.config)
    frozen = fit.make_frozen(backbone, loaded.draft_ids)
    counted = walk.measure(module, loaded.params, frozen, backbone, answers, training)

    prompts = [example.tokens[~example.answer].tolist() for example in answers]
    runtime = generate.make_runtime(backbone, loaded)
    outputs = generate.run(runtime, prompts, config_lib.DecodeConfig(max_new_tokens=30, num_draft=3, stop_tokens=(16,))).outputs
    for example, output in zip(answers, outputs, strict=True):
        assert output.tokens == example.tokens[example.answer].tolist()
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    assert counted.steps == sum(output.steps for output in outputs)
    assert counted.tokens == sum(len(output.tokens) - 1 for output in outputs)
    assert counted.accepted == np.sum([output.accepted for output in outputs], axis=0).tolist()
    if which == "trained":
        assert all(0 < count < counted.steps for count in counted.accepted)  # not vacuous: every position is kept and rejected somewhere
        few = [answers[i] for i in (0, 1, 2)]
        one_by_one = walk.measure(module, loaded.params, frozen, backbone, few, dataclasses.replace(training, batch_size=2))
        assert one_by_one.accepted == np.sum([output.accepted for output in outputs[:3]], axis=0).tolist()
        assert one_by_one.steps == sum(output.steps for output in outputs[:3])
    assert jnp.asarray(counted.accepted).shape == (3,)
