"""Loss of every draft step, unrolled exactly as deployed.

For training row i (slots 0..i valid, x_{i+1} pending) and draft step k = 1..M:

    input      embedding of x_{i+k} and the hidden state of step k-1 (of the backbone, h_i, for k = 1)
    sees       donor slots 0..i, query position i+1: the same for every k
    label      the backbone's distribution after x_{i+k}, from h_{i+k}

    i = 4, M = 2:  step 1 takes x_5, h_4 and is labelled by h_5; step 2 takes x_6, step 1's hidden, and is labelled by h_6

Labels are renormalised over what the head can draft: the draft vocabulary and, with a pointer, the tokens of the text.
The losses between label and draft are in objectives.py.

From rows to one number (`loss_sums`, `combine`), with l[k, b, r] the loss and w[k, b, r] the weight of a row, 0 where it has
no label, and n[k, b] the number of sequence b's rows that have one:

    loss = sum_k v[k] total[k] / count[k],   v[k] = step_decay ** (k - 1), normalised
    "tokens":      total[k] = sum_b sum_r w l              count[k] = sum_b n[k, b]          every row counts the same
    "sequences":   total[k] = sum_b sum_r w l / n[k, b]    count[k] = number of b with n > 0    every sequence counts the same

Totals and counts of parts of a batch add up to those of the whole, and counts depend on the batch alone.

After a miss. Text and head's own drafts as inputs differ only behind a draft that differs from the text. When decoding,
drafts behind one that was rejected are never looked at, and one that is kept *is* the text: it equals the backbone's own
token, of which answers are made. So training on the head's own drafts, as far as anything depends on them, is training on
the text in the rows where all earlier drafts were right, and needs no second pass. w[k, b, r] is by `after_miss`:

    "keep"    1: inputs are the text's, right or not what the head would have drafted
    "drop"    1 where the greedy drafts of steps 1..k-1 all equal the text, else 0: what greedy verification looks at
    "weigh"   product over j < k of q_j(x_{i+1+j}), without gradient: the probability that drafts sampled from q come so far
              (after D-PACE, arXiv 2605.18810)

Counts are of all rows with a label, so under "drop" and "weigh" the weight of step k falls with the share of rows that get
there, as it does when decoding: step_decay = 1 adds no other decay to that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from mtp_jax import config as config_lib
from mtp_jax.models import forms, layers
from mtp_jax.models import head as head_lib
from mtp_jax.training import data, objectives, unrolling
from mtp_jax.training import features as features_lib


class Frozen(struct.PyTreeNode):
    """Arrays of the backbone that the loss reads."""

    table: Float[Array, "V D"]  # token embedding
    unembedding: Float[Array, "V D"]  # the same array when tied
    vocab: head_lib.DraftVocab  # plain layout
    final_softcap: float | None = struct.field(pytree_node=False, default=None)  # of the backbone's logits, which are the labels


class Unrolled(struct.PyTreeNode):
    """Draft steps of a batch; the leading axis of the lists is k - 1."""

    loss: Float[Array, "M B R"]  # float32
    drafts: Int[Array, "M B R"]  # the greedy draft
    correct: Bool[Array, "M B R"]  # it equals the text's token x_{i+1+k}
    valid: Bool[Array, "M B R"]  # x_{i+1+k} exists
    answer: Bool[Array, "M B R"]  # x_{i+1+k} is an answer token
    probability: Float[Array, "M B R"]  # q of x_{i+1+k}, without gradient


class LossSums(struct.PyTreeNode):
    """Numerator and denominator of each step's mean; those of parts of a batch add up to those of the whole."""

    total: Float[Array, " M"]
    count: Float[Array, " M"]


class Text(struct.PyTreeNode):
    """What all rows of a batch read."""

    tokens: Int[Array, "B S"]
    answer: Bool[Array, "B S"]
    lengths: Int[Array, " B"]
    hidden: Float[Array, "B S E"]  # after the final norm, and after each tap of the head's
    keys: dict[int, Float[Array, "B K S H"]]
    values: dict[int, Float[Array, "B K S H"]]
    followers: Int[Array, "B S"]  # x_{s+1}
    outside: Bool[Array, "B S"]  # it is not in the draft vocabulary
    unembedding: Float[Array, "B S D"]  # its row
    first_slot: Int[Array, "B C"]  # see objectives.first_slot


def unroll(
    head: forms.AnyHead,
    head_params: Any,
    frozen: Frozen,
    features: features_lib.Features,
    batch: data.Batch,
    num_draft: int,
    *,
    loss: tuple[str, ...] = ("soft_ce",),
    rows_per_chunk: int = 0,
    remat: bool = False,
) -> Unrolled:
    """Run all draft steps of a batch's rows with the text's own tokens as input (teacher forcing).

    Args:
      head_params: differentiated; nothing else is.
      num_draft: M.
      loss: as TrainConfig.loss.
      rows_per_chunk: rows of each sequence that are worked on at a time, so that arrays over the draft vocabulary are
        [B, rows_per_chunk, C] at most, in the backward pass too; 0 is all. Same result, up to rounding.
      remat: compute each draft step again in the backward pass instead of keeping its arrays. Chunks always do.
    """
    text = _read(frozen, features, batch)
    row_mask = jnp.asarray(batch.row_mask)
    rows = jnp.where(row_mask, jnp.asarray(batch.rows), 0)  # padding computes what row 0 does, which is there in every text
    batch_size, count = rows.shape
    chunked = 0 < rows_per_chunk < count
    form = unrolling.of(head, num_draft)
    prepared = form.prepare(head_params, frozen, text)
    run = partial(_unroll_rows, form, config_lib.loss_terms(loss), num_draft, remat or chunked, head_params, frozen, text, prepared)
    if not chunked:
        return run((rows, row_mask))

    chunks = -(-count // rows_per_chunk)

    def split(array: Array) -> Array:
        """[B, R] -> [chunks, B, rows_per_chunk], filled up with rows that do not count."""
        padded = jnp.pad(array, ((0, 0), (0, chunks * rows_per_chunk - count)))
        return padded.reshape(batch_size, chunks, rows_per_chunk).swapaxes(0, 1)

    def join(array: Array) -> Array:
        """[chunks, M, B, rows_per_chunk] -> [M, B, R]."""
        return jnp.moveaxis(array, 0, 2).reshape(num_draft, batch_size, -1)[..., :count]

    return jax.tree.map(join, jax.lax.map(run, (split(rows), split(row_mask))))


def _read(frozen: Frozen, features: features_lib.Features, batch: data.Batch) -> Text:
    tokens = jnp.asarray(batch.tokens)
    followers = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    entries, size = frozen.vocab.index[followers], frozen.vocab.ids.shape[0]
    return Text(
        tokens=tokens,
        answer=jnp.asarray(batch.answer),
        lengths=jnp.asarray(batch.lengths),
        hidden=jnp.asarray(features.hidden),
        keys={layer: jnp.asarray(keys) for layer, keys in features.keys.items()},
        values={layer: jnp.asarray(values) for layer, values in features.values.items()},
        followers=followers,
        outside=entries == size,
        unembedding=frozen.unembedding[followers],
        first_slot=objectives.first_slot(entries, size),
    )


def _unroll_rows(
    form: unrolling.Unrolling,
    terms: tuple[tuple[config_lib.LossName, float], ...],
    num_draft: int,
    remat: bool,
    head_params: Any,
    frozen: Frozen,
    text: Text,
    prepared: Any,
    chosen: tuple[Int[Array, "B R"], Bool[Array, "B R"]],
) -> Unrolled:
    """All draft steps of the chosen rows (and their mask)."""
    rows, row_mask = chosen

    def step(carry: Any, k: int | Int[Array, ""]) -> tuple[Any, Unrolled]:
        output, carry = form.step(head_params, frozen, text, prepared, carry, k, rows)
        return carry, _judge(output, terms, k, frozen, text, rows, row_mask)

    carry = form.start(head_params, frozen, text, prepared, rows)
    if remat:  # a loop, since a compiler may merge the second computation with the first, which keeps the arrays after all
        return jax.lax.scan(jax.checkpoint(step, prevent_cse=False), carry, jnp.arange(1, num_draft + 1))[1]
    steps = []
    for k in range(1, num_draft + 1):
        carry, columns = step(carry, k)
        steps.append(columns)
    return jax.tree.map(lambda *column: jnp.stack(column), *steps)


def _judge(
    output: head_lib.HeadOutput,
    terms: tuple[tuple[config_lib.LossName, float], ...],
    k: int | Int[Array, ""],
    frozen: Frozen,
    text: Text,
    rows: Int[Array, "B R"],
    row_mask: Bool[Array, "B R"],
) -> Unrolled:
    """What draft step k has put forward against its label: a part of Unrolled, [B, R] each."""
    valid = _has_target(row_mask, rows, text.lengths, k)
    # A row without a target gets a label that is all zeros: nothing behind the text can reach a gradient, not even as 0 times infinity.
    label = jnp.where(valid[..., None], unrolling.at(text.hidden[..., : frozen.table.shape[1]], rows + k), 0)  # without taps
    label_vocab = layers.matmul(label.astype(frozen.table.dtype), frozen.vocab.unembedding).astype(jnp.float32)
    slot_logits, label_slots, in_text = None, None, None
    if output.copy is not None:
        slot_logits = jnp.einsum("BRD,BSD->BRS", output.features, text.unembedding).astype(jnp.float32)
        slot_logits = jnp.where(text.outside[:, None], -jnp.inf, slot_logits)
        label_slots = layers.softcap(jnp.einsum("BRD,BSD->BRS", label, text.unembedding).astype(jnp.float32), frozen.final_softcap)
        in_text = text.first_slot[:, None] <= rows[..., None]
    mixture = head_lib.mix(output, slot_logits, text.followers, rows)
    first = head_lib.first_visible(text.followers, rows)
    candidates = objectives.compare(mixture, layers.softcap(label_vocab, frozen.final_softcap), label_slots, in_text, first)
    target = unrolling.at(text.tokens, rows + k + 1)
    occurs = first & (text.followers[:, None] == target[..., None])
    drafts = head_lib.greedy(mixture, frozen.vocab.ids, text.followers)
    return Unrolled(
        loss=objectives.row_loss(terms, candidates, output.hidden, label),
        drafts=drafts,
        correct=(drafts == target) & valid,
        valid=valid,
        answer=unrolling.at(text.answer, rows + k + 1) & valid,
        probability=objectives.probability(mixture, frozen.vocab.index[target], occurs),
    )


def _has_target(row_mask: Array, rows: Array, lengths: Array, k: int | Array) -> Bool[Array, "B R"]:
    """Whether the row counts and x_{i+1+k} exists."""
    return row_mask & (rows + 1 + k < lengths[:, None])


def step_weights(num_draft: int, decay: float) -> Float[Array, " M"]:
    """decay ** (k - 1), normalised to sum to 1."""
    weights = decay ** jnp.arange(num_draft, dtype=jnp.float32)
    return weights / weights.sum()


def row_weights(unrolled: Unrolled, after_miss: config_lib.AfterMiss = "keep") -> Float[Array, "M B R"]:
    """w of the formulas above."""
    valid = unrolled.valid.astype(jnp.float32)
    if after_miss == "keep":
        return valid
    kept = unrolled.correct.astype(jnp.float32) if after_miss == "drop" else unrolled.probability
    return valid * jnp.cumprod(jnp.concatenate([jnp.ones_like(kept[:1]), kept[:-1]]), axis=0)


def loss_sums(unrolled: Unrolled, after_miss: config_lib.AfterMiss = "keep", normalise: config_lib.Normalise = "tokens") -> LossSums:
    """total and count of the formulas above."""
    weights = jax.lax.stop_gradient(row_weights(unrolled, after_miss))
    losses = jnp.where(unrolled.valid, unrolled.loss, 0.0) * weights
    count = _counts(unrolled.valid, normalise)
    if normalise == "tokens":
        return LossSums(total=losses.sum(axis=(1, 2)), count=count)
    return LossSums(total=(losses.sum(axis=2) / jnp.maximum(unrolled.valid.sum(axis=2), 1)).sum(axis=1), count=count)


def batch_counts(batch: data.Batch, num_draft: int, normalise: config_lib.Normalise = "tokens") -> Float[Array, " M"]:
    """`loss_sums(...).count` of a batch, without running the head.

    A batch in parts: the gradient of the whole is the sum of the parts' gradients of `combine`, each with the count of the whole.
    """
    rows, mask, lengths = jnp.asarray(batch.rows), jnp.asarray(batch.row_mask), jnp.asarray(batch.lengths)
    return _counts(jnp.stack([_has_target(mask, rows, lengths, k) for k in range(1, num_draft + 1)]), normalise)


def _counts(valid: Bool[Array, "M B R"], normalise: config_lib.Normalise) -> Float[Array, " M"]:
    counted = valid.sum(axis=(1, 2)) if normalise == "tokens" else valid.any(axis=2).sum(axis=1)
    return counted.astype(jnp.float32)


def combine(sums: LossSums, decay: float) -> Float[Array, ""]:
    """The loss: weighted sum over draft steps of total / count. A step that no row has adds 0."""
    return (sums.total / jnp.maximum(sums.count, 1) * step_weights(sums.total.shape[0], decay)).sum()


def mean_loss(unrolled: Unrolled, decay: float, after_miss: config_lib.AfterMiss = "keep", normalise: config_lib.Normalise = "tokens") -> Float[Array, ""]:
    """The loss of a whole batch; `decay` is TrainConfig.step_decay."""
    return combine(loss_sums(unrolled, after_miss, normalise), decay)


def accept_rates(unrolled: Unrolled) -> Float[Array, " M"]:
    """accept@k, teacher-forced and unconditional: share of answer rows whose first k drafts all equal the text."""
    all_correct = jnp.cumprod(unrolled.correct.astype(jnp.float32), axis=0)
    return jnp.where(unrolled.answer, all_correct, 0.0).sum(axis=(1, 2)) / jnp.maximum(unrolled.answer.sum(axis=(1, 2)), 1)
