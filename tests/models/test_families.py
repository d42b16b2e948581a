"""Backbones with the switches of other families, on random weights: the cache, the column blocks, and a head on each type of donor.

That these backbones compute what transformers computes is for tests/golden and test_parity_transformers.py to say.
"""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.config import ConfigError
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache as cache_lib
from mtp_jax.models import head as head_lib
from mtp_jax.models import layers
from mtp_jax.training import data, features, fit, loss

BIASED = dataclasses.replace(
    fakes.BACKBONE,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
    attention_softcap=2.0,
    rope_scaling=config_lib.RopeScaling(kind="llama3", factor=8.0, original_positions=32),
)
# Layers 4 and 5 read the K/V of layers 3 and 2.
GEMMA4 = dataclasses.replace(
    fakes.TIED,
    num_layers=6,
    layer_types=("full", "sliding", "full", "sliding", "sliding", "full"),
    activation="gelu_tanh",
    attention_bias=True,
    qk_norm=True,
    v_norm=True,
    sandwich_norms=True,
    embedding_scale=32**0.5,
    attention_scale=0.5,
    final_softcap=5.0,
    local_rope_theta=30.0,
    rope_scaling=config_lib.RopeScaling(kind="linear", factor=2.0),
    rotary_fraction=0.5,
    full_head_dim=8,
    full_kv_heads=1,
    keys_are_values=True,
    shared_kv_layers=2,
    wide_shared_mlp=True,
    per_layer_input_width=7,
    per_layer_vocab_size=66,
    layer_scalars=True,
)
CONFIGS = {"biased": BIASED, "gemma 4": GEMMA4}
TEXTS = np.random.default_rng(3).integers(0, 64, (3, 14))  # much longer than the window of 5


@pytest.fixture(scope="module", params=CONFIGS)
def loaded(request):
    return fakes.backbone(CONFIGS[request.param], seed=2)


@pytest.fixture(scope="module")
def whole(loaded):
    return jax.jit(backbone_lib.Backbone(loaded.config).apply)({"params": loaded.params}, TEXTS)


def test_ragged_cached_forward_in_column_blocks_equals_uncached(loaded, whole):
    """Blocks of 5, of which every row keeps another number, as acceptance does; both layouts at once."""
    apply = jax.jit(backbone_lib.Backbone(loaded.config, column_blocks=True).apply)
    params = backbone_lib.to_column_blocks(loaded.params, loaded.config)
    state, lengths = cache_lib.empty(loaded.config, 3, 20), np.zeros(3, int)
    for keep in [[3, 1, 5], [5, 2, 3], [1, 5, 1], [3, 1, 4], [2, 5, 1]]:
        places = np.minimum(lengths[:, None] + np.arange(5), 13)
        text = TEXTS[np.arange(3)[:, None], places]
        for row in range(3):
            text[row, keep[row] :] = (text[row, keep[row] :] + 7) % 64  # rejected drafts
        output = apply({"params": params}, text, state)
        for row in range(3):
            kept = slice(lengths[row], lengths[row] + keep[row])
            np.testing.assert_allclose(output.logits[row, : keep[row]], whole.logits[row, kept], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(output.hidden[row, : keep[row]], whole.hidden[row, kept], rtol=1e-4, atol=1e-4)
        lengths = lengths + keep
        state = output.cache.replace(lengths=jnp.asarray(lengths))
    assert (lengths == 14).all()


def test_one_token_at_a_time_equals_uncached(loaded, whole):
    apply = jax.jit(backbone_lib.Backbone(loaded.config).apply)
    state = cache_lib.empty(loaded.config, 3, 16)
    for place in range(14):
        output = apply({"params": loaded.params}, TEXTS[:, place : place + 1], state)
        state = output.cache.replace(lengths=output.cache.lengths + 1)
        np.testing.assert_allclose(output.logits[:, 0], whole.logits[:, place], rtol=1e-4, atol=1e-4)


def test_shapes_by_layer():
    """Owners, widths and slots of the Gemma-4-like backbone, by hand."""
    assert [GEMMA4.kv_owner(layer) for layer in range(6)] == [0, 1, 2, 3, 3, 2]
    assert (GEMMA4.donor("full"), GEMMA4.donor("sliding"), GEMMA4.num_kv_layers) == (2, 3, 4)
    assert [GEMMA4.head_dim_of(layer) for layer in range(6)] == [8, 6, 8, 6, 6, 8]
    assert [GEMMA4.mlp_width_of(layer) for layer in range(6)] == [48, 48, 48, 48, 96, 96]
    assert [leaf.shape for leaf in cache_lib.empty(GEMMA4, 2, 9).keys] == [(2, 1, 9, 8), (2, 2, 9, 6), (2, 1, 9, 8), (2, 2, 9, 6)]


def test_frequencies_by_hand():
    """Four pairs at theta 10 000: 1, .1, .01, .001 turns of 2 pi; half of them turning, halved."""
    linear = config_lib.RopeScaling(kind="linear", factor=2.0)
    np.testing.assert_allclose(layers.rope_frequencies(4, 1e4), [1, 0.1, 0.01, 0.001], rtol=1e-5)
    np.testing.assert_allclose(layers.rope_frequencies(4, 1e4, 0.5, linear), [0.5, 0.05, 0, 0], rtol=1e-5)
    # Over 200 pi positions they turn 100, 10, 1 and 0.1 times: two are kept, one is divided, and one is divided that turns 1 = low.
    llama3 = config_lib.RopeScaling(kind="llama3", factor=4.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=628)
    np.testing.assert_allclose(layers.rope_frequencies(4, 1e4, 1.0, llama3), [1, 0.1, 0.0025, 0.00025], rtol=1e-3)
    between = dataclasses.replace(llama3, low_frequency_factor=5.0, high_frequency_factor=25.0)  # 10 turns: a quarter of the way
    np.testing.assert_allclose(layers.rope_frequencies(4, 1e4, 1.0, between)[1], 0.25 * 0.1 + 0.75 * 0.025, rtol=1e-3)


def test_impossible_backbones_are_refused_by_field():
    for change, named in [
        (dict(shared_kv_layers=6), "shared_kv_layers=6"),
        (dict(shared_kv_layers=5), "shared_kv_layers=5: leaves no .'sliding'."),
        (dict(full_kv_heads=3), "num_heads=4: must be a multiple of full_kv_heads=3"),
        (dict(full_head_dim=7), "full_head_dim=7"),
        (dict(rotary_fraction=0.0), "rotary_fraction=0.0"),
        (dict(activation="relu"), "activation='relu'"),
        (dict(final_softcap=-1.0), "final_softcap=-1.0"),
    ]:
        with pytest.raises(ConfigError, match=named):
            dataclasses.replace(GEMMA4, **change)
    with pytest.raises(ConfigError, match="rope_scaling.kind='yarn'"):
        config_lib.RopeScaling(kind="yarn", factor=2.0)  # type: ignore[arg-type]


def test_config_round_trip_and_identity():
    """JSON and back; and an identity does not name switches that are off."""
    values = config_lib.to_dict(GEMMA4)
    assert config_lib.from_dict(config_lib.BackboneConfig, values, where="here") == GEMMA4
    assert "full_head_dim" in GEMMA4.identity() and "dtype" not in GEMMA4.identity()
    sizes = "vocab_size width mlp_width num_layers num_heads num_kv_heads head_dim max_positions"
    assert set(fakes.BACKBONE.identity()) == {*sizes.split(), "rope_theta", "norm_eps", "tied_embeddings", "layer_types", "sliding_window"}
    assert dataclasses.replace(fakes.BACKBONE, layer_scalars=True).identity() != fakes.BACKBONE.identity()


# A head ------------------------------------------------------------------------------------------------------------

M, T, S = 2, 14, 20
HEAD = config_lib.head_config_for(GEMMA4, donors=(2, 3), width=16, mlp_width=24, draft_vocab_size=24, pointer_donors=(2, 3), pointer_heads=2)


def steps(head, params, table, tokens_at, hidden, keys, values, last_slot, unembedding):
    """M draft steps with the text as input."""
    outputs = []
    for k in range(1, M + 1):
        outputs.append(head.apply({"params": params}, table[tokens_at(k)], hidden, keys, values, last_slot, unembedding))
        hidden = outputs[-1].hidden
    return outputs


def test_parallel_draft_steps_equal_step_by_step_decoding():
    """On donors with other head dimensions, key heads, windows and rotations, both of which a later layer shares; in column blocks."""
    backbone = fakes.backbone(GEMMA4, seed=2)
    loaded = fakes.head(backbone, HEAD)
    head, params = head_lib.Head(HEAD, GEMMA4, column_blocks=True), layers.to_column_blocks(loaded.params)
    unembedding = head_lib.draft_vocab(jnp.asarray(loaded.draft_ids), backbone.params, GEMMA4, column_blocks=True).unembedding
    table, module = backbone.params["embed"]["embedding"], backbone_lib.Backbone(GEMMA4)
    tokens, rows = jnp.asarray(TEXTS[:2]), jnp.arange(T - M)

    @jax.jit
    def parallel():
        output = module.apply({"params": backbone.params}, tokens)
        keys, values = ({donor: part[donor] for donor in (2, 3)} for part in (output.cache.keys, output.cache.values))
        last_slot = jnp.broadcast_to(rows, (2, T - M))
        return steps(head, params, table, lambda k: tokens[:, rows + k], output.hidden[:, : T - M], keys, values, last_slot, unembedding)

    @jax.jit
    def one_row(cache, token, ahead):
        output = module.apply({"params": backbone.params}, token, cache)
        keys, values = ({donor: part[donor] for donor in (2, 3)} for part in (output.cache.keys, output.cache.values))
        drafted = steps(head, params, table, lambda k: ahead[:, k - 1 : k], output.hidden, keys, values, cache.lengths[:, None], unembedding)
        return drafted, output.cache.replace(lengths=cache.lengths + 1)

    together, cache = parallel(), cache_lib.empty(GEMMA4, 2, S)
    for row in range(T - M):
        drafted, cache = one_row(cache, tokens[:, row : row + 1], tokens[:, row + 1 : row + 1 + M])
        for one, many in zip(drafted, together, strict=True):
            np.testing.assert_allclose(one.logits[:, 0], many.logits[:, row], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(one.hidden[:, 0], many.hidden[:, row], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(one.copy[:, 0, :T], many.copy[:, row], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(one.gate[:, 0], many.gate[:, row], rtol=1e-4, atol=1e-5)


def test_labels_are_the_backbones_own_distribution():
    """Soft cap included: the loss of a head without a pointer is the cross-entropy to the backbone's logits of the draft vocabulary."""
    backbone = fakes.backbone(GEMMA4, seed=2)
    config = config_lib.head_config_for(GEMMA4, width=16, mlp_width=24, draft_vocab_size=24, pointer=False)
    loaded, head = fakes.head(backbone, config), head_lib.Head(config, GEMMA4)
    frozen, module = fit.make_frozen(backbone, loaded.draft_ids), backbone_lib.Backbone(GEMMA4)
    tokens, rows = TEXTS[:1].astype(np.int32), np.arange(T - 2)[None]
    batch = data.Batch(
        tokens=tokens,
        lengths=np.asarray([T], np.int32),
        answer=np.ones((1, T), bool),
        rows=rows,
        row_mask=np.ones((1, T - 2), bool),
        index=np.zeros(1, np.int32),
    )

    @jax.jit
    def both():
        read = features.compute(module, backbone.params, tokens, key_layers=(2,), value_layers=(2,))
        labels = jax.nn.softmax(module.apply({"params": backbone.params}, tokens).logits[:, 1 : T - 1, loaded.draft_ids])
        embedded = frozen.table[tokens[:, 1 : T - 1]]
        output = head.apply({"params": loaded.params}, embedded, read.hidden[:, : T - 2], read.keys, read.values, rows, frozen.vocab.unembedding)
        expected = -(labels * jax.nn.log_softmax(output.logits)).sum(axis=-1)
        return loss.unroll(head, loaded.params, frozen, read, batch, 1).loss[0], expected

    np.testing.assert_allclose(*both(), rtol=1e-4, atol=1e-4)


def test_shapes_of_a_head_come_from_its_donors():
    shapes = head_lib.param_shapes(HEAD, GEMMA4)
    assert shapes["layers_0_q/kernel"] == (16, 4 * 8) and shapes["layers_1_q/kernel"] == (16, 4 * 6)
    assert shapes["layers_0_q_norm/scale"] == (8,) and shapes["pointer_3_q_norm/scale"] == (6,)
    assert shapes["pointer_2_q/kernel"] == (16, 2 * 1 * 8) and shapes["pointer_3_q/kernel"] == (16, 2 * 2 * 6)
    assert "layers_0_q_norm/scale" not in head_lib.param_shapes(fakes.HEAD, fakes.BACKBONE)
    assert config_lib.head_config_for(GEMMA4).donors == (2,)


def test_a_pointer_reads_four_layers_of_the_last_donors_kind():
    def pointers(layer_types, **changes):
        return config_lib.head_config_for(dataclasses.replace(fakes.BACKBONE, num_layers=len(layer_types), layer_types=layer_types), **changes).pointer_donors

    assert pointers(("full",) * 30) == (7, 14, 22, 29)
    assert pointers((*["sliding"] * 5, "full") * 3) == (5, 11, 17)
    assert pointers((*["sliding"] * 5, "full") * 3, donors=(17, 7)) == (1, 3, 6, 7)
    assert pointers(("full",)) == (0,)
    assert pointers(("full",) * 9, pointer_donors=(1,)) == (1,) and pointers(("full",) * 9, pointer=False) == ()


def test_a_donor_without_its_own_keys_is_refused():
    for name in ("donors", "pointer_donors"):
        with pytest.raises(ConfigError, match=f"{name}=5: layer 5 has no K/V of its own; the last layer that has is 3"):
            config_lib.head_config_for(GEMMA4, **{"donors": (2,), name: (5,)})
    with pytest.raises(ConfigError, match="num_heads=3: must be a multiple of the donor's num_kv_heads=2"):
        config_lib.head_config_for(GEMMA4, donors=(2, 3), num_heads=3)
