"""Sampling: filters against numpy, the same tokens with and without a head, and the right distribution."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, sampling

LOGITS = np.log(np.array([[0.4, 0.3, 0.15, 0.1, 0.05], [0.05, 0.1, 0.15, 0.3, 0.4]]))


def kept(top_k, top_p, logits=LOGITS):
    return np.isfinite(np.asarray(sampling.limit(jnp.asarray(logits, jnp.float32), top_k, top_p))).astype(int).tolist()


@pytest.mark.parametrize(
    "top_k, top_p, expected",
    [
        (0, 1.0, [1, 1, 1, 1, 1]),
        (1, 1.0, [1, 0, 0, 0, 0]),
        (3, 1.0, [1, 1, 1, 0, 0]),
        (9, 1.0, [1, 1, 1, 1, 1]),
        (0, 0.39, [1, 0, 0, 0, 0]),
        (0, 0.6, [1, 1, 0, 0, 0]),
        (0, 0.8, [1, 1, 1, 0, 0]),
        (2, 0.6, [1, 1, 0, 0, 0]),  # renormalised after top-k: .57 .43, so the second is needed
        (2, 0.5, [1, 0, 0, 0, 0]),  # and here it is not
    ],
)
def test_limit_by_hand(top_k, top_p, expected):
    assert kept(top_k, top_p) == [expected, expected[::-1]]


def test_limit_against_numpy():
    logits = np.random.default_rng(0).normal(size=(50, 20)) * 3
    for top_k, top_p in ((4, 1.0), (0, 0.7), (6, 0.9)):
        expected = np.zeros((50, 20), int)
        for row, values in enumerate(logits):
            order = np.argsort(-values)[: top_k or 20]
            probs = np.exp(values[order]) / np.exp(values[order]).sum()
            count = int(np.searchsorted(np.cumsum(probs), top_p)) + 1  # the smallest set that reaches top_p
            expected[row, order[:count]] = 1
        assert kept(top_k, top_p, logits) == expected.tolist()


def test_limit_keeps_the_logits_it_keeps():
    limited = np.asarray(sampling.limit(jnp.asarray(LOGITS, jnp.float32), 2, 1.0))
    np.testing.assert_allclose(limited[0, :2], LOGITS[0, :2], rtol=1e-6)


def test_greedy_takes_the_first_of_equals():
    logits = jnp.asarray([[[0.0, 2.0, 2.0], [5.0, 1.0, 0.0]]])
    assert sampling.choose(logits, jnp.zeros((1, 2), int), None, config_lib.DecodeConfig()).tolist() == [[1, 0]]


def test_every_row_position_and_seed_has_its_own_key():
    config = config_lib.DecodeConfig(temperature=1.0)
    flat = jnp.zeros((3, 40, 64))
    places = jnp.broadcast_to(jnp.arange(40), (3, 40))

    def draw(seed, rows):
        return np.asarray(sampling.choose(flat, places, sampling.row_keys(seed, rows), config))

    base = draw(0, [0, 1, 2])
    assert (base[0] != base[1]).mean() > 0.8 and (base[1] != base[2]).mean() > 0.8 and len(set(base[0])) > 15
    np.testing.assert_array_equal(draw(0, [2, 0, 1]), base[[2, 0, 1]])  # a row's numbers follow its number, not its place
    assert (draw(1, [0, 1, 2]) != base).mean() > 0.8
    shifted = np.asarray(sampling.choose(flat, places + 1, sampling.row_keys(0, [0, 1, 2]), config))
    np.testing.assert_array_equal(shifted[:, :-1], base[:, 1:])


@pytest.mark.parametrize("changes", [{}, {"top_k": 6, "top_p": 0.9}])
def test_sampled_text_with_a_head_is_the_text_without(runtime, changes):
    """Token for token at one seed, with drafts accepted and rejected; another seed gives another text."""
    prompts = fakes.prompts(3, 9, 20)
    config = config_lib.DecodeConfig(max_new_tokens=24, num_draft=3, temperature=0.8, seed=3, **changes)
    plain = generate.run(runtime.without_drafter(), prompts, config).outputs
    assert [output.tokens for output in generate.run(runtime, prompts, config).outputs] == [output.tokens for output in plain]
    script = np.zeros((3, 256), np.int32)
    for row, (prompt, output) in enumerate(zip(prompts, plain, strict=True)):
        script[row, : len(prompt) + 24] = prompt + output.tokens
    scripted = dataclasses.replace(runtime, drafter=fakes.Scripted(wrong_at=2), drafter_params=jnp.asarray(script))
    result = generate.run(scripted, prompts, config).outputs
    assert [output.tokens for output in result] == [output.tokens for output in plain]
    assert all(output.steps == 12 and output.accepted == [12, 0, 0] for output in result)  # 23 tokens, two a step
    other = generate.run(runtime.without_drafter(), prompts, dataclasses.replace(config, seed=4)).outputs
    assert all(a.tokens != b.tokens for a, b in zip(plain, other, strict=True))


def test_marginal_with_a_drafter_is_the_backbones_distribution():
    """Vocabulary of 6, 4096 rows of one prompt: the second token's frequencies against its exact marginal.

    sum over first tokens a of p(a) p(b | a), in closed form from the backbone. Pearson's statistic has 5 degrees of freedom; 40 is exceeded
    with probability 1.5e-7. The seed is fixed, so the test does not flicker; a drafter's token committed unseen would give thousands.
    """
    config = dataclasses.replace(fakes.BACKBONE, vocab_size=6, num_layers=2, layer_types=("full", "sliding"))
    loaded, count, prompt = fakes.backbone(config, seed=3), 4096, [1, 5, 2]
    runtime = dataclasses.replace(generate.make_runtime(loaded, column_blocks=False), drafter=fakes.Random(few=6))
    result = generate.run(runtime, [prompt] * count, config_lib.DecodeConfig(max_new_tokens=3, num_draft=1, temperature=1.5, seed=11))

    def probs(tokens):
        logits = runtime.prefill_module.apply({"params": loaded.params}, jnp.asarray([tokens])).logits[0, -1]
        return np.asarray(jax.nn.softmax(logits / 1.5), np.float64)

    first = probs(prompt)
    expected = sum(first[a] * probs([*prompt, a]) for a in range(6))
    assert expected.min() * count > 20  # the bound needs no small cells
    for place, exact in ((0, first), (1, expected)):
        found = np.bincount([output.tokens[place] for output in result.outputs], minlength=6)
        assert ((found - exact * count) ** 2 / (exact * count)).sum() < 40
    assert 0 < sum(output.accepted[0] for output in result.outputs) < count  # some drafts were kept, some were not
