"""The loop with scripted drafters: what is counted, where rows end, and that rows are alone in the world."""

import dataclasses
from functools import partial

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, loop, sampling

PROMPTS = fakes.prompts(3, 9, 20)
BUDGET = 25  # the first token comes from the prefill, 24 from steps: a whole number of blocks for M = 1, 2, 3
M = 3


def decode(**changes):
    return config_lib.DecodeConfig(**(dict(max_new_tokens=BUDGET, num_draft=M) | changes))


@pytest.fixture(scope="module")
def vanilla(runtime):
    return [output.tokens for output in generate.run(runtime.without_drafter(), PROMPTS, decode(max_new_tokens=40)).outputs]


def script(prompts, answers):
    """The text each row is going to have, as Scripted reads it."""
    params = np.zeros((len(prompts), 256), np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        params[row, : len(prompt) + len(answer)] = prompt + answer
    return jnp.asarray(params)


def with_script(runtime, drafter, answers, prompts=PROMPTS):
    return dataclasses.replace(runtime, drafter=drafter, drafter_params=script(prompts, answers))


@pytest.mark.parametrize("num_draft", [1, 3])
def test_always_right_commits_every_draft_and_the_bonus(runtime, vanilla, num_draft):
    result = generate.run(with_script(runtime, fakes.Scripted(), vanilla), PROMPTS, decode(num_draft=num_draft))
    for output, text in zip(result.outputs, vanilla, strict=True):
        assert output.tokens == text[:BUDGET]
        assert output.tokens_per_step == num_draft + 1
        assert output.steps == 24 // (num_draft + 1)
        assert output.accepted == [output.steps] * num_draft
        assert output.finish_reason == "length"


def test_always_wrong_commits_one(runtime, vanilla):
    for output, text in zip(generate.run(with_script(runtime, fakes.Wrong(), vanilla), PROMPTS, decode()).outputs, vanilla, strict=True):
        assert (output.tokens, output.tokens_per_step, output.accepted, output.steps) == (text[:BUDGET], 1.0, [0] * M, 24)


@pytest.mark.parametrize("wrong_at", [1, 2, 3])
def test_wrong_at_j_commits_j(runtime, vanilla, wrong_at):
    """Drafts before the j-th are kept, the j-th is recovered: j tokens a step, though the drafts after it are right again."""
    result = generate.run(with_script(runtime, fakes.Scripted(wrong_at=wrong_at), vanilla), PROMPTS, decode())
    for output, text in zip(result.outputs, vanilla, strict=True):
        assert output.tokens == text[:BUDGET]
        assert output.tokens_per_step == wrong_at
        assert output.accepted == [output.steps] * (wrong_at - 1) + [0] * (M - wrong_at + 1)


def test_a_budget_inside_a_block_counts_only_what_came_out(runtime, vanilla):
    """8 tokens: one from the prefill, a block of 4, then 3 of the next block, all of them drafts."""
    output = generate.run(with_script(runtime, fakes.Scripted(), vanilla), PROMPTS, decode(max_new_tokens=8)).outputs[0]
    assert output.tokens == vanilla[0][:8]
    assert (output.steps, output.accepted) == (2, [2, 2, 2])
    output = generate.run(with_script(runtime, fakes.Scripted(), vanilla), PROMPTS, decode(max_new_tokens=6)).outputs[0]
    assert (output.tokens, output.steps, output.accepted) == (vanilla[0][:6], 2, [2, 1, 1])


def test_a_budget_of_one_takes_no_step(runtime, vanilla):
    for output, text in zip(generate.run(with_script(runtime, fakes.Scripted(), vanilla), PROMPTS, decode(max_new_tokens=1)).outputs, vanilla, strict=True):
        assert (output.tokens, output.steps, output.accepted, output.tokens_per_step) == (text[:1], 0, [0] * M, 0.0)


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_a_stop_token_inside_a_block_ends_the_row_there(runtime, vanilla, place):
    """Blocks are answers 1..4, 5..8, ..: the stop token is the place-th of the first block of some row; every row ends at its own first one."""
    stop = vanilla[0][place]
    result = generate.run(with_script(runtime, fakes.Scripted(), vanilla), PROMPTS, decode(stop_tokens=(stop,)))
    for output, text in zip(result.outputs, vanilla, strict=True):
        end = text[:BUDGET].index(stop) + 1 if stop in text[:BUDGET] else BUDGET
        assert output.tokens == text[:end]
        assert output.finish_reason == ("stop" if stop in text[:BUDGET] else "length")
        blocks, rest = divmod(end - 1, M + 1)
        assert output.steps == blocks + (rest > 0)
        assert output.accepted == [blocks + (rest > k) for k in range(M)]  # drafts behind the stop token do not count


def test_stop_at_the_first_token(runtime, vanilla):
    output = generate.run(with_script(runtime, fakes.Scripted(), vanilla), PROMPTS, decode(stop_tokens=(vanilla[1][0],))).outputs[1]
    assert (output.tokens, output.finish_reason, output.steps) == (vanilla[1][:1], "stop", 0)


def test_rows_do_not_depend_on_each_other(runtime, vanilla):
    """Alone, in another order, beside rows that stop early: the same tokens and counts."""
    together = generate.run(runtime, PROMPTS, decode()).outputs
    alone = [generate.run(runtime, [prompt], decode()).outputs[0] for prompt in PROMPTS]
    turned = generate.run(runtime, PROMPTS[::-1], decode()).outputs[::-1]
    assert together == alone == turned


def states(runtime, drafter, params, limits, steps, stop_tokens=()):
    """States after the prefill and after each of `steps` steps."""
    rules = config_lib.DecodeConfig(max_new_tokens=1, num_draft=M, stop_tokens=stop_tokens)
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    padded = np.zeros((3, 32), np.int32)
    for row, prompt in enumerate(PROMPTS):
        padded[row, : len(prompt)] = prompt
    request = loop.Request(limits=jnp.asarray(limits), keys=sampling.row_keys(0, [0, 1, 2]))
    state = loop.prefill(
        runtime.prefill_module,
        runtime.prefill_params,
        padded,
        jnp.asarray(lengths),
        request,
        num_slots=64,
        drafter=drafter,
        config=rules,
    )
    step = jax.jit(lambda params, state: loop.step(runtime.step_module, drafter, runtime.step_params, params, state, request, config=rules))
    found = [state]
    for _ in range(steps):
        found.append(step(params, found[-1]))
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("ended_by", ["budget", "stop token"])
def test_a_finished_row_keeps_its_state(runtime, vanilla, ended_by):
    """Row 0 ends in the first step; three more steps of the others leave every field of it as it was.

    Slots behind its length are scratch: they are written by every step and read by none.
    """
    stop = vanilla[0][1]
    assert all(stop not in text[:6] for text in vanilla[1:])
    limits, stops = ([3 + 2, 9 + 30, 20 + 30], ()) if ended_by == "budget" else ([3 + 30, 9 + 30, 20 + 30], (stop,))
    found = states(runtime, fakes.Random(), None, limits, 4, stops)
    one, last = found[1], found[4]
    assert one.done.tolist() == [True, False, False] and last.cache.lengths[1] > one.cache.lengths[1]
    assert one.stopped.tolist() == [ended_by == "stop token", False, False]
    length = int(one.cache.lengths[0])
    assert length + 1 == 5
    for name in ("hidden", "done", "stopped", "steps", "accepted"):
        np.testing.assert_array_equal(getattr(last, name)[0], getattr(one, name)[0], err_msg=name)
    assert last.cache.lengths[0] == length
    np.testing.assert_array_equal(last.tokens[0, : length + 1], one.tokens[0, : length + 1])
    for before, after in zip(jax.tree.leaves((one.cache.keys, one.cache.values)), jax.tree.leaves((last.cache.keys, last.cache.values)), strict=True):
        np.testing.assert_array_equal(after[0, :, :length], before[0, :, :length])
    assert last.drafter_state["kept"][0] == one.drafter_state["kept"][0]  # commit is told that nothing was kept
    assert last.steps[0] == 1 and last.steps[1] == 4


def test_lengths_are_tokens_minus_one_at_every_step(runtime, vanilla):
    found = states(runtime, fakes.Scripted(wrong_at=2), script(PROMPTS, vanilla), [40, 40, 50], 4)
    for number, state in enumerate(found):
        np.testing.assert_array_equal(state.cache.lengths, [3 + 2 * number, 9 + 2 * number, 20 + 2 * number])
        for row in range(3):
            count = int(state.cache.lengths[row]) + 1
            assert state.tokens[row, :count].tolist() == (PROMPTS[row] + vanilla[row])[:count]


def test_second_prompt_of_a_bucket_does_not_trace_again(backbone):
    """Counted by a drafter that notes each trace; budgets, prompt lengths and texts are data. Another M is another program."""
    traces = []

    @dataclasses.dataclass(frozen=True)
    class Noting(fakes.Random):
        def draft(self, params, state, context, rules):
            traces.append(rules.num_draft)
            return super().draft(params, state, context, rules)

    runtime = dataclasses.replace(generate.make_runtime(backbone), drafter=Noting())
    generate.run(runtime, fakes.prompts(3, 9), decode(max_new_tokens=5))
    first = len(traces)
    assert first > 0
    before = loop.decode._cache_size(), loop.read._cache_size()
    generate.run(runtime, fakes.prompts(11, 2, seed=6), decode(max_new_tokens=17))
    assert len(traces) == first and (loop.decode._cache_size(), loop.read._cache_size()) == before
    generate.run(runtime, fakes.prompts(3, 9), decode(max_new_tokens=5, num_draft=2))
    assert len(traces) > first


@pytest.mark.parametrize(
    "prompts, changes, message",
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 64]], {}, r"prompt 0 holds a token id outside 0\.\.63"),
        ([[1, -1]], {}, r"prompt 0 holds a token id outside 0\.\.63"),
        ([[1] * 250], {"max_new_tokens": 7}, "prompt 0 has 250 tokens: with max_new_tokens=7 that exceeds the backbone's max_positions=256"),
    ],
)
def test_prompts_that_cannot_work_are_refused(runtime, prompts, changes, message):
    with pytest.raises(generate.PromptError, match=message):
        generate.run(runtime, prompts, decode(**changes))


def test_a_head_needs_a_draft(runtime):
    with pytest.raises(config_lib.ConfigError, match="num_draft=0: must be at least 1 when there is a head"):
        generate.run(runtime, PROMPTS, decode(num_draft=0))


def test_the_longest_text_that_fits_is_right_to_the_last_token(runtime):
    """Prompt and budget fill max_positions: no write may be moved onto valid slots."""
    prompt = fakes.prompts(200)[0]
    expected = generate.run(runtime.without_drafter(), [prompt], decode(max_new_tokens=56)).outputs[0].tokens
    scripted = with_script(runtime, fakes.Scripted(), [expected], [prompt])
    output = generate.run(scripted, [prompt], decode(max_new_tokens=56)).outputs[0]
    assert output.tokens == expected and len(expected) == 56 and output.steps == 14


def test_text_stop_tokens_and_statistics_come_out_of_generate(backbone, head, vanilla):
    stop = vanilla[0][4]
    loaded = dataclasses.replace(backbone, tokenizer=fakes.Tokenizer((stop,)))
    run = partial(generate.generate, loaded, head, config=decode(max_new_tokens=12))
    from_ids = run([PROMPTS[0]]).outputs[0]
    assert from_ids.tokens == vanilla[0][: vanilla[0].index(stop) + 1] and from_ids.finish_reason == "stop"
    assert from_ids.text == " ".join(map(str, from_ids.tokens)) and from_ids.prompt_tokens == 3
    from_text = run(["abc"])
    assert from_text.outputs == run([[1, 2, 3]]).outputs
    assert from_text.drafter_bytes["state"] == 0 and from_text.drafter_bytes["parameters"] > 0
    with pytest.raises(generate.PromptError, match="prompt is empty"):
        run(["  "])
