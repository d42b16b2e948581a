"""The backbone against numpy, and its cached forward against its uncached one."""

import dataclasses
from functools import partial

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache

TEXTS = np.random.default_rng(3).integers(0, 64, (3, 14))  # much longer than the window of 5
CONFIGS = {"untied": fakes.BACKBONE, "tied": fakes.TIED, "window 1": dataclasses.replace(fakes.BACKBONE, sliding_window=1)}


@pytest.fixture(scope="module", params=CONFIGS)
def loaded(request):
    return fakes.backbone(CONFIGS[request.param], seed=2)


@pytest.fixture(scope="module")
def whole(loaded):
    return jax.jit(backbone_lib.Backbone(loaded.config).apply)({"params": loaded.params}, TEXTS)


def test_forward_equals_numpy(loaded, whole):
    for row, text in enumerate(TEXTS[:2]):
        hidden, logits, keys, values = reference.backbone(loaded.params, loaded.config, text.tolist())
        np.testing.assert_allclose(whole.hidden[row], hidden, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(whole.logits[row], logits, rtol=1e-4, atol=1e-4)
        for layer in range(loaded.config.num_layers):
            np.testing.assert_allclose(whole.cache.keys[layer][row], keys[layer], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(whole.cache.values[layer][row], values[layer], rtol=1e-4, atol=1e-4)


def test_the_window_matters(whole, loaded):
    """Negative control: the same weights with full attention everywhere give other logits, but only beyond the window."""
    config = dataclasses.replace(loaded.config, layer_types=("full",) * 4)
    full = backbone_lib.Backbone(config).apply({"params": loaded.params}, TEXTS)
    window = loaded.config.sliding_window
    np.testing.assert_allclose(full.logits[:, :window], whole.logits[:, :window], rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(full.logits - whole.logits))[:, window:].max(axis=-1).min() > 1e-3


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_cached_forward_in_chunks_equals_uncached(loaded, whole, chunk):
    apply = jax.jit(backbone_lib.Backbone(loaded.config).apply)
    state, hidden, logits = cache.empty(loaded.config, 3, 16), [], []
    for start in range(0, 14 - 14 % chunk, chunk):
        output = apply({"params": loaded.params}, TEXTS[:, start : start + chunk], state)
        np.testing.assert_array_equal(output.cache.lengths, state.lengths)  # committing is the caller's
        state = output.cache.replace(lengths=output.cache.lengths + chunk)
        hidden.append(output.hidden)
        logits.append(output.logits)
    done = 14 - 14 % chunk
    np.testing.assert_allclose(jnp.concatenate(hidden, 1), whole.hidden[:, :done], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate(logits, 1), whole.logits[:, :done], rtol=1e-5, atol=1e-5)


def test_cached_forward_ragged_per_row_equals_uncached(loaded, whole):
    """Every row keeps another number of each chunk of 3, as acceptance does; rejected slots are overwritten."""
    apply = jax.jit(backbone_lib.Backbone(loaded.config).apply)
    state, lengths = cache.empty(loaded.config, 3, 18), np.zeros(3, int)
    kept = [[3, 1, 2], [1, 3, 3], [2, 2, 1], [3, 1, 3], [1, 2, 2], [2, 3, 1]]
    rows = np.arange(3)[:, None]
    for keep in kept:
        places = lengths[:, None] + np.arange(3)
        text = TEXTS[rows, np.minimum(places, 13)].copy()
        for row in range(3):
            text[row, keep[row] :] = (text[row, keep[row] :] + 7) % 64  # rejected drafts
        output = apply({"params": loaded.params}, text, state)
        for row in range(3):
            np.testing.assert_allclose(output.logits[row, : keep[row]], whole.logits[row, lengths[row] : lengths[row] + keep[row]], rtol=1e-5, atol=1e-5)
        lengths = lengths + keep
        state = output.cache.replace(lengths=jnp.asarray(lengths))
    assert lengths.min() >= 12


def test_column_blocks_give_the_same_outputs(loaded, whole):
    module = backbone_lib.Backbone(loaded.config, column_blocks=True)
    params = backbone_lib.to_column_blocks(loaded.params, loaded.config)
    assert params["embed"]["embedding"] is loaded.params["embed"]["embedding"]  # shared, not copied
    output = jax.jit(module.apply)({"params": params}, TEXTS)
    np.testing.assert_allclose(output.hidden, whole.hidden, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output.logits, whole.logits, rtol=1e-5, atol=1e-5)


def test_hidden_alone_and_logits_method(loaded, whole):
    # In one program each, as `whole` is: the operations one by one round otherwise.
    apply = backbone_lib.Backbone(loaded.config).apply
    output = jax.jit(partial(apply, with_logits=False))({"params": loaded.params}, TEXTS)
    assert output.logits is None
    np.testing.assert_allclose(jax.jit(partial(apply, method="logits"))({"params": loaded.params}, output.hidden), whole.logits, rtol=1e-5, atol=1e-5)


def test_unembedding_rows_are_what_logits_use(loaded, whole):
    rows = backbone_lib.unembedding_rows(loaded.params, loaded.config, jnp.asarray([5, 63, 0]))
    np.testing.assert_allclose(np.asarray(whole.hidden) @ np.asarray(rows).T, np.asarray(whole.logits)[..., [5, 63, 0]], rtol=1e-5, atol=1e-5)
