"""Soft cross-entropy of every draft step, unrolled exactly as deployed.

For training row i (slots 0..i valid, x_{i+1} pending) and draft step k = 1..M:

    input      embedding of x_{i+k} and the hidden state of step k-1 (of the backbone, h_i, for k = 1)
    sees       donor slots 0..i, query position i+1: the same for every k
    label      the backbone's distribution after x_{i+k}, from h_{i+k}

    i = 4, M = 2:  step 1 takes x_5, h_4 and is labelled by h_5; step 2 takes x_6, step 1's hidden, and is labelled by h_6

Labels are renormalised over what the head can draft: the draft vocabulary and, with a pointer, the tokens of the text.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.models import head as head_lib
from mtp_jax.models import layers
from mtp_jax.training import data
from mtp_jax.training import features as features_lib


class Frozen(struct.PyTreeNode):
    """Arrays of the backbone that the loss reads."""

    table: Float[Array, "V D"]  # token embedding
    unembedding: Float[Array, "V D"]  # the same array when tied
    vocab: head_lib.DraftVocab  # plain layout
    final_softcap: float | None = struct.field(pytree_node=False, default=None)  # of the backbone's logits, which are the labels


class Unrolled(struct.PyTreeNode):
    """Draft steps of a batch; the leading axis of the lists is k - 1."""

    loss: Float[Array, "M B R"]  # cross-entropy in nats
    drafts: Int[Array, "M B R"]  # the greedy draft
    correct: Bool[Array, "M B R"]  # it equals the text's token x_{i+1+k}
    valid: Bool[Array, "M B R"]  # x_{i+1+k} exists
    answer: Bool[Array, "M B R"]  # x_{i+1+k} is an answer token


def unroll(head: head_lib.Head, head_params: Any, frozen: Frozen, features: features_lib.Features, batch: data.Batch, num_draft: int) -> Unrolled:
    """Run all draft steps of a batch's rows with the text's own tokens as input (teacher forcing)."""
    tokens, rows, answer = jnp.asarray(batch.tokens), jnp.asarray(batch.rows), jnp.asarray(batch.answer)
    followers = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))  # x_{s+1}
    outside = frozen.vocab.index[followers] == frozen.vocab.ids.shape[0]  # [B, S]
    slot_rows = frozen.unembedding[followers]  # [B, S, D]
    width = tokens.shape[1]

    def at(array: Array, offset: int) -> Array:
        """Entries of [B, T, ...] at row + offset."""
        place = jnp.minimum(rows + offset, width - 1)
        return jnp.take_along_axis(array, place.reshape(*place.shape, *[1] * (array.ndim - 2)), axis=1)

    final_hidden = jnp.asarray(features.hidden)
    hidden = at(final_hidden, 0)
    steps = []
    for k in range(1, num_draft + 1):
        embedded = frozen.table[at(tokens, k)]
        output = head.apply({"params": head_params}, embedded, hidden, features.keys, features.values, rows, frozen.vocab.unembedding)
        assert isinstance(output, head_lib.HeadOutput)
        slot_logits = None
        if output.copy is not None:
            slot_logits = jnp.einsum("BRD,BSD->BRS", output.features, slot_rows).astype(jnp.float32)
            slot_logits = jnp.where(outside[:, None], -jnp.inf, slot_logits)
        mixture = head_lib.mix(output, slot_logits, followers, rows)
        label = at(final_hidden, k)
        cap = frozen.final_softcap
        loss = soft_cross_entropy(
            mixture,
            layers.softcap(layers.matmul(label.astype(frozen.table.dtype), frozen.vocab.unembedding).astype(jnp.float32), cap),
            layers.softcap(jnp.einsum("BRD,BSD->BRS", label, slot_rows).astype(jnp.float32), cap),
            outside,
            head_lib.first_visible(followers, rows),
        )
        drafts = head_lib.greedy(mixture, frozen.vocab.ids, followers)
        valid = batch.row_mask & (rows + 1 + k < batch.lengths[:, None])
        steps.append((loss, drafts, (drafts == at(tokens, k + 1)) & valid, valid, at(answer, k + 1) & valid))
        hidden = output.hidden
    return Unrolled(*(jnp.stack(column) for column in zip(*steps, strict=True)))


def soft_cross_entropy(
    mixture: head_lib.Mixture,
    label_vocab: Float[Array, "B R C"],
    label_slots: Float[Array, "B R S"],
    outside: Bool[Array, "B S"],
    first: Bool[Array, "B R S"],
) -> Float[Array, "B R"]:
    """-sum over drafted candidates of p log q, with p renormalised over them; float32.

    Args:
      mixture: the draft distribution q.
      label_vocab: the backbone's logits of the draft vocabulary.
      label_slots: the backbone's logit of the token after each slot.
      outside: that token is not in the draft vocabulary.
      first: the slot is visible, and no earlier slot has the same follower.
    """
    label_vocab, label_slots = jax.lax.stop_gradient((label_vocab, label_slots))
    normaliser = nn.logsumexp(label_vocab, axis=-1)
    if mixture.slots is None or mixture.vocab_at_slots is None:
        return -jnp.einsum("BRC,BRC->BR", jnp.exp(label_vocab - normaliser[..., None]), mixture.vocab)
    copied_only = first & outside[:, None]
    normaliser = jnp.logaddexp(normaliser, nn.logsumexp(jnp.where(copied_only, label_slots, -jnp.inf), axis=-1))
    total = jnp.einsum("BRC,BRC->BR", jnp.exp(label_vocab - normaliser[..., None]), mixture.vocab)
    at_slots = jnp.where(first, jnp.exp(label_slots - normaliser[..., None]), 0.0)
    softmax_share = jnp.where(outside[:, None], 0.0, mixture.vocab_at_slots)  # already counted in `total`
    return -total - jnp.einsum("BRS,BRS->BR", at_slots, jnp.where(first, mixture.slots - softmax_share, 0.0))


def step_weights(num_draft: int, decay: float) -> Float[Array, " M"]:
    """decay ** (k - 1), normalised to sum to 1."""
    weights = decay ** jnp.arange(num_draft, dtype=jnp.float32)
    return weights / weights.sum()


def mean_loss(unrolled: Unrolled, decay: float) -> Float[Array, ""]:
    """Weighted sum over draft steps of the mean loss of their valid rows."""
    counted = jnp.where(unrolled.valid, unrolled.loss, 0.0).sum(axis=(1, 2))
    per_step = counted / jnp.maximum(unrolled.valid.sum(axis=(1, 2)), 1)
    return (per_step * step_weights(unrolled.loss.shape[0], decay)).sum()


def accept_rates(unrolled: Unrolled) -> Float[Array, " M"]:
    """accept@k, teacher-forced and unconditional: share of answer rows whose first k drafts all equal the text."""
    all_correct = jnp.cumprod(unrolled.correct.astype(jnp.float32), axis=0)
    return jnp.where(unrolled.answer, all_correct, 0.0).sum(axis=(1, 2)) / jnp.maximum(unrolled.answer.sum(axis=(1, 2)), 1)
