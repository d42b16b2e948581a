"""The loss against numpy over the whole candidate set, and the pairing of inputs and labels on an example worked by hand."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import head as head_lib
from mtp_jax.training import data, fit, loss
from mtp_jax.training import features as features_lib

M, T = 3, 12
TEXT = np.random.default_rng(6).integers(0, 20, T).tolist()  # few tokens, so that they repeat


@pytest.mark.parametrize("pointer", [True, False])
def test_loss_equals_numpy_over_all_candidates(backbone, pointer):
    """Row by row and step by step: cross-entropy of the backbone's distribution, renormalised over draft vocabulary and visible text, with q."""
    config = fakes.HEAD if pointer else dataclasses.replace(fakes.HEAD, pointer=False, pointer_donors=())
    loaded = fakes.head(backbone, config)
    hidden, logits, keys, values = reference.backbone(backbone.params, backbone.config, TEXT)
    batch = batch_of(TEXT)
    features = features_lib.Features(
        hidden=jnp.asarray(hidden, jnp.float32)[None],
        keys={layer: jnp.asarray(keys[layer], jnp.float32)[None] for layer in config.layers_read},
        values={layer: jnp.asarray(values[layer], jnp.float32)[None] for layer in config.donors},
    )
    frozen = fit.make_frozen(backbone, loaded.draft_ids)
    head = head_lib.Head(config, backbone.config)
    unrolled = jax.jit(lambda params: loss.unroll(head, params, frozen, features, batch, M))(loaded.params)

    table = np.asarray(backbone.params["embed"]["embedding"], np.float64)
    unembedding = np.asarray(backbone.params["unembed"]["kernel"], np.float64).T[loaded.draft_ids]
    followers = np.asarray(TEXT[1:] + [0])
    for row in range(T - 2):
        state = hidden[row]
        for k in range(1, min(M, T - 2 - row) + 1):  # x_{row+1+k} exists
            draft, state, copy, gate = reference.draft_step(
                loaded.params, config, backbone.config, table[TEXT[row + k]], state, dict(enumerate(keys)), dict(enumerate(values)), row, unembedding
            )
            q = reference.dense_q(draft, copy, gate, loaded.draft_ids, followers, row, 64)
            candidates = sorted(set(loaded.draft_ids.tolist()) | (set(followers[: row + 1].tolist()) if pointer else set()))
            p = reference.softmax(logits[row + k][candidates])
            floor = np.where(np.isin(candidates, loaded.draft_ids), 0, head_lib.TINY)
            expected = -(p * np.log(q[candidates] + floor)).sum()
            np.testing.assert_allclose(unrolled.loss[k - 1, 0, row], expected, rtol=1e-3, atol=1e-3, err_msg=f"row {row}, step {k}")
            assert int(unrolled.drafts[k - 1, 0, row]) == q.argmax()
            assert bool(unrolled.correct[k - 1, 0, row]) == (q.argmax() == TEXT[row + 1 + k])
            assert bool(unrolled.valid[k - 1, 0, row])
    np.testing.assert_array_equal(np.asarray(unrolled.valid[:, 0]).sum(axis=1), [T - 2, T - 3, T - 4])


def batch_of(text, answer_from=3):
    rows = np.arange(len(text) - 2)[None]
    return data.Batch(
        tokens=np.asarray([text], np.int32),
        lengths=np.asarray([len(text)], np.int32),
        answer=(np.arange(len(text)) >= answer_from)[None],
        rows=rows,
        row_mask=np.ones_like(rows, bool),
        index=np.zeros(1, np.int32),
    )


@dataclasses.dataclass
class Recorder:
    """A head that notes what it is given. Its hidden is what came in plus 100, its logits are zero."""

    calls: list

    def apply(self, variables, embedded, hidden, keys, values, last_slot, unembedding):
        self.calls.append((np.asarray(embedded)[..., 0].tolist(), np.asarray(hidden)[..., 0].tolist(), np.asarray(last_slot).tolist()))
        zeros = jnp.zeros((*last_slot.shape, unembedding.shape[1]))
        return head_lib.HeadOutput(logits=zeros, hidden=hidden + 100.0, features=hidden, copy=None, gate=None)


def test_pairing_by_hand(monkeypatch):
    """x = [10 11 12 13 14 15], table row v is v, h_i = i + 0.5: every input and every label can be read off.

    Row 1: step 1 takes x_2 = 12 and h_1 = 1.5, labelled by h_2; step 2 takes x_3 = 13 and the head's own hidden, labelled by h_3. Slots 0..1.
    The unembedding is all ones, so a label's logits are the hidden state it was made from.
    """
    calls, labels = [], []
    table = jnp.arange(20.0)[:, None]
    vocab = head_lib.DraftVocab(ids=jnp.arange(6), index=jnp.full(20, 6).at[jnp.arange(6)].set(jnp.arange(6)), unembedding=jnp.ones((1, 6)))
    frozen = loss.Frozen(table=table, unembedding=table, vocab=vocab)
    features = features_lib.Features(hidden=jnp.arange(6.0)[None, :, None] + 0.5, keys={}, values={})
    batch = batch_of([10, 11, 12, 13, 14, 15])

    def note_label(mixture, label_vocab, *rest):
        labels.append(np.asarray(label_vocab)[0, :, 0].tolist())
        return jnp.zeros((1, 4))

    monkeypatch.setattr(loss, "soft_cross_entropy", note_label)
    unrolled = loss.unroll(Recorder(calls), {}, frozen, features, batch, 2)  # type: ignore[arg-type]
    assert calls[0] == ([[11.0, 12.0, 13.0, 14.0]], [[0.5, 1.5, 2.5, 3.5]], [[0, 1, 2, 3]])
    assert calls[1] == ([[12.0, 13.0, 14.0, 15.0]], [[100.5, 101.5, 102.5, 103.5]], [[0, 1, 2, 3]])
    assert labels == [[1.5, 2.5, 3.5, 4.5], [2.5, 3.5, 4.5, 5.5]]
    assert unrolled.valid[:, 0].astype(int).tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]  # x_{i+2} for step 1, x_{i+3} for step 2
    assert unrolled.answer[:, 0].astype(int).tolist() == [[0, 1, 1, 1], [1, 1, 1, 0]]


def test_step_weights_by_hand():
    np.testing.assert_allclose(loss.step_weights(3, 0.5), np.array([4, 2, 1]) / 7, rtol=1e-6)
    np.testing.assert_allclose(loss.step_weights(2, 1.0), [0.5, 0.5], rtol=1e-6)


def hand_unrolled():
    """Two steps, one sequence, four rows; row 3 has no second target and row 0 no answer target in step 1."""
    return loss.Unrolled(
        loss=jnp.asarray([[[1.0, 2.0, 3.0, 6.0]], [[4.0, 5.0, 6.0, 99.0]]]),
        drafts=jnp.zeros((2, 1, 4), int),
        correct=jnp.asarray([[[True, True, False, True]], [[True, False, True, False]]]),
        valid=jnp.asarray([[[True, True, True, True]], [[True, True, True, False]]]),
        answer=jnp.asarray([[[False, True, True, True]], [[True, True, True, False]]]),
    )


def test_mean_loss_and_accept_rates_by_hand():
    unrolled = hand_unrolled()
    np.testing.assert_allclose(loss.mean_loss(unrolled, 0.5), 2 / 3 * 3.0 + 1 / 3 * 5.0, rtol=1e-6)
    # step 1: rows 1..3 count, 2 of 3 right; step 2: rows 0..2 count, both steps right only in row 0
    np.testing.assert_allclose(loss.accept_rates(unrolled), [2 / 3, 1 / 3], rtol=1e-6)


def test_padding_rows_carry_no_loss(backbone, head):
    """Rows behind the mask, and tokens behind the length, change neither loss nor rates."""
    module = head_lib.Head(head.config, backbone.config)
    frozen = fit.make_frozen(backbone, head.draft_ids)

    @jax.jit
    def total(batch):
        features = features_lib.compute(backbone_lib.Backbone(backbone.config), backbone.params, batch.tokens, key_layers=(2, 3), value_layers=(2, 3))
        unrolled = loss.unroll(module, head.params, frozen, features, batch, M)
        return loss.mean_loss(unrolled, 0.8), loss.accept_rates(unrolled)

    def padded(filler, row):
        batch = batch_of(TEXT + [filler] * 4)
        mask = batch.rows < T - 2
        return batch.replace(lengths=np.asarray([T], np.int32), row_mask=mask, rows=np.where(mask, batch.rows, row))

    one, two = total(padded(0, 0)), total(padded(9, 5))
    np.testing.assert_allclose(one[0], two[0], rtol=1e-6)
    np.testing.assert_array_equal(one[1], two[1])
