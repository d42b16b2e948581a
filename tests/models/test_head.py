"""The head's draft step, its mixture and its greedy choice against numpy over the whole vocabulary."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from mtp_jax.config import ConfigError
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import head as head_lib
from mtp_jax.models import layers

TEXT = np.random.default_rng(4).integers(0, 64, 13).tolist()
CONFIGS = {
    "two layers, two pointers": fakes.HEAD,
    "inputs as they are": dataclasses.replace(fakes.HEAD, input_norms=False),
    "query at p": dataclasses.replace(fakes.HEAD, query_position="last"),
    "pointer over two donors": dataclasses.replace(fakes.HEAD, pointer_donors=(2, 3), pointer_heads=1),
    "no pointer, as wide as the backbone": dataclasses.replace(fakes.HEAD, pointer=False, pointer_donors=(), width=32),
}


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, backbone):
    """A head, and what it reads: rows 1..11 of TEXT in parallel, with the K/V of the whole text."""
    config = CONFIGS[request.param]
    loaded = fakes.head(backbone, config)
    hidden, _, keys, values = reference.backbone(backbone.params, backbone.config, TEXT)
    return config, loaded, hidden, dict(enumerate(keys)), dict(enumerate(values))


@pytest.mark.parametrize("column_blocks", [False, True])
def test_draft_step_equals_numpy(backbone, case, column_blocks):
    config, loaded, hidden, keys, values = case
    rows = np.arange(1, 12)
    table = np.asarray(backbone.params["embed"]["embedding"])
    vocab = head_lib.draft_vocab(jnp.asarray(loaded.draft_ids), backbone.params, backbone.config, column_blocks=column_blocks)
    params = layers.to_column_blocks(loaded.params) if column_blocks else loaded.params
    as_kv = {donor: jnp.asarray(keys[donor], jnp.float32)[None] for donor in config.layers_read}
    as_values = {donor: jnp.asarray(values[donor], jnp.float32)[None] for donor in config.donors}
    embedded, states = table[TEXT][rows + 1], hidden[rows].astype(np.float32)
    head = head_lib.Head(config, backbone.config, column_blocks)
    followers = np.asarray(TEXT[1:] + [0])

    @jax.jit
    def draft(params):
        output = head.apply({"params": params}, embedded[None], states[None], as_kv, as_values, rows[None], vocab.unembedding)
        slot_logits = head_lib.gather_slot_logits(output.logits, vocab.index[followers][None])
        mixture = head_lib.mix(output, slot_logits, jnp.asarray(followers)[None], jnp.asarray(rows)[None])
        return output, mixture, head_lib.greedy(mixture, vocab.ids, jnp.asarray(followers)[None])[0]

    output, mixture, chosen = draft(params)

    unembedding = np.asarray(backbone.params["unembed"]["kernel"]).T[loaded.draft_ids]
    outside_drafted = 0
    for place, row in enumerate(rows):
        logits, recurrent, copy, gate = reference.draft_step(
            loaded.params, config, backbone.config, embedded[place], states[place], keys, values, int(row), unembedding
        )
        np.testing.assert_allclose(output.logits[0, place], logits, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(output.hidden[0, place], recurrent, rtol=1e-4, atol=1e-4)
        q = reference.dense_q(logits, copy, gate, loaded.draft_ids, followers, int(row), 64)
        if config.pointer:
            np.testing.assert_allclose(output.gate[0, place], gate, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(output.copy[0, place, : row + 1], copy, rtol=1e-4, atol=1e-5)
            assert (np.asarray(output.copy)[0, place, row + 1 :] == 0).all()
        np.testing.assert_allclose(dense(mixture, loaded.draft_ids, followers, place), q, rtol=1e-3, atol=1e-6)
        assert int(chosen[place]) == q.argmax()
        outside_drafted += int(int(chosen[place]) not in loaded.draft_ids)
    assert outside_drafted > 0 or not config.pointer  # a token of the text outside the draft vocabulary was drafted


def dense(mixture, ids, followers, place):
    """The mixture over the whole vocabulary, read as its docstring says: the entry of a slot replaces the token's own."""
    q = np.zeros(64)
    q[ids] = np.exp(mixture.vocab[0, place])
    if mixture.slots is not None:
        for slot, value in enumerate(np.exp(np.asarray(mixture.slots[0, place], np.float64))):
            if value > 0:
                q[followers[slot]] = value
    return q


def hand_mixture(copy, gate, logits, followers, last_slot, ids):
    output = head_lib.HeadOutput(
        logits=jnp.asarray([[logits]]), hidden=jnp.zeros((1, 1, 1)), features=jnp.zeros((1, 1, 1)), copy=jnp.asarray([[copy]]), gate=jnp.asarray([[gate]])
    )
    index = np.full(10, len(ids))
    index[ids] = np.arange(len(ids))
    slot_logits = head_lib.gather_slot_logits(output.logits, jnp.asarray(index[followers])[None])
    return head_lib.mix(output, slot_logits, jnp.asarray(followers)[None], jnp.asarray([[last_slot]]))


def test_mixture_by_hand():
    """Draft vocabulary [2 5], softmax [1/4 3/4], gate 1/2, text followers 7 2 7 | 9 with weights .3 .2 .5 | 0: q(7) = .4, q(2) = .225, q(5) = .375."""
    followers = np.array([7, 2, 7, 9])
    mixture = hand_mixture([0.3, 0.2, 0.5, 0.0], 0.5, np.log([0.25, 0.75]).tolist(), followers, 2, [2, 5])
    np.testing.assert_allclose(np.exp(mixture.vocab[0, 0]), [0.125, 0.375], rtol=1e-5)
    np.testing.assert_allclose(np.exp(mixture.slots[0, 0]), [0.4, 0.225, 0.0, 0.0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.exp(mixture.vocab_at_slots[0, 0]), [0.0, 0.125, 0.0, 0.0], rtol=1e-5)
    assert head_lib.greedy(mixture, jnp.asarray([2, 5]), jnp.asarray(followers)[None]).tolist() == [[7]]  # only because its occurrences add up


def test_greedy_takes_the_softmax_token_where_it_leads():
    mixture = hand_mixture([0.6, 0.4], 0.5, np.log([0.25, 0.75]).tolist(), np.array([7, 2]), 1, [2, 5])
    assert head_lib.greedy(mixture, jnp.asarray([2, 5]), jnp.asarray([[7, 2]])).tolist() == [[5]]


def test_tokens_after_the_last_slot_are_ignored():
    reads = [hand_mixture([0.3, 0.7, 0.0, 0.0], 0.9, [0.0, 1.0], np.array([7, 2, *rest]), 1, [2, 5]) for rest in ([7, 2], [2, 2], [9, 5])]
    for mixture in reads:
        np.testing.assert_array_equal(mixture.slots[0, 0, :2], reads[0].slots[0, 0, :2])
        assert (np.asarray(mixture.slots)[0, 0, 2:] == np.finfo(np.float32).min).all()


def test_first_visible_by_hand():
    grid = head_lib.first_visible(jnp.asarray([[4, 7, 4, 7, 1]]), jnp.asarray([[0, 2, 4]]))
    assert np.asarray(grid)[0].astype(int).tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 1]]


def test_gradients_are_finite_and_reach_every_parameter(backbone, case):
    """With tokens of the text both inside and outside the draft vocabulary, repeated and not."""
    config, loaded, hidden, keys, values = case
    rows = np.array([[0, 3, 9]])
    followers = jnp.asarray([TEXT[1:] + [0]])
    vocab = head_lib.draft_vocab(jnp.asarray(loaded.draft_ids), backbone.params, backbone.config)
    as_kv = {donor: jnp.asarray(keys[donor], jnp.float32)[None] for donor in config.layers_read}
    as_values = {donor: jnp.asarray(values[donor], jnp.float32)[None] for donor in config.donors}
    embedded = backbone.params["embed"]["embedding"][jnp.asarray(TEXT)[rows + 1]]

    def total(params):
        state, out = jnp.asarray(hidden, jnp.float32)[rows], 0.0
        for _ in range(2):
            output = head_lib.Head(config, backbone.config).apply({"params": params}, embedded, state, as_kv, as_values, jnp.asarray(rows), vocab.unembedding)
            state = output.hidden
            mixture = head_lib.mix(output, head_lib.gather_slot_logits(output.logits, vocab.index[followers]), followers, jnp.asarray(rows))
            out += mixture.vocab.sum()
            if mixture.slots is not None:
                out += jnp.where(head_lib.first_visible(followers, jnp.asarray(rows)), mixture.slots, 0.0).sum()
        return out

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(total))(loaded.params)):
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0, jax.tree_util.keystr(path)


def test_param_shapes_and_init(backbone):
    shapes = head_lib.param_shapes(fakes.HEAD, backbone.config)
    assert shapes["pre/kernel"] == (64, 16) and shapes["out/kernel"] == (16, 32) and shapes["pointer_2_q/kernel"] == (16, 24)
    assert shapes["gate_bias"] == (2,) and "layers_1_k/kernel" not in shapes
    first, same, other = (head_lib.init_params(fakes.HEAD, backbone.config, jax.random.key(seed)) for seed in (0, 0, 1))
    assert jax.tree.all(jax.tree.map(np.array_equal, first, same))
    assert not np.array_equal(first["pre"]["kernel"], other["pre"]["kernel"])
    assert float(first["gate_bias"][0]) == head_lib.GATE_BIAS


def test_a_head_for_another_backbone_is_refused(backbone):
    with pytest.raises(ConfigError, match="backbone_layers=4: this backbone has 5 layers"):
        head_lib.init_params(fakes.HEAD, dataclasses.replace(backbone.config, num_layers=5, layer_types=()), jax.random.key(0))


def test_draft_vocab_looks_up_both_ways(backbone):
    vocab = head_lib.draft_vocab(jnp.asarray([3, 60, 7]), backbone.params, backbone.config)
    assert vocab.index[jnp.asarray([3, 60, 7, 0, 63])].tolist() == [0, 1, 2, 3, 3]
    np.testing.assert_array_equal(vocab.unembedding, backbone_lib.unembedding_rows(backbone.params, backbone.config, jnp.asarray([3, 60, 7])).T)
