"""Going on from a state, prompts in chunks, rows with their own budgets: the same tokens as one call that reads the whole text, alone."""

import dataclasses
import random

import fakes
import jax
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, loop

PROMPTS = fakes.prompts(3, 9, 20)
MORE = fakes.prompts(6, 1, 11, seed=9)
CONFIG = config_lib.DecodeConfig(max_new_tokens=12, num_draft=3)


@pytest.fixture(params=["vanilla", "head"])
def either(request, runtime):
    return runtime if request.param == "head" else runtime.without_drafter()


def tokens_of(result):
    return [output.tokens for output in result.outputs]


def after(prompts, result, more):
    """The text of each row up to where the second turn begins."""
    return [prompt + tokens + then for prompt, tokens, then in zip(prompts, tokens_of(result), more, strict=True)]


def cache_sizes():
    return loop.decode._cache_size(), loop.begin._cache_size(), loop.read._cache_size()


def test_two_turns_equal_one_prefill_of_the_whole_text(either):
    """Rows of different lengths, budgets and ends; the second turn drafts another number of tokens."""
    first = generate.run(either, PROMPTS, CONFIG, budgets=[5, 12, 1], keep_state=True)
    slots = first.state.cache.num_slots
    second = generate.run(either, MORE, dataclasses.replace(CONFIG, num_draft=2), before=first.state, keep_state=True)
    assert second.state.cache.num_slots == slots
    texts = after(PROMPTS, first, MORE)
    whole = generate.run(either, texts, dataclasses.replace(CONFIG, num_draft=2))
    assert tokens_of(second) == tokens_of(whole) == tokens_of(generate.run(either.without_drafter(), texts, CONFIG))
    assert [output.prompt_tokens for output in second.outputs] == [len(text) for text in texts]
    assert [output.steps for output in second.outputs] == [output.steps for output in whole.outputs]  # statistics begin anew
    np.testing.assert_array_equal(second.state.cache.lengths + 1, [len(text) + 12 for text in texts])


def test_a_cache_that_is_too_small_grows(runtime):
    runtime = runtime.without_drafter()
    first = generate.run(runtime, PROMPTS, CONFIG, keep_state=True)
    state, more = first.state, fakes.prompts(3, 130, 1, seed=9)
    assert state.cache.num_slots == 128
    second = generate.run(runtime, more, CONFIG, before=state, keep_state=True)
    assert second.state.cache.num_slots == 256 and second.state.tokens.shape == (3, 257)
    assert tokens_of(second) == tokens_of(generate.run(runtime, after(PROMPTS, first, more), CONFIG))
    with pytest.raises(generate.StateError, match="another call has gone on from"):  # though its cache was copied, not taken over
        generate.run(runtime, more, CONFIG, before=state)


def test_a_turn_after_a_stop_token_reads_the_stop_token(runtime):
    """It ended the row as its newest token, so it was pending: the second turn has to read it first."""
    runtime = runtime.without_drafter()
    stop = tokens_of(generate.run(runtime, PROMPTS, CONFIG))[0][4]
    config = dataclasses.replace(CONFIG, stop_tokens=(stop,))
    first = generate.run(runtime, PROMPTS, config, keep_state=True)
    assert first.outputs[0].finish_reason == "stop" and first.outputs[0].tokens[-1] == stop
    second = generate.run(runtime, MORE, config, before=first.state)
    assert tokens_of(second) == tokens_of(generate.run(runtime, after(PROMPTS, first, MORE), config))


def test_three_turns_and_a_state_in_the_middle_of_an_answer(runtime):
    """`at_most` leaves rows unfinished; what follows reads on from there."""
    job = generate.make_job(runtime, PROMPTS, CONFIG)
    state = job.decode(job.prefill(), at_most=2)
    assert state.steps.tolist() == [2, 2, 2] and not state.done.any()
    texts = [prompt + output.tokens for prompt, output in zip(PROMPTS, job.outputs(state), strict=True)]
    for more in (MORE, PROMPTS):
        result = generate.run(runtime, more, CONFIG, before=state, keep_state=True)
        texts = [text + then for text, then in zip(texts, more, strict=True)]
        assert tokens_of(result) == tokens_of(generate.run(runtime, texts, CONFIG))
        texts = [text + tokens for text, tokens in zip(texts, tokens_of(result), strict=True)]
        state = result.state


def test_turns_share_the_programs_of_first_turns(runtime):
    """The pending token is read with the prompt, and both fit the bucket."""
    first = generate.run(runtime, PROMPTS, CONFIG, keep_state=True)
    before = cache_sizes()
    second = generate.run(runtime, MORE, CONFIG, before=first.state, keep_state=True)
    generate.run(runtime, fakes.prompts(63, 1, 20), CONFIG, before=second.state)
    assert cache_sizes() == before


def test_states_that_cannot_be_gone_on_from(runtime):
    first = generate.run(runtime, PROMPTS, CONFIG, keep_state=True)
    with pytest.raises(generate.PromptError, match="2 prompts for a state of 3 rows: must be as many"):
        generate.run(runtime, MORE[:2], CONFIG, before=first.state)
    with pytest.raises(generate.PromptError, match="prompt 2 has 212 tokens after 32 earlier ones: with max_new_tokens=13 that exceeds"):
        generate.run(runtime, [[1], [1], [1] * 212], dataclasses.replace(CONFIG, max_new_tokens=13), before=first.state)
    with pytest.raises(generate.PromptError, match="prompt 1 is empty"):
        generate.run(runtime, [[1], [], [1]], CONFIG, before=first.state)
    generate.make_job(runtime, [[1], [1], [1] * 212], CONFIG, before=first.state)  # 256 are allowed
    generate.run(runtime, MORE, CONFIG, before=first.state)  # calls that were refused have not used it up
    with pytest.raises(generate.StateError, match="another call has gone on from"):
        generate.run(runtime, MORE, CONFIG, before=first.state)


@pytest.mark.parametrize("chunk", [4, 7])
def test_a_prompt_in_chunks_equals_one_in_one_piece(either, monkeypatch, chunk):
    """Rows end in the first, third and fifth chunk of 4; windows (5 slots) and attention reach over the borders."""
    whole = generate.run(either, PROMPTS, CONFIG, keep_state=True)
    expected = np.asarray(generate.make_job(either, PROMPTS, CONFIG).prefill().hidden)
    monkeypatch.setattr(loop, "CHUNK", chunk)
    job = generate.make_job(either, PROMPTS, CONFIG)
    state = job.prefill()
    np.testing.assert_allclose(state.hidden, expected, atol=1e-4)  # each row's own last token's, whichever chunk has it
    state = job.decode(state)
    assert [output.tokens for output in job.outputs(state)] == tokens_of(whole)
    lengths = np.asarray(state.cache.lengths)
    caches = state.cache, whole.state.cache
    for ours, theirs in zip(*(jax.tree.leaves((cache.keys, cache.values)) for cache in caches), strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(ours[row, :, :length], theirs[row, :, :length], atol=1e-4)


def test_a_second_turn_in_chunks(runtime, monkeypatch):
    monkeypatch.setattr(loop, "CHUNK", 4)
    first = generate.run(runtime, PROMPTS, CONFIG, budgets=[5, 12, 1], keep_state=True)
    second = generate.run(runtime, MORE, CONFIG, before=first.state)
    monkeypatch.undo()
    assert tokens_of(second) == tokens_of(generate.run(runtime, after(PROMPTS, first, MORE), CONFIG))


def test_sixty_four_ragged_rows_equal_each_alone(runtime):
    rng = random.Random(0)
    prompts = fakes.prompts(*(rng.randint(1, 30) for _ in range(64)), seed=11)
    budgets = [rng.randint(1, 12) for _ in prompts]
    sampled = dataclasses.replace(CONFIG, temperature=0.7, stop_tokens=(16,))
    seeds = [rng.randrange(2**32) for _ in prompts]
    together = generate.run(runtime, prompts, sampled, budgets=budgets, seeds=seeds).outputs
    alone = [
        generate.run(runtime, [prompt], sampled, budgets=[budget], seeds=[seed]).outputs[0]
        for prompt, budget, seed in zip(prompts, budgets, seeds, strict=True)
    ]
    assert together == alone
    assert [len(output.tokens) for output in together if output.finish_reason == "length"] == [
        budget for budget, output in zip(budgets, together, strict=True) if output.finish_reason == "length"
    ]
    assert {output.finish_reason for output in together} == {"stop", "length"} and any(sum(output.accepted) for output in together)


def test_budgets_seeds_and_lengths_of_a_bucket_compile_nothing(runtime):
    generate.run(runtime, PROMPTS, CONFIG)
    before = cache_sizes()
    results = [
        generate.run(runtime, PROMPTS, CONFIG, budgets=[1, 30, 7]),
        generate.run(runtime, fakes.prompts(64, 1, 2), dataclasses.replace(CONFIG, max_new_tokens=40, seed=3)),
        generate.run(runtime, PROMPTS, CONFIG, seeds=[5, 6, 7]),
    ]
    assert cache_sizes() == before
    assert [len(tokens) for tokens in tokens_of(results[0])] == [1, 30, 7]


@pytest.mark.parametrize("name, values, message", [("budgets", [1, 2], "budgets has 2 entries for 3 prompts"), ("budgets", [1, 0, 2], "budgets holds 0")])
def test_budgets_that_do_not_fit(runtime, name, values, message):
    with pytest.raises(config_lib.ConfigError, match=message):
        generate.run(runtime, PROMPTS, CONFIG, **{name: values})


def test_split_times_are_parts_of_the_whole(either):
    result = generate.run(either, PROMPTS, CONFIG, split_times=True, warm_up=True)
    assert result.draft_seconds > 0 and result.verify_seconds > 0
    assert result.draft_seconds + result.verify_seconds <= result.decode_seconds
    whole = generate.run(either, PROMPTS, CONFIG)
    assert result.outputs == whole.outputs and whole.draft_seconds is whole.verify_seconds is None
