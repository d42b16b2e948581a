"""Losses between the backbone's next-token distribution p and the head's draft distribution q.

Both are over what the head can draft: the draft vocabulary and, with a pointer, the tokens of the text so far. p is
renormalised over them and has no gradient. Every loss takes `Candidates`, gives a number for each row in float32, and is
smallest where q is p (hard_ce: where q is certain of the backbone's greedy token). A mixture is a weighted sum of them:
`TrainConfig.loss`.

    hard_ce      -log q(argmax p)                      the usual cross-entropy with the backbone's greedy token
    soft_ce      -sum p log q                          distillation (Hinton et al. 2015); the gradient is that of kl
    kl           sum p log(p / q)                      soft_ce less the entropy of p
    reverse_kl   sum q log(q / p)                      seeks one mode of p (Gu et al. 2024, MiniLLM)
    tv           sum |p - q| / 2                       the share of sampled drafts that is rejected (Leviathan et al. 2023)
    lk           -log a                                a = sum min(p, q) = 1 - tv, the acceptance (arXiv 2602.23881)
    lk_hybrid    l kl + (1 - l) tv,  l = exp(-3 a)     l without gradient, of each row (arXiv 2602.23881)
    hidden       smooth L1 of the recurrent state      against the backbone's hidden state of its place (Li et al. 2024, EAGLE)
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from mtp_jax import config as config_lib
from mtp_jax.models import head as head_lib

LK_RATE = 3.0  # eta of arXiv 2602.23881: how fast lk_hybrid goes from kl to tv as acceptance grows
LOWEST = float(jnp.finfo(jnp.float32).min)  # log probability where there is no candidate: finite, so that 0 times it is 0


class Candidates(struct.PyTreeNode):
    """log p and log q over the same candidates, float32, in one list or two (each [B, R, any]).

    Every token stands once: the first list has the draft vocabulary, without tokens that a row's text holds if there is a
    second list, and that one has those. An entry that is no candidate has LOWEST in both.
    """

    log_p: tuple[Float[Array, "B R _"], ...]
    log_q: tuple[Float[Array, "B R _"], ...]


def compare(
    mixture: head_lib.Mixture,
    label_vocab: Float[Array, "B R C"],
    label_slots: Float[Array, "B R S"] | None,
    in_text: Bool[Array, "B R C"] | None,
    first: Bool[Array, "B R S"],
) -> Candidates:
    """Lay the draft distribution and the backbone's logits side by side.

    Args:
      mixture: the draft distribution q.
      label_vocab: the backbone's logits of the draft vocabulary.
      label_slots: the backbone's logit of the token after each slot; this and the next: only with a pointer.
      in_text: that entry of the draft vocabulary follows a slot the row sees.
      first: the slot is visible, and no earlier slot has the same follower.
    """
    label_vocab, label_slots = jax.lax.stop_gradient((label_vocab, label_slots))
    if mixture.slots is None or label_slots is None or in_text is None:
        return Candidates(log_p=(label_vocab - nn.logsumexp(label_vocab, axis=-1, keepdims=True),), log_q=(mixture.vocab,))
    masks = ~in_text, first
    labels = [jnp.where(mask, label, LOWEST) for mask, label in zip(masks, (label_vocab, label_slots), strict=True)]
    normaliser = jnp.logaddexp(*(nn.logsumexp(label, axis=-1, keepdims=True) for label in labels))
    return Candidates(
        log_p=tuple(jnp.where(mask, label - normaliser, LOWEST) for mask, label in zip(masks, labels, strict=True)),
        log_q=tuple(jnp.where(mask, log_q, LOWEST) for mask, log_q in zip(masks, (mixture.vocab, mixture.slots), strict=True)),
    )


def row_loss(
    terms: tuple[tuple[config_lib.LossName, float], ...], candidates: Candidates, hidden: Float[Array, "B R D"], target: Float[Array, "B R D"]
) -> Float[Array, "B R"]:
    """Weighted sum of losses.

    Args:
      terms: names and weights (`config.loss_terms`).
      candidates: p and q of each row.
      hidden: what the head hands to its next draft step, in place of `target`.
      target: the backbone's hidden state that p is made from.
    """
    values = [weight * (hidden_loss(hidden, target) if name == "hidden" else DISTRIBUTION_LOSSES[name](candidates)) for name, weight in terms]
    return jnp.asarray(sum(values[1:], values[0]))


def hard_ce(candidates: Candidates) -> Float[Array, "B R"]:
    """-log q(argmax p); the lowest entry of the first list where several are highest."""
    best = [jnp.argmax(log_p, axis=-1, keepdims=True) for log_p in candidates.log_p]
    p = [jnp.take_along_axis(log_p, place, axis=-1)[..., 0] for log_p, place in zip(candidates.log_p, best, strict=True)]
    q = [jnp.take_along_axis(log_q, place, axis=-1)[..., 0] for log_q, place in zip(candidates.log_q, best, strict=True)]
    return -q[0] if len(q) == 1 else -jnp.where(p[1] > p[0], q[1], q[0])


def soft_ce(candidates: Candidates) -> Float[Array, "B R"]:
    """-sum p log q, in nats."""
    return -_total(candidates, lambda log_p, log_q: jnp.exp(log_p) * log_q)


def kl(candidates: Candidates) -> Float[Array, "B R"]:
    """sum p log(p / q), in nats."""
    return _total(candidates, lambda log_p, log_q: jnp.exp(log_p) * (log_p - log_q))


def reverse_kl(candidates: Candidates) -> Float[Array, "B R"]:
    """sum q log(q / p), in nats."""
    return _total(candidates, lambda log_p, log_q: jnp.exp(log_q) * (log_q - log_p))


def tv(candidates: Candidates) -> Float[Array, "B R"]:
    """Total variation, sum |p - q| / 2, in 0..1."""
    return _total(candidates, lambda log_p, log_q: jnp.abs(jnp.exp(log_p) - jnp.exp(log_q))) / 2


def acceptance(candidates: Candidates) -> Float[Array, "B R"]:
    """sum min(p, q), in 0..1: the probability that a draft sampled from q is kept by rejection sampling."""
    return _total(candidates, lambda log_p, log_q: jnp.exp(jnp.minimum(log_p, log_q)))


def lk(candidates: Candidates) -> Float[Array, "B R"]:
    """-log acceptance: the gradient of tv, larger where little is accepted."""
    return -jnp.log(acceptance(candidates) + head_lib.TINY)


def lk_hybrid(candidates: Candidates) -> Float[Array, "B R"]:
    """kl while little is accepted, where tv has hardly a gradient, and more and more of tv as acceptance grows."""
    share = jnp.exp(-LK_RATE * jax.lax.stop_gradient(acceptance(candidates)))
    return share * kl(candidates) + (1 - share) * tv(candidates)


def hidden_loss(hidden: Float[Array, "B R D"], target: Float[Array, "B R D"]) -> Float[Array, "B R"]:
    """Smooth L1, mean over the width: d^2 / 2 where |d| < 1, |d| - 1/2 beyond."""
    difference = hidden.astype(jnp.float32), jax.lax.stop_gradient(target).astype(jnp.float32)
    return optax.losses.huber_loss(*difference, delta=1.0).mean(axis=-1)


DISTRIBUTION_LOSSES: dict[str, Callable[[Candidates], Float[Array, "B R"]]] = {
    "hard_ce": hard_ce,
    "soft_ce": soft_ce,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": tv,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}


def _total(candidates: Candidates, of: Callable[[Array, Array], Array]) -> Float[Array, "B R"]:
    """Sum of of(log p, log q) over all candidates. Entries that are none add 0 to every sum here."""
    sums = [of(log_p, log_q).sum(axis=-1) for log_p, log_q in zip(candidates.log_p, candidates.log_q, strict=True)]
    return sums[0] if len(sums) == 1 else sums[0] + sums[1]


def first_slot(entry_at_slots: Int[Array, "B S"], draft_vocab_size: int) -> Int[Array, "B C"]:
    """The first slot that each entry of the draft vocabulary follows; S where it follows none.

    Args:
      entry_at_slots: draft entry of the token after each slot, C where it has none (`DraftVocab.index` of it).
    """
    batch, slots = entry_at_slots.shape
    none = jnp.full((batch, draft_vocab_size + 1), slots, jnp.int32)
    return none.at[jnp.arange(batch)[:, None], entry_at_slots].min(jnp.arange(slots, dtype=jnp.int32))[:, :draft_vocab_size]


def probability(mixture: head_lib.Mixture, entry: Int[Array, "B R"], occurs: Bool[Array, "B R S"]) -> Float[Array, "B R"]:
    """q of one token of each row, 0 where the head cannot draft it; no gradient.

    Args:
      entry: the token's draft entry; C where it is outside the draft vocabulary.
      occurs: the token follows this visible slot, and no earlier one.
    """
    size = mixture.vocab.shape[-1]
    in_vocab = jnp.take_along_axis(mixture.vocab, jnp.minimum(entry, size - 1)[..., None], axis=-1)[..., 0]
    log_q = jnp.where(entry < size, in_vocab, LOWEST)
    if mixture.slots is not None:  # where a token stands in both lists, this entry is the right one, and never the smaller
        log_q = jnp.maximum(log_q, jnp.where(occurs, mixture.slots, LOWEST).max(axis=-1))
    return jax.lax.stop_gradient(jnp.exp(log_q))
