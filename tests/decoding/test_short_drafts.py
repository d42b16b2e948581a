"""Narrower verify passes for short proposals: the same text, and no wider a pass than the longest proposal needs."""

import dataclasses
from dataclasses import dataclass

import fakes
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.decoding import generate
from mtp_jax.drafters import hybrid

PROMPT = generate.PROMPT_BUCKET  # tokens, so that the prefill writes nothing beyond the prompt
PROMPTS = fakes.prompts(PROMPT, PROMPT)
CONFIG = config_lib.DecodeConfig(max_new_tokens=25, num_draft=3, short_drafts=(0, 1))


@dataclass(frozen=True)
class FirstOf(fakes.Scripted):
    """Row r proposes the first counts[r] drafts of the script."""

    counts: tuple[int, ...] = ()

    def draft(self, params, state, context, rules):
        proposal, state = super().draft(params, state, context, rules)
        there = jnp.arange(rules.num_draft) < jnp.asarray(self.counts)[:, None]
        return drafters.Proposal(tokens=jnp.where(there, proposal.tokens, -1)), state


@pytest.fixture(scope="module")
def vanilla(runtime):
    return [output.tokens for output in generate.run(runtime.without_drafter(), PROMPTS, dataclasses.replace(CONFIG, max_new_tokens=40)).outputs]


def scripted(runtime, vanilla, counts):
    script = np.zeros((len(counts), 256), np.int32)
    for row in range(len(counts)):
        script[row, : PROMPT + 40] = PROMPTS[row] + vanilla[row]
    return dataclasses.replace(runtime, drafter=FirstOf(counts=counts), drafter_params=jnp.asarray(script))


@pytest.mark.parametrize(("counts", "width"), [((0, 0), 0), ((1, 1), 1), ((0, 1), 1), ((2, 2), 3), ((3, 3), 3), ((0, 3), 3)])
def test_the_longest_proposal_chooses_the_pass(runtime, vanilla, counts, width):
    """A pass over w drafts writes w + 1 slots, of which a row keeps what it commits."""
    result = generate.run(scripted(runtime, vanilla, counts), PROMPTS, CONFIG, budgets=[1 + 4 * (count + 1) for count in counts], keep_state=True)
    for row, (output, count) in enumerate(zip(result.outputs, counts, strict=True)):
        assert (output.steps, output.accepted) == (4, [4] * count + [0] * (3 - count))
        assert output.tokens == vanilla[row][: len(output.tokens)] and len(output.tokens) == 1 + 4 * (count + 1)
        written = np.flatnonzero(np.abs(np.asarray(result.state.cache.keys[0][row])).sum(axis=(0, 2)))
        assert written.max() + 1 == PROMPT + 3 * (count + 1) + width + 1


@pytest.mark.parametrize("changes", [{"min_confidence": 0.1}, pytest.param({"min_confidence": 0.1, "temperature": 1.0}, marks=pytest.mark.slow)])
def test_text_is_the_same(runtime, changes):
    config = dataclasses.replace(CONFIG, num_draft=5, short_drafts=(1, 3), **changes)
    prompts = fakes.prompts(3, 9, 20)
    expected = generate.run(runtime.without_drafter(), prompts, config).outputs
    drafted = generate.run(runtime, prompts, config).outputs
    assert [output.tokens for output in drafted] == [output.tokens for output in expected]
    assert drafted == generate.run(runtime, prompts, dataclasses.replace(config, short_drafts=())).outputs


def test_the_fixed_width_reference_stays_wide(runtime):
    result = generate.run(runtime.at_fixed_width(), PROMPTS, CONFIG, budgets=[5, 5], keep_state=True)
    written = np.flatnonzero(np.abs(np.asarray(result.state.cache.keys[0][0])).sum(axis=(0, 2)))
    assert written.max() + 1 == PROMPT + 3 + 4


def test_the_hybrids_head_drafts_fewer_than_it_copies(runtime):
    """The random backbone repeats itself: some steps copy, and are longer than any of the head's."""
    short = dataclasses.replace(runtime, drafter=hybrid.Hybrid(runtime.drafter, min_match=2, head_draft=2))
    config = dataclasses.replace(CONFIG, num_draft=6, short_drafts=(2,), max_new_tokens=60)
    prompts = [[7, 8, 9] * 8]
    expected = generate.run(runtime.without_drafter(), prompts, config).outputs[0]
    output = generate.run(short, prompts, config).outputs[0]
    assert output.tokens == expected.tokens
    copied = (output.drafted - 2 * output.steps) / 4  # each step proposes 2 or 6
    assert 0 < copied < output.steps and copied == int(copied)


@pytest.mark.parametrize("short", [(1, 1), (3,), (2, 1), (-1,)])
def test_widths_out_of_order_are_refused(short):
    with pytest.raises(config_lib.ConfigError, match="short_drafts"):
        dataclasses.replace(CONFIG, short_drafts=short)
