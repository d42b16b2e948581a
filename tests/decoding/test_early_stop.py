"""Drafts that end early: the same text, from fewer drafts."""

import dataclasses

import fakes
import numpy as np

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, loop

CONFIG = config_lib.DecodeConfig(max_new_tokens=24, num_draft=4)
PROMPTS = fakes.prompts(3, 9, 5)


def proposals(runtime, rows, **changes):
    """The head's proposals in the state after the prefill, and the confidence of each draft."""
    rules = dataclasses.replace(CONFIG, **changes)
    job = generate.make_job(runtime, rows, rules)
    state = job.prefill()
    return np.asarray(loop.propose_alone(runtime.drafter, runtime.step_params, runtime.drafter_params, state, job.request, config=job.rules)[0].tokens)


def test_no_more_is_proposed_once_the_product_has_fallen(runtime):
    whole = proposals(runtime, PROMPTS)
    assert (whole >= 0).all()
    counts = []
    for least in (1e-6, 0.1, 1.0):
        cut = proposals(runtime, PROMPTS, min_confidence=least)
        count = (cut >= 0).sum(axis=1)
        counts.append(count)
        kept = np.arange(4) < count[:, None]
        np.testing.assert_array_equal(cut, np.where(kept, whole, -1))
    assert (np.diff(counts, axis=0) <= 0).all()
    assert (counts[0] == 4).all() and (counts[-1] == 1).all()  # the first is always proposed
    assert len(np.unique(counts)) > 2, "thresholds that cut nothing in between prove little"


def test_text_is_the_same(runtime):
    expected = generate.run(runtime.without_drafter(), PROMPTS, CONFIG).outputs
    found = generate.run(runtime, PROMPTS, dataclasses.replace(CONFIG, min_confidence=0.1)).outputs
    assert [output.tokens for output in found] == [output.tokens for output in expected]
    assert all(output.drafted < 4 * output.steps for output in found)


def test_sampled_drafts_end_early_and_rows_stay_alone(runtime):
    sampled = dataclasses.replace(CONFIG, temperature=1.0, accept="rejection", min_confidence=0.05)
    together = generate.run(runtime, PROMPTS, sampled, seeds=[4, 5, 6]).outputs
    alone = [generate.run(runtime, [prompt], sampled, seeds=[seed]).outputs[0] for prompt, seed in zip(PROMPTS, (4, 5, 6), strict=True)]
    assert together == alone and any(output.drafted < 4 * output.steps for output in together)
