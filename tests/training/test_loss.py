"""The loss against numpy over the whole candidate set, and the pairing of inputs and labels on an example worked by hand."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from mtp_jax import config as config_lib
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import head as head_lib
from mtp_jax.training import data, fit, loss, objectives
from mtp_jax.training import features as features_lib

M, T = 3, 12
TEXT = np.random.default_rng(6).integers(0, 20, T).tolist()  # few tokens, so that they repeat


@pytest.mark.parametrize("pointer", [True, False])
@pytest.mark.parametrize("terms", [("soft_ce",), ("tv:2", "reverse_kl:0.5", "hidden")])
def test_loss_equals_numpy_over_all_candidates(backbone, pointer, terms):
    """Row by row and step by step: losses between the backbone's distribution, renormalised over draft vocabulary and visible text, and q."""
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
    unrolled = jax.jit(lambda params: loss.unroll(head, params, frozen, features, batch, M, loss=terms))(loaded.params)

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
            log_q = np.log(q[candidates] + floor)
            expected = -(p * log_q).sum()
            if terms != ("soft_ce",):
                off = np.abs(state - hidden[row + k])
                smooth = np.where(off < 1, off**2 / 2, off - 0.5).mean()
                expected = np.abs(p - q[candidates]).sum() + 0.5 * (q[candidates] * (log_q - np.log(p))).sum() + smooth
            np.testing.assert_allclose(unrolled.loss[k - 1, 0, row], expected, rtol=1e-3, atol=1e-3, err_msg=f"row {row}, step {k}")
            assert int(unrolled.drafts[k - 1, 0, row]) == q.argmax()
            assert bool(unrolled.correct[k - 1, 0, row]) == (q.argmax() == TEXT[row + 1 + k])
            assert bool(unrolled.valid[k - 1, 0, row])
            np.testing.assert_allclose(unrolled.probability[k - 1, 0, row], q[TEXT[row + 1 + k]], rtol=1e-3, atol=1e-6)
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
        return objectives.Candidates(log_p=(mixture.vocab,), log_q=(mixture.vocab,))

    monkeypatch.setattr(objectives, "compare", note_label)
    unrolled = loss.unroll(Recorder(calls), {}, frozen, features, batch, 2)  # type: ignore[arg-type]
    assert calls[0] == ([[11.0, 12.0, 13.0, 14.0]], [[0.5, 1.5, 2.5, 3.5]], [[0, 1, 2, 3]])
    assert calls[1] == ([[12.0, 13.0, 14.0, 15.0]], [[100.5, 101.5, 102.5, 103.5]], [[0, 1, 2, 3]])
    assert labels == [[1.5, 2.5, 3.5, 4.5], [2.5, 3.5, 4.5, 0.0]]  # row 3 has no second target, and so no label
    assert unrolled.valid[:, 0].astype(int).tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]  # x_{i+2} for step 1, x_{i+3} for step 2
    assert unrolled.answer[:, 0].astype(int).tolist() == [[0, 1, 1, 1], [1, 1, 1, 0]]


def test_step_weights_by_hand():
    np.testing.assert_allclose(loss.step_weights(3, 0.5), np.array([4, 2, 1]) / 7, rtol=1e-6)
    np.testing.assert_allclose(loss.step_weights(2, 1.0), [0.5, 0.5], rtol=1e-6)


def hand_unrolled():
    """Two steps, two sequences, four rows. Sequence 0: row 3 has no second target and row 0 no answer target in step 1. Sequence 1: one row, one step."""
    one, none = [False, True, False, False], [False] * 4
    return loss.Unrolled(
        loss=jnp.asarray([[[1.0, 2.0, 3.0, 6.0], [jnp.nan, 8.0, jnp.nan, jnp.nan]], [[4.0, 5.0, 6.0, jnp.nan], [jnp.nan] * 4]]),
        drafts=jnp.zeros((2, 2, 4), int),
        correct=jnp.asarray([[[True, True, False, True], none], [[True, False, True, False], none]]),
        valid=jnp.asarray([[[True, True, True, True], one], [[True, True, True, False], none]]),
        answer=jnp.asarray([[[False, True, True, True], none], [[True, True, True, False], none]]),
        probability=jnp.asarray([[[0.5, 0.25, 0.1, 0.9], [0.7] * 4], [[0.3] * 4, [0.7] * 4]]),
    )


# Step 1 sees 1 2 3 6 and 8. Step 2 sees 4 5 6: all, those of rows 0 and 1 (their first draft is right), or 0.5 0.25 0.1 of them.
BY_HAND = {
    ("keep", "tokens"): ([20, 15], [5, 3]),
    ("drop", "tokens"): ([20, 9], [5, 3]),
    ("weigh", "tokens"): ([20, 3.85], [5, 3]),
    ("keep", "sequences"): ([12 / 4 + 8, 15 / 3], [2, 1]),
    ("drop", "sequences"): ([12 / 4 + 8, 9 / 3], [2, 1]),
    ("weigh", "sequences"): ([12 / 4 + 8, 3.85 / 3], [2, 1]),
}


@pytest.mark.parametrize(("after_miss", "normalise"), BY_HAND)
def test_sums_and_mean_loss_by_hand(after_miss, normalise):
    total, count = BY_HAND[after_miss, normalise]
    sums = loss.loss_sums(hand_unrolled(), after_miss, normalise)
    np.testing.assert_allclose(sums.total, total, rtol=1e-6)
    np.testing.assert_array_equal(sums.count, count)
    expected = 2 / 3 * total[0] / count[0] + 1 / 3 * total[1] / count[1]
    np.testing.assert_allclose(loss.mean_loss(hand_unrolled(), 0.5, after_miss, normalise), expected, rtol=1e-6)


def test_a_third_step_is_reached_through_both_before_it():
    """Probabilities 0.5 and 0.25 of the first two: 1, 0.5, 0.125; drafts right, wrong: 1, 1, 0."""
    cells = lambda *values: jnp.asarray(values).reshape(3, 1, 1)  # noqa: E731
    unrolled = loss.Unrolled(
        loss=cells(1.0, 1.0, 1.0),
        drafts=cells(0, 0, 0),
        correct=cells(True, False, True),
        valid=cells(True, True, True),
        answer=cells(True, True, True),
        probability=cells(0.5, 0.25, 0.9),
    )
    np.testing.assert_allclose(loss.row_weights(unrolled, "weigh")[:, 0, 0], [1, 0.5, 0.125])
    np.testing.assert_array_equal(loss.row_weights(unrolled, "drop")[:, 0, 0], [1, 1, 0])


def test_accept_rates_by_hand():
    # step 1: rows 1..3 count, 2 of 3 right; step 2: rows 0..2 count, both steps right only in row 0
    np.testing.assert_allclose(loss.accept_rates(hand_unrolled()), [2 / 3, 1 / 3], rtol=1e-6)


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


# --- the same in parts, in chunks, and with what lies behind the text


def ragged():
    """Four sequences of 12, 9, 12 and 3 tokens in one batch; the last has too few for a second step."""
    rng = np.random.default_rng(7)
    texts = [TEXT, rng.integers(0, 20, 9).tolist(), [3, 4] * 6, rng.integers(0, 20, 3).tolist()]
    batches = [batch_of(text + [0] * (T - len(text))) for text in texts]
    lengths = np.asarray([len(text) for text in texts], np.int32)
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
    return whole.replace(lengths=lengths, row_mask=whole.rows < lengths[:, None] - 2)


def case(backbone, head_config):
    """Of a random head: its parameters, and functions that make features of a batch and unroll draft steps."""
    loaded = fakes.head(backbone, head_config)
    module, frozen = head_lib.Head(head_config, backbone.config), fit.make_frozen(backbone, loaded.draft_ids)
    donors = tuple(sorted(set(head_config.donors)))

    def features(batch):
        module = backbone_lib.Backbone(backbone.config)
        return features_lib.compute(module, backbone.params, batch.tokens, key_layers=head_config.layers_read, value_layers=donors)

    def unroll(params, features, batch, num_draft=2, **options):
        return loss.unroll(module, params, frozen, features, batch, num_draft, **options)

    return loaded.params, features, unroll


PLAIN = dataclasses.replace(fakes.HEAD, pointer=False, pointer_donors=())
HEADS = {
    "pointer": fakes.HEAD,
    "centroids": dataclasses.replace(PLAIN, output="centroids", num_centroids=6, top_centroids=2),
}


@pytest.mark.parametrize("after_miss", ["keep", "drop", "weigh"])
@pytest.mark.parametrize("normalise", ["tokens", "sequences"])
def test_parts_of_a_batch_add_up(after_miss, normalise):
    """Sums of two halves are those of the whole; the loss of each half with the counts of the whole adds up to the loss."""
    whole = hand_unrolled()
    halves = [jax.tree.map(lambda leaf, i=i: leaf[:, i : i + 1], whole) for i in (0, 1)]
    sums, parts = loss.loss_sums(whole, after_miss, normalise), [loss.loss_sums(half, after_miss, normalise) for half in halves]
    jax.tree.map(lambda total, *each: np.testing.assert_allclose(sum(each), total, rtol=1e-6), sums, *parts)
    np.testing.assert_allclose(sum(loss.combine(part.replace(count=sums.count), 0.5) for part in parts), loss.combine(sums, 0.5), rtol=1e-6)


def test_gradients_of_two_halves_add_up_to_the_batch(backbone):
    """Halves with unequal numbers of rows; their counts come from the batch alone."""
    after_miss, normalise = "weigh", "sequences"
    params, features, unroll = case(backbone, fakes.HEAD)
    batch = ragged()
    read = features(batch)

    @jax.jit
    def gradient(params, features, batch, count):
        def objective(params):
            return loss.combine(loss.loss_sums(unroll(params, features, batch), after_miss, normalise).replace(count=count), 0.8)

        return jax.value_and_grad(objective)(params)

    def half(tree, i):
        return jax.tree.map(lambda leaf: leaf[2 * i : 2 * i + 2], tree)

    count = loss.batch_counts(batch, 2, normalise)
    parts = [gradient(params, half(read, i), half(batch, i), count) for i in (0, 1)]
    whole = jax.jit(jax.value_and_grad(lambda params: loss.mean_loss(unroll(params, read, batch), 0.8, after_miss, normalise)))(params)
    assert_close(jax.tree.map(lambda one, two: one + two, *parts), whole)


def assert_close(found, expected, tolerance=3e-6):
    """Equal up to rounding: the norm of the difference against that of all leaves together."""
    difference = jax.tree.map(lambda one, two: jnp.square(one - two).sum(), found, expected)
    size = sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(expected))
    assert np.sqrt(sum(jax.tree.leaves(difference)) / size) < tolerance


@pytest.mark.parametrize("name", HEADS)
def test_chunks_and_remat_change_nothing(backbone, name):
    """Every field, and the gradient, with a mixture of losses; 10 rows are two chunks of 4 and one of 2."""
    params, features, unroll = case(backbone, HEADS[name])
    batch = ragged()
    read = features(batch)

    def both(**options):
        def objective(params):
            unrolled = unroll(params, read, batch, loss=("tv", "soft_ce:0.1", "hidden:0.2"), **options)
            return loss.mean_loss(unrolled, 0.8, "weigh"), unrolled

        return jax.jit(jax.value_and_grad(objective, has_aux=True))(params)

    (expected, whole), whole_gradient = both()
    for options in ({"rows_per_chunk": 4}, {"remat": True}):
        (found, unrolled), gradient = both(**options)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        for field in ("drafts", "correct", "valid", "answer"):
            np.testing.assert_array_equal(getattr(unrolled, field), getattr(whole, field), err_msg=field)
        for field in ("loss", "probability"):
            one, two = (jnp.where(whole.valid, getattr(each, field), 0) for each in (unrolled, whole))
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6, err_msg=field)
        assert_close(gradient, whole_gradient)


@pytest.mark.parametrize("name", ["hard_ce", "soft_ce", "kl", "reverse_kl", "tv", "lk", "lk_hybrid"])
def test_centroid_heads_are_compared_over_all_entries(backbone, name):
    """Step 1: q is the softmax of the head's own logits, those of clusters that were not scored included."""
    config = HEADS["centroids"]
    params, features, unroll = case(backbone, config)
    batch = ragged()
    read = features(batch)
    frozen = fit.make_frozen(backbone, fakes.head(backbone, config).draft_ids)
    embedded = frozen.table[jnp.asarray(batch.tokens)[:, 1:11]]
    logits = (
        head_lib.Head(config, backbone.config)
        .apply({"params": params}, embedded, read.hidden[:, :10], read.keys, read.values, batch.rows, frozen.vocab.unembedding)
        .logits
    )  # type: ignore[union-attr]
    p = np.asarray(jax.nn.softmax(read.hidden[:, 1:11] @ frozen.vocab.unembedding), np.float64)
    q = np.asarray(jax.nn.softmax(logits), np.float64)
    alpha = np.minimum(p, q).sum(-1)
    kl, share = (p * np.log(p / q)).sum(-1), np.exp(-3 * alpha)
    expected = {
        "hard_ce": -np.log(np.take_along_axis(q, p.argmax(-1)[..., None], -1))[..., 0],
        "soft_ce": -(p * np.log(q)).sum(-1),
        "kl": kl,
        "reverse_kl": (q * np.log(q / p)).sum(-1),
        "tv": 1 - alpha,
        "lk": -np.log(alpha),
        "lk_hybrid": share * kl + (1 - share) * (1 - alpha),
    }[name]
    unrolled = unroll(params, read, batch, loss=(name,))
    np.testing.assert_allclose(jnp.where(unrolled.valid[0], unrolled.loss[0], 0), np.where(unrolled.valid[0], expected, 0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_keep_one_dtype(backbone, dtype):
    """Hidden states stored wider than the backbone's parameters, as features in float32 are."""
    config = dataclasses.replace(backbone.config, dtype=dtype)
    head_config = HEADS["pointer"]
    cast = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), tree)  # noqa: E731
    frozen = fit.make_frozen(backbone, fakes.head(backbone).draft_ids)
    frozen = frozen.replace(
        table=cast(frozen.table), unembedding=cast(frozen.unembedding), vocab=frozen.vocab.replace(unembedding=cast(frozen.vocab.unembedding))
    )
    params = jax.eval_shape(lambda: head_lib.init_params(head_config, config, jax.random.key(0)))
    batch, (_, features, _) = ragged(), case(backbone, head_config)
    module = head_lib.Head(head_config, config)
    shapes = [jax.eval_shape(lambda *given, n=n: loss.unroll(module, *given, batch, M, rows_per_chunk=n), params, frozen, features(batch)) for n in (0, 4)]
    assert shapes[0] == shapes[1] and shapes[0].loss.dtype == jnp.float32


def test_nothing_behind_the_text_reaches_loss_or_gradient(backbone):
    """Hidden states behind each text that are not numbers, K/V there that are large: no bit changes."""
    params, features, unroll = case(backbone, fakes.HEAD)
    batch = ragged()
    read = features(batch)
    behind = np.arange(T) >= batch.lengths[:, None]
    spoiled = read.replace(
        hidden=jnp.where(behind[..., None], jnp.nan, read.hidden),
        keys={layer: jnp.where(behind[:, None, :, None], 1e4, keys) for layer, keys in read.keys.items()},
        values={layer: jnp.where(behind[:, None, :, None], 1e4, values) for layer, values in read.values.items()},
    )

    @jax.jit
    def total(params, features):
        every = ("hard_ce", "soft_ce", "kl", "reverse_kl", "tv", "lk", "lk_hybrid", "hidden")
        return jax.value_and_grad(lambda params: loss.mean_loss(unroll(params, features, batch, M, loss=every), 0.8, "weigh", "sequences"))(params)

    one, two = total(params, read), total(params, spoiled)
    assert np.isfinite(two[0])
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_chunks_keep_memory_small():
    """2 sequences, all 512 rows, 4 steps, a draft vocabulary of 262,144: one [B, T, C] array alone is 1,074 MB. Compiled, not run."""
    batch_size, length, vocab_size, width, num_draft = 2, 512, 262_144, 32, 4
    config = config_lib.BackboneConfig(vocab_size=vocab_size, width=width, mlp_width=48, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8)
    head_config = config_lib.head_config_for(config, draft_vocab_size=vocab_size)
    head = head_lib.Head(head_config, config)
    real, whole = (lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)), (lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32))
    vocab = head_lib.DraftVocab(ids=whole(vocab_size), index=whole(vocab_size), unembedding=real(width, vocab_size))
    frozen = loss.Frozen(table=real(vocab_size, width), unembedding=real(vocab_size, width), vocab=vocab)
    kv = {0: real(batch_size, 2, length, 8)}
    features = features_lib.Features(hidden=real(batch_size, length, width), keys=kv, values=kv)
    truth = jax.ShapeDtypeStruct((batch_size, length), jnp.bool_)
    tokens, lengths = whole(batch_size, length), whole(batch_size)
    batch = data.Batch(tokens=tokens, lengths=lengths, answer=truth, rows=tokens, row_mask=truth, index=lengths)  # type: ignore[arg-type]

    def megabytes(rows_per_chunk):
        def objective(head_params, frozen, features, batch):
            return loss.mean_loss(loss.unroll(head, head_params, frozen, features, batch, num_draft, rows_per_chunk=rows_per_chunk), 0.8)

        params = jax.eval_shape(lambda: head_lib.init_params(head_config, config, jax.random.key(0)))
        compiled = jax.jit(jax.value_and_grad(objective)).lower(params, frozen, features, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 1e6

    one_chunk = batch_size * 16 * vocab_size * 4 / 1e6  # 34 MB
    assert megabytes(rows_per_chunk=16) < 6 * one_chunk
    assert megabytes(rows_per_chunk=0) > 9 * 1074
