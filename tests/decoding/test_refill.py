"""Refilled rows: every prompt has the answer it would have alone, whatever rows and order; few programs whatever the number of prompts."""

import dataclasses

import fakes
import jax
import pytest

from mtp_jax.config import DecodeConfig
from mtp_jax.decoding import generate, loop, refill

GREEDY = DecodeConfig(max_new_tokens=40, num_draft=0, stop_tokens=(16,))
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, seed=3)
PROMPTS = fakes.prompts(3, 9, 70, 5, 33, 100, 4, 8, 60, 65, 2, 7, 5, 1)  # of two buckets of lengths, and two of slots
NUMBERS = range(40, 40 + len(PROMPTS))


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly(compilation):
    """Tokens are compared, and programs of many shapes run a few steps each; `compilation` puts the setting back."""
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def plain(backbone):
    return generate.make_runtime(backbone, column_blocks=False)


@pytest.mark.parametrize(
    "config, batch_size",
    [
        pytest.param(GREEDY, 3, id="greedy"),
        pytest.param(SAMPLED, 12, id="sampled", marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(GREEDY, window_cache="ring"), 5, id="ring"),
    ],
)
def test_answers_are_those_of_one_batch(plain, config, batch_size):
    want = generate.run(plain, PROMPTS, config, row_numbers=NUMBERS).outputs
    assert {output.finish_reason for output in want} == {"stop", "length"}
    found = list(refill.answers(plain, PROMPTS, config, batch_size=batch_size, row_numbers=NUMBERS))
    assert sorted(index for index, _ in found) == list(range(len(PROMPTS)))
    for index, output in found:
        assert output == want[index]


def test_a_row_that_ends_makes_room(plain, monkeypatch):
    """Steps of all rows, counted, are fewer than in batches that wait for their longest answer."""
    loops, decode = [], loop.decode

    def counted(*args, **options):
        loops.append(decode(*args, **options))
        return loops[-1]

    monkeypatch.setattr(loop, "decode", counted)
    monkeypatch.setattr(refill, "STEPS", 2)
    prompts = PROMPTS * 2
    found = dict(refill.answers(plain, prompts, GREEDY, batch_size=3, row_numbers=range(len(prompts))))
    steps = [found[index].steps for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index]))]
    assert [loops[0].cache.num_slots, loops[-1].cache.num_slots] == [128, 256]  # short prompts first, in few slots
    in_batches = sum(3 * max(steps[i : i + 3]) for i in range(0, len(steps), 3))
    assert sum(steps) <= 3 * refill.STEPS * len(loops) < 0.9 * in_batches, (sum(steps), 3 * refill.STEPS * len(loops), in_batches)


def test_nothing_to_answer(plain):
    assert list(refill.answers(plain, [], GREEDY, batch_size=3, row_numbers=[])) == []


def test_programs_do_not_depend_on_the_number_of_prompts(plain):
    list(refill.answers(plain, PROMPTS, GREEDY, batch_size=3, row_numbers=NUMBERS))
    before = loop.read._cache_size(), loop.decode._cache_size(), refill._put._cache_size()
    more = [*PROMPTS, *fakes.prompts(4, 30, 61, 90, 2, 6, seed=8)]
    list(refill.answers(plain, more, GREEDY, batch_size=3, row_numbers=range(len(more))))
    assert (loop.read._cache_size(), loop.decode._cache_size(), refill._put._cache_size()) == before
