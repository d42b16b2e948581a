"""Refilled rows: every prompt has the answer it would have alone, whatever rows and order; few programs whatever the number of prompts."""

import dataclasses

import fakes
import pytest

from mtp_jax.config import DecodeConfig
from mtp_jax.decoding import generate, loop, refill

GREEDY = DecodeConfig(max_new_tokens=40, num_draft=0, stop_tokens=(16,))
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, seed=3)
PROMPTS = fakes.prompts(3, 9, 70, 5, 33, 100, 4, 8, 60, 65, 2, 7, 5, 1, 150)  # of three buckets of lengths, and two of slots
NUMBERS = range(40, 40 + len(PROMPTS))


@pytest.fixture(scope="module")
def plain(backbone):
    return generate.make_runtime(backbone, column_blocks=False)


@pytest.mark.parametrize("config", [GREEDY, SAMPLED, dataclasses.replace(GREEDY, window_cache="ring")], ids=["greedy", "sampled", "ring"])
@pytest.mark.parametrize("batch_size", [1, 5, 16])
def test_answers_are_those_of_one_batch(plain, config, batch_size):
    if batch_size == 16 and config is not GREEDY:
        pytest.skip("all prompts at once: once is enough")
    want = generate.run(plain, PROMPTS, config, row_numbers=NUMBERS).outputs
    assert {output.finish_reason for output in want} == {"stop", "length"}
    found = list(refill.answers(plain, PROMPTS, config, batch_size=batch_size, row_numbers=NUMBERS))
    assert sorted(index for index, _ in found) == list(range(len(PROMPTS)))
    for index, output in found:
        assert output == want[index]


def test_a_row_that_ends_makes_room(plain, monkeypatch):
    """Steps of the loop, counted: rows that end early take other prompts instead of waiting for the longest of their batch."""
    steps, decode = [], loop.decode

    def counted(*args, **options):
        state = decode(*args, **options)
        steps.append(len(state.done))
        return state

    monkeypatch.setattr(loop, "decode", counted)
    outputs = [output for _, output in refill.answers(plain, PROMPTS, GREEDY, batch_size=4, row_numbers=NUMBERS)]
    needed = sum(output.steps for output in outputs)
    assert set(steps) == {4}
    in_batches = 4 * sum(max(o.steps for o in outputs[i : i + 4]) for i in range(0, len(outputs), 4))  # even if batches were chosen knowing the answers
    assert needed <= refill.STEPS * 4 * len(steps) < 1.5 * needed
    assert in_batches > needed


def test_nothing_to_answer(plain):
    assert list(refill.answers(plain, [], GREEDY, batch_size=4, row_numbers=[])) == []


def test_programs_do_not_depend_on_the_number_of_prompts(plain):
    list(refill.answers(plain, PROMPTS, GREEDY, batch_size=4, row_numbers=NUMBERS))
    before = loop.read._cache_size(), loop.decode._cache_size(), refill._put._cache_size()
    more = [*PROMPTS, *fakes.prompts(4, 30, 61, 90, 2, 6, 141, seed=8)]
    list(refill.answers(plain, more, GREEDY, batch_size=4, row_numbers=range(len(more))))
    assert (loop.read._cache_size(), loop.decode._cache_size(), refill._put._cache_size()) == before
