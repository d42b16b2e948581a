"""Sampling: filters against numpy, and the same tokens with and without a head. That the distribution is right: test_lossless.py."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, sampling

LOGITS = np.log(np.array([[0.4, 0.3, 0.15, 0.1, 0.05], [0.05, 0.1, 0.15, 0.3, 0.4]]))


def kept(top_k, top_p, min_p=0.0, logits=LOGITS):
    limited = np.asarray(sampling.limit(jnp.asarray(logits, jnp.float32), top_k, top_p, min_p))
    assert (np.isfinite(limited) | np.isneginf(limited)).all()
    return np.isfinite(limited).astype(int).tolist()


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


@pytest.mark.parametrize(
    "top_k, top_p, min_p, expected",
    [
        (0, 1.0, 1.0, [1, 0, 0, 0, 0]),
        (0, 1.0, 0.7, [1, 1, 0, 0, 0]),  # .3 is .75 times .4
        (0, 1.0, 0.3, [1, 1, 1, 0, 0]),
        (0, 1.0, 0.2, [1, 1, 1, 1, 0]),
        (2, 1.0, 0.2, [1, 1, 0, 0, 0]),
        (0, 0.6, 0.2, [1, 1, 0, 0, 0]),
        (0, 0.8, 0.7, [1, 1, 0, 0, 0]),
    ],
)
def test_min_p_by_hand(top_k, top_p, min_p, expected):
    assert kept(top_k, top_p, min_p) == [expected, expected[::-1]]


def test_equally_probable_tokens_are_all_kept_by_min_p():
    assert kept(0, 1.0, 1.0, np.array([[0.0, 2.0, 2.0, -jnp.inf]])) == [[0, 1, 1, 0]]


def test_min_p_alone_does_not_sort_the_vocabulary():
    text = str(jax.make_jaxpr(lambda logits: sampling.limit(logits, 0, 1.0, 0.1))(jnp.zeros((2, 9))))
    assert "sort" not in text and "top_k" not in text


def test_filters_come_after_the_temperature():
    """The share of .3 in .4 is .75, and .87 at temperature 2."""
    config = config_lib.DecodeConfig(temperature=2.0, min_p=0.8)
    limited = np.asarray(sampling.limited(jnp.asarray(LOGITS, jnp.float32), config))
    np.testing.assert_allclose(limited[0], [np.log(0.4) / 2, np.log(0.3) / 2, -np.inf, -np.inf, -np.inf], rtol=1e-6)


def test_what_is_drawn_for_a_position_has_keys_of_its_own():
    """Keys of rows, positions and purposes: all different."""
    rows, places = sampling.row_keys(0, range(3)), jnp.tile(jnp.arange(5), (3, 1))
    keys = [sampling.keys_at(rows, places, purpose) for purpose in (None, sampling.DRAFT, sampling.ACCEPT)]
    data = np.concatenate([np.asarray(jax.random.key_data(one)).reshape(15, -1) for one in keys])
    assert len(np.unique(data, axis=0)) == 45


def test_an_unknown_accept_rule_is_refused():
    with pytest.raises(config_lib.ConfigError, match="accept='typical': must be one of match, rejection"):
        config_lib.DecodeConfig(accept="typical")


def test_limit_against_numpy():
    logits = np.random.default_rng(0).normal(size=(50, 20)) * 3
    for top_k, top_p, min_p in ((4, 1.0, 0), (0, 0.7, 0), (6, 0.9, 0), (0, 1.0, 0.1), (6, 0.9, 0.2), (0, 0.95, 0.05)):
        expected = np.zeros((50, 20), int)
        for row, values in enumerate(logits):
            order = np.argsort(-values)[: top_k or 20]
            probs = np.exp(values[order]) / np.exp(values[order]).sum()
            count = int(np.searchsorted(np.cumsum(probs), top_p)) + 1  # the smallest set that reaches top_p
            expected[row, order[:count]] = probs[:count] >= min_p * probs[0]
        assert kept(top_k, top_p, min_p, logits) == expected.tolist()


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


@pytest.mark.parametrize("changes", [{}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}])
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
