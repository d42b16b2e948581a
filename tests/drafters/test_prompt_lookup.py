"""Prompt lookup against hand-worked rows and a plain search; the hybrid drafter chooses row by row."""

import dataclasses

import fakes
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.decoding import generate
from mtp_jax.drafters import hybrid, prompt_lookup


def find(text, max_match, num_draft):
    """The rule in plain Python: the longest, then latest, earlier match of the text's end, continued periodically."""
    last = len(text) - 1
    best, length = last - 1, 0
    for place in range(last):
        match = 0
        while match < max_match and match <= place and text[place - match] == text[last - match]:
            match += 1
        if match >= length and match > 0:
            best, length = place, match
    return [text[best + 1 + i % (last - best)] for i in range(num_draft)], length


@pytest.mark.parametrize(
    "text, drafts, found",
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1], 2),
        ([5, 1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2], 2),  # the latest of two
        ([7, 1, 2, 9, 1, 2, 8, 7, 1, 2], [9, 1, 2], 3),  # the longer one is earlier
        ([4, 6, 6], [6, 6, 6], 1),  # a copy that reaches the end begins again
        ([1, 2, 1, 2, 1, 2], [1, 2, 1], 3),
    ],
)
def test_hand_worked_rows(text, drafts, found):
    assert find(text, 3, 3) == (drafts, found)
    buffer = np.full((1, 16), 2, np.int32)  # leftovers beyond the text look like a match
    buffer[0, : len(text)] = text
    actual, length = prompt_lookup.lookup(jnp.asarray(buffer), jnp.asarray([len(text) - 1]), 3, 3)
    assert (actual[0].tolist(), int(length[0])) == (drafts, found)


def test_rows_of_a_batch_are_searched_alone():
    rng = np.random.default_rng(0)
    buffer = rng.integers(0, 4, (40, 24)).astype(np.int32)
    lengths = rng.integers(3, 23, 40)
    for max_match in (1, 3):
        drafts, found = prompt_lookup.lookup(jnp.asarray(buffer), jnp.asarray(lengths - 1), max_match, 4)
        for row, count in enumerate(lengths):
            expected, length = find(buffer[row, :count].tolist(), max_match, 4)
            assert int(found[row]) == length
            if length:
                assert drafts[row].tolist() == expected, f"row {row}"


@pytest.fixture(scope="module")
def runtimes():
    """Three runtimes of one backbone whose text repeats itself, as that of small random models does."""
    backbone = fakes.backbone()
    vanilla = generate.make_runtime(backbone)
    head = fakes.head(backbone)
    return vanilla, {name: generate.attach(vanilla, head, name) for name in ("mtp", "prompt_lookup", "hybrid")}


@pytest.mark.parametrize("name", ["prompt_lookup", "hybrid"])
@pytest.mark.parametrize("rows", [1, 3])
def test_output_is_vanillas(runtimes, name, rows):
    vanilla, drafted = runtimes
    prompts, config = fakes.prompts(9, 4, 13)[:rows], config_lib.DecodeConfig(max_new_tokens=60, num_draft=3)
    result = generate.run(drafted[name], prompts, config)
    assert [output.tokens for output in result.outputs] == [output.tokens for output in generate.run(vanilla, prompts, config).outputs]
    assert result.drafter_bytes["state"] == 0
    assert rows == 1 or sum(output.accepted[0] for output in result.outputs) > 0, "nothing was ever kept: the test proves little"


@dataclasses.dataclass(frozen=True)
class Copying(prompt_lookup.PromptLookup):
    """Copies what follows the latest place, whatever stands there."""

    def draft(self, params, state, context, rules):
        return drafters.Proposal(tokens=prompt_lookup.lookup(context.tokens, context.cache.lengths, 0, rules.num_draft)[0]), state


def test_the_hybrid_drafts_as_one_or_the_other(runtimes):
    _, drafted = runtimes
    head = drafted["mtp"].drafter
    prompts, config = fakes.prompts(9, 4, 13), config_lib.DecodeConfig(max_new_tokens=24, num_draft=3)

    def steps(drafter, params):
        runtime = dataclasses.replace(drafted["mtp"], drafter=drafter, drafter_params=params)
        return [(output.steps, output.accepted) for output in generate.run(runtime, prompts, config).outputs]

    params = drafted["mtp"].drafter_params
    assert steps(hybrid.Hybrid(head, min_match=0), params) == steps(Copying(), None)
    assert steps(hybrid.Hybrid(head, min_match=99), params) == steps(head, params)  # never does


def test_a_drafter_needs_its_name_and_its_head(runtimes):
    vanilla, _ = runtimes
    with pytest.raises(config_lib.ConfigError, match="drafter='ngram': must be one of mtp, prompt_lookup, hybrid"):
        generate.attach(vanilla, None, "ngram")
    with pytest.raises(config_lib.ConfigError, match="drafter='hybrid': needs a head"):
        generate.attach(vanilla, None, "hybrid")
