"""Each loss by hand on three tokens, and on the head's two lists of candidates against formulas over the whole vocabulary."""

import dataclasses
import json
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from mtp_jax import config as config_lib
from mtp_jax.models import head as head_lib
from mtp_jax.training import objectives

B, R, S, C, V = 2, 5, 6, 7, 12
IDS = np.array([0, 2, 3, 5, 7, 8, 11])
FOLLOWERS = np.array([[3, 4, 3, 9, 2, 4], [1, 1, 5, 2, 5, 1]])  # in the draft vocabulary or not, once and again
ROWS = np.array([[0, 1, 2, 4, 5], [0, 2, 3, 4, 5]])

# p = 0.5 0.3 0.2, q = 0.25 0.25 0.5
HAND = {
    "hard_ce": 1.386294,  # ln 4
    "soft_ce": 1.247665,  # 0.8 ln 4 + 0.2 ln 2
    "kl": 0.218012,  # less the entropy of p, 1.029653
    "reverse_kl": 0.239278,  # 0.25 ln(0.25 / 0.5) + 0.25 ln(0.25 / 0.3) + 0.5 ln(0.5 / 0.2)
    "tv": 0.3,  # (0.25 + 0.05 + 0.3) / 2
    "lk": 0.356675,  # -ln(0.25 + 0.25 + 0.2)
    "lk_hybrid": 0.289960,  # exp(-2.1) = 0.122456 of kl, the rest of tv
}


@pytest.mark.parametrize("name", HAND)
def test_losses_by_hand(name):
    one_list = objectives.Candidates(log_p=(logs(0.5, 0.3, 0.2),), log_q=(logs(0.25, 0.25, 0.5),))
    two_lists = objectives.Candidates(log_p=(logs(0.2, 0), logs(0, 0.5, 0.3)), log_q=(logs(0.5, 0), logs(0, 0.25, 0.25)))
    other_way = objectives.Candidates(log_p=(logs(0.5, 0), logs(0, 0.2, 0.3)), log_q=(logs(0.25, 0), logs(0, 0.5, 0.25)))
    for candidates in (one_list, two_lists, other_way):
        np.testing.assert_allclose(objectives.DISTRIBUTION_LOSSES[name](candidates), [[HAND[name]]], rtol=1e-5)


def logs(*probabilities):
    """[1, 1, n] logarithms; a 0 is no candidate."""
    return jnp.asarray([[[np.log(p) if p else objectives.LOWEST for p in probabilities]]], jnp.float32)


def test_hidden_loss_by_hand():
    hidden, target = jnp.asarray([[[0.5, 2.0, 1.0, -3.0]]]), jnp.asarray([[[0.0, 0.0, 1.0, 0.0]]])
    np.testing.assert_allclose(objectives.hidden_loss(hidden, target), [[(0.125 + 1.5 + 0.0 + 2.5) / 4]], rtol=1e-6)
    gradient, to_target = jax.grad(lambda *both: objectives.hidden_loss(*both).sum(), argnums=(0, 1))(hidden, target)
    np.testing.assert_allclose(gradient, [[[0.5 / 4, 0.25, 0.0, -0.25]]], rtol=1e-6)
    assert not np.any(to_target)


def test_a_mixture_is_a_weighted_sum():
    candidates = objectives.Candidates(log_p=(logs(0.5, 0.3, 0.2),), log_q=(logs(0.25, 0.25, 0.5),))
    terms = config_lib.loss_terms(("tv:0.9", "soft_ce:0.1", "hidden"))
    found = objectives.row_loss(terms, candidates, jnp.full((1, 1, 2), 3.0), jnp.zeros((1, 1, 2)))
    np.testing.assert_allclose(found, [[0.9 * 0.3 + 0.1 * 1.247665 + 2.5]], rtol=1e-5)


def test_every_name_has_a_loss():
    assert {*objectives.DISTRIBUTION_LOSSES, "hidden"} == set(get_args(config_lib.LossName))


# --- on the two lists of a head with a pointer


def outputs(seed=3):
    """Random draft logits [B, R, C], pointer scores [B, R, S], gates [B, R], and the backbone's logits [B, R, V]."""
    rng = np.random.default_rng(seed)
    arrays = rng.normal(size=(B, R, C)) * 2, rng.normal(size=(B, R, S)), rng.uniform(0.2, 0.7, (B, R)), rng.normal(size=(B, R, V)) * 2
    return [jnp.asarray(array, jnp.float32) for array in arrays]


SEEN = np.arange(S) <= ROWS[..., None]
ENTRY = np.array([np.flatnonzero(IDS == token)[0] if token in IDS else C for token in range(V)])


def weights(scores):
    return jax.nn.softmax(jnp.where(SEEN, scores, -jnp.inf), axis=-1)


def lists(logits, scores, gate, label, *, pointer=True):
    """The mixture, and the candidates as the trainer makes them."""
    entries = jnp.asarray(ENTRY[FOLLOWERS])
    output = head_lib.HeadOutput(logits=logits, hidden=logits, features=logits, copy=weights(scores) if pointer else None, gate=gate if pointer else None)
    mixture = head_lib.mix(output, head_lib.gather_slot_logits(logits, entries), jnp.asarray(FOLLOWERS), jnp.asarray(ROWS))
    in_text = objectives.first_slot(entries, C)[:, None] <= ROWS[..., None]
    label_slots = jnp.take_along_axis(label, jnp.broadcast_to(FOLLOWERS[:, None], (B, R, S)), axis=-1)
    return mixture, objectives.compare(mixture, label[..., IDS], label_slots, in_text, head_lib.first_visible(jnp.asarray(FOLLOWERS), jnp.asarray(ROWS)))


def whole(logits, scores, gate, label, *, pointer=True):
    """p and q over the whole vocabulary, 0 where the head cannot draft, and which those are: written without lists."""
    can = np.zeros((B, R, V), bool)
    can[..., IDS] = True
    q = jnp.zeros((B, R, V)).at[..., IDS].set(jax.nn.softmax(logits, axis=-1))
    if pointer:
        follows = np.eye(V)[FOLLOWERS]  # [B, S, V]
        q = q * (1 - gate[..., None]) + gate[..., None] * jnp.einsum("BRS,BSV->BRV", weights(scores), follows)
        can |= np.einsum("BRS,BSV->BRV", SEEN, follows) > 0
    p = jnp.where(can, jnp.exp(label), 0)
    return p / p.sum(-1, keepdims=True), q, can


def formula(name, p, q, can):
    """A loss [B, R] of whole distributions."""
    log_p, log_q = jnp.log(jnp.where(can, p, 1)), jnp.log(jnp.where(can, q, 1))
    alpha = jnp.minimum(p, q).sum(-1)
    kl, tv = (p * (log_p - log_q)).sum(-1), 1 - alpha
    share = jax.lax.stop_gradient(jnp.exp(-3 * alpha))
    return {
        "hard_ce": -jnp.take_along_axis(log_q, p.argmax(-1)[..., None], axis=-1)[..., 0],
        "soft_ce": -(p * log_q).sum(-1),
        "kl": kl,
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "tv": tv,
        "lk": -jnp.log(alpha),
        "lk_hybrid": share * kl + (1 - share) * tv,
    }[name]


@pytest.mark.parametrize("pointer", [True, False])
@pytest.mark.parametrize("name", HAND)
def test_lists_give_value_and_gradient_of_the_whole_vocabulary(name, pointer):
    """Of every row: the value, and the gradient by logits, pointer scores and gate."""
    *given, label = outputs()
    random = jnp.asarray(np.random.default_rng(4).random((B, R)), jnp.float32)

    def by_lists(*given):
        values = objectives.DISTRIBUTION_LOSSES[name](lists(*given, label, pointer=pointer)[1])
        return (random * values).sum(), values

    def by_formula(*given):
        values = formula(name, *whole(*given, label, pointer=pointer))
        return (random * values).sum(), values

    (one, found), (two, expected) = (jax.jit(jax.grad(of, argnums=(0, 1, 2), has_aux=True))(*given) for of in (by_lists, by_formula))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for left, right in zip(one, two, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    assert [bool(np.any(gradient)) for gradient in one] == [True, pointer, pointer]


def test_every_token_stands_once():
    """Both lists together hold each draftable token once, and q and p sum to 1."""
    _, candidates = lists(*outputs())
    in_vocab, in_slots = (np.asarray(log_p) > objectives.LOWEST for log_p in candidates.log_p)
    for b, r in np.ndindex(B, R):
        tokens = [*IDS[in_vocab[b, r]], *FOLLOWERS[b][in_slots[b, r]]]
        assert sorted(tokens) == sorted({*IDS, *FOLLOWERS[b, : ROWS[b, r] + 1]})
    for logs in (candidates.log_p, candidates.log_q):
        np.testing.assert_allclose(sum(jnp.exp(each).sum(-1) for each in logs), 1, rtol=1e-5)


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "tv", "lk", "lk_hybrid"])
def test_distances_are_zero_where_q_is_p(name):
    _, candidates = lists(*outputs())
    equal = candidates.replace(log_q=candidates.log_p)
    np.testing.assert_allclose(objectives.DISTRIBUTION_LOSSES[name](equal), 0, atol=1e-6)
    assert np.all(objectives.DISTRIBUTION_LOSSES[name](candidates) > 0.05)


def test_labels_get_no_gradient():
    *given, label = outputs()
    for name, of in objectives.DISTRIBUTION_LOSSES.items():
        for pointer in (True, False):
            gradient = jax.grad(lambda label, of=of, pointer=pointer: of(lists(*given, label, pointer=pointer)[1]).sum())(label)
            assert not np.any(gradient), name


def test_probability_of_one_token():
    """In the draft vocabulary, in the text, in both, in neither."""
    first = head_lib.first_visible(jnp.asarray(FOLLOWERS), jnp.asarray(ROWS))
    for pointer in (True, False):
        mixture, _ = lists(*outputs(), pointer=pointer)
        _, q, _ = whole(*outputs(), pointer=pointer)
        for token in range(V):
            found = objectives.probability(mixture, jnp.full((B, R), ENTRY[token]), first & (FOLLOWERS == token)[:, None])
            np.testing.assert_allclose(found, q[..., token], rtol=1e-5, atol=1e-7)


# --- TrainConfig.loss


def test_terms_are_read():
    assert config_lib.loss_terms(("soft_ce",)) == (("soft_ce", 1.0),)
    assert config_lib.loss_terms(("tv:0.9", "soft_ce:0.1", "hidden:2")) == (("tv", 0.9), ("soft_ce", 0.1), ("hidden", 2.0))


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (("l2",), "loss='l2'.*one of hard_ce, soft_ce"),
        (("tv:",), "loss='tv:'.*positive number"),
        (("tv:-1",), "loss='tv:-1'.*positive number"),
        (("tv:inf",), "loss='tv:inf'.*positive number"),
        (("tv:much",), "loss='tv:much'.*positive number"),
        (("tv", "tv:2"), "must name tv once"),
        ((), "at least one term"),
        ("soft_ce", r"loss='soft_ce': must be a sequence of terms"),
    ],
)
def test_bad_terms_are_refused(loss, says):
    with pytest.raises(config_lib.ConfigError, match=says):
        config_lib.TrainConfig(loss=loss)


@pytest.mark.parametrize(("name", "value"), [("after_miss", "forget"), ("normalise", "batch"), ("rows_per_chunk", -1)])
def test_bad_options_are_refused(name, value):
    with pytest.raises(config_lib.ConfigError, match=f"{name}={value!r}: must"):
        config_lib.TrainConfig(**{name: value})


def test_config_survives_json_and_the_command_line():
    config = config_lib.TrainConfig(loss=("tv:0.9", "soft_ce:0.1"), after_miss="drop", normalise="sequences", rows_per_chunk=8)
    back = config_lib.from_dict(config_lib.TrainConfig, json.loads(json.dumps(config_lib.to_dict(config))), where="run.json")
    assert back == config and hash(back) == hash(config)
    flags = "--loss tv:0.9 soft_ce:0.1 --after-miss drop --normalise sequences --rows-per-chunk 8".split()
    assert tyro.cli(config_lib.TrainConfig, args=flags) == config
    assert tyro.cli(config_lib.TrainConfig, args=["--loss", "kl"]) == dataclasses.replace(config_lib.TrainConfig(), loss=("kl",))
