"""Layers with a window in a ring of slots: the same tokens, counts and states as with a slot for every token, many wraps long.

Rings here have the fewest slots allowed, window + M. Both caches hold the same numbers in other places, so sums over slots
round differently: states are compared to 1e-4, tokens exactly.
"""

import dataclasses
from functools import partial

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import load
from mtp_jax.config import ConfigError
from mtp_jax.decoding import generate, loop, sampling
from mtp_jax.drafters import mtp
from mtp_jax.models import cache as cache_lib
from mtp_jax.models import head as head_lib
from mtp_jax.models import layers, presets

WINDOW = 5
M = 3
PROMPTS = fakes.prompts(3, 40, 17)  # shorter than the ring, much longer, in between; the last two end at other slots
BUDGET = 50
# Layers 4 and 5 read the K/V of layers 3, a ring, and 2; heads differ by type, as in Gemma 4.
SHARING = dataclasses.replace(
    fakes.TIED,
    num_layers=6,
    layer_types=("full", "sliding", "full", "sliding", "sliding", "full"),
    full_head_dim=8,
    full_kv_heads=1,
    keys_are_values=True,
    shared_kv_layers=2,
)


@pytest.fixture(autouse=True)
def smallest_rings(monkeypatch):
    monkeypatch.setattr(generate, "ring_size", lambda config, num_draft, before: config.sliding_window + num_draft)


def decode(used, form, prompts=PROMPTS, num_draft=M, budget=BUDGET, **options):
    config = config_lib.DecodeConfig(max_new_tokens=budget, num_draft=num_draft, window_cache=form)
    return generate.run(used, prompts, config, keep_state=True, **options)


def same(ring, full):
    """Tokens, counts and the hidden state of each row's last slot."""
    for one, other in zip(ring.outputs, full.outputs, strict=True):
        assert (one.tokens, one.steps, one.drafted, one.accepted) == (other.tokens, other.steps, other.drafted, other.accepted)
    np.testing.assert_allclose(ring.state.hidden, full.state.hidden, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(ring.state.cache.lengths, full.state.cache.lengths)


def slots(state):
    return [keys.shape[2] for keys in state.cache.keys]


@pytest.fixture(scope="module")
def vanilla(runtime):
    """With a slot for every token."""
    return decode(runtime.without_drafter(), "full")


@pytest.mark.parametrize("batch", [1, 3])
def test_vanilla(runtime, vanilla, batch):
    ring = decode(runtime.without_drafter(), "ring", PROMPTS[-batch:])
    assert slots(ring.state) == [128, WINDOW, 128, WINDOW] and ring.state.cache.num_slots == 128
    assert [output.tokens for output in ring.outputs] == [output.tokens for output in vanilla.outputs[-batch:]]
    np.testing.assert_allclose(ring.state.hidden, vanilla.state.hidden[-batch:], rtol=1e-4, atol=1e-4)
    assert len(set(ring.outputs[0].tokens)) > 10 and BUDGET > 6 * (WINDOW + M)


@pytest.mark.parametrize("pointers", [(3,), (2, 3)])
def test_a_head_on_full_layers_and_rings(backbone, vanilla, pointers):
    """Its layers read one of each; the pointer a ring, or both."""
    used = generate.make_runtime(backbone, fakes.head(backbone, dataclasses.replace(fakes.HEAD, pointer_donors=pointers)))
    full, ring = decode(used, "full"), decode(used, "ring")
    assert slots(ring.state) == [128, WINDOW + M, 128, WINDOW + M]
    same(ring, full)
    assert sum(sum(output.accepted) for output in full.outputs) > 0
    assert [output.tokens for output in ring.outputs] == [output.tokens for output in vanilla.outputs]


@pytest.fixture(scope="module")
def script(vanilla):
    texts = np.zeros((3, 129), np.int32)
    for row, (prompt, output) in enumerate(zip(PROMPTS, vanilla.outputs, strict=True)):
        texts[row, : len(prompt) + BUDGET] = prompt + output.tokens
    return jnp.asarray(texts)


@pytest.mark.parametrize("drafter", [fakes.Wrong(), fakes.Scripted(), *(fakes.Scripted(wrong_at=draft) for draft in (1, 2, 3))], ids=str)
def test_scripted_drafts(runtime, vanilla, script, drafter):
    scripted = dataclasses.replace(runtime, drafter=drafter, drafter_params=script)
    ring = decode(scripted, "ring")
    assert [output.tokens for output in ring.outputs] == [output.tokens for output in vanilla.outputs]
    np.testing.assert_allclose(ring.state.hidden, vanilla.state.hidden, rtol=1e-4, atol=1e-4)
    kept = M if drafter == fakes.Scripted() else max(getattr(drafter, "wrong_at", 1) - 1, 0)
    assert ring.outputs[0].steps == -(-(BUDGET - 1) // (kept + 1))


@pytest.mark.parametrize("length", [4, 13, 64])
def test_prompts_in_chunks(monkeypatch, runtime, vanilla, length):
    """Shorter than the ring, longer, and all at once: padding of the shorter rows must not reach the ring."""
    monkeypatch.setattr(loop, "CHUNK", length)
    ring = decode(runtime.without_drafter(), "ring", budget=9)
    assert [output.tokens for output in ring.outputs] == [output.tokens[:9] for output in vanilla.outputs]


@pytest.mark.parametrize("forms", [("ring", "ring"), ("full", "ring")])
def test_going_on(runtime, forms):
    """Five drafts in the first call, whose rows end at different times, then two, then five again: rings of 10, 7 and 10 slots, or every second time none."""
    used, more, results = dataclasses.replace(runtime, drafter=fakes.Random(few=3)), fakes.prompts(4, 1, 70, seed=6), {}
    for kind in ("full", "mixed"):
        first, second = forms if kind == "mixed" else ("full", "full")
        result = decode(used, first, num_draft=5, budgets=[30, 7, 18])
        result = decode(used, second, more, num_draft=2, budget=20, before=result.state)
        results[kind] = decode(used, first, more, num_draft=5, budget=20, before=result.state)
    same(results["mixed"], results["full"])
    assert slots(results["mixed"].state)[1] == (WINDOW + 5 if forms[0] == "ring" else 256)


def test_layers_that_share_a_rings_keys_and_values():
    used = dataclasses.replace(generate.make_runtime(fakes.backbone(SHARING)), drafter=fakes.Random(few=3))
    ring = decode(used, "ring")
    assert slots(ring.state) == [128, WINDOW + M, 128, WINDOW + M]
    same(ring, decode(used, "full"))


# What a ring's slots stand for ------------------------------------------------------------------------------------


def test_positions_of_a_ring():
    found = cache_lib.ring_positions(8, jnp.asarray([10, 2, -1]))
    assert np.asarray(found[0]).tolist() == [8, 9, 10, 3, 4, 5, 6, 7]
    assert np.asarray(found[1]).tolist() == [0, 1, 2, -5, -4, -3, -2, -1]
    assert (np.asarray(found[2]) < 0).all()


def test_a_ring_shows_the_window_and_no_empty_slot():
    positions = cache_lib.ring_positions(8, jnp.asarray([10, 2]))
    last = jnp.asarray([[10], [2]])
    shown = np.asarray(layers.visible(last, positions, last + 1, WINDOW))[:, 0].astype(int).tolist()
    assert shown == [[1, 1, 1, 0, 0, 0, 0, 1], [1, 1, 1, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_write_ring_wraps(width):
    rng = np.random.default_rng(width)
    held, new = rng.normal(size=(7, 2, 7, 6)).astype(np.float32), rng.normal(size=(7, 2, width, 6)).astype(np.float32)
    start = np.arange(7) + 7 * np.arange(7)  # every place once
    expected = held.copy()
    for row, begin in enumerate(start):
        for token in range(width):
            expected[row, :, (begin + token) % 7] = new[row, :, token]
    np.testing.assert_array_equal(jax.jit(cache_lib.write_ring)(held, new, jnp.asarray(start)), expected)


def prefilled(loaded, prompts, window_slots=WINDOW + M, pad=48):
    padded = np.zeros((len(prompts), pad), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in prompts])
    request = loop.Request(limits=lengths + 60, keys=sampling.row_keys(0, list(range(len(prompts)))))
    module = generate.backbone_lib.Backbone(loaded.config)
    rules = config_lib.DecodeConfig(max_new_tokens=1, num_draft=M)
    state = loop.prefill(module, loaded.params, jnp.asarray(padded), lengths, request, num_slots=128, drafter=None, config=rules, window_slots=window_slots)

    def step(drafter):
        return jax.jit(lambda params, state: loop.step(module, drafter, loaded.params, params, state, request, config=rules))

    return state, step, lambda state: loop.context_of(state, loaded.params, request)


@pytest.fixture(scope="module", params=[(2,), (3,)])
def drafting(request, backbone):
    """Drafter and parameters of a head whose pointer reads a full layer, or a ring."""
    loaded = fakes.head(backbone, dataclasses.replace(fakes.HEAD, pointer_donors=request.param))
    head = head_lib.Head(loaded.config, backbone.config)
    return mtp.MTPDrafter(head), mtp.make_params(head, loaded.params, jnp.asarray(loaded.draft_ids), backbone.params)


@partial(jax.jit, static_argnums=0)
def drafts(drafter, params, context):
    return drafter.draft(params, (), context, config_lib.DecodeConfig(num_draft=M))[0].tokens


def test_a_draft_after_a_rejection_is_the_draft_of_a_fresh_prefill(backbone, drafting):
    drafter, params = drafting
    state, step, context = prefilled(backbone, PROMPTS)
    wrong, own = step(fakes.Wrong()), step(drafter)
    for number in range(10):  # once round the ring and more
        state = own(params, state) if number % 3 == 2 else wrong(jnp.zeros_like(state.tokens), state)
        lengths = np.asarray(state.cache.lengths)
        texts = [np.asarray(state.tokens)[row, :length].tolist() for row, length in enumerate(lengths)]
        fresh, _, fresh_context = prefilled(backbone, texts, pad=96)
        np.testing.assert_array_equal(fresh.pending, state.pending)
        np.testing.assert_array_equal(drafts(drafter, params, context(state)), drafts(drafter, params, fresh_context(fresh)))
        np.testing.assert_allclose(state.hidden, fresh.hidden, rtol=1e-4, atol=1e-4)
    assert (lengths - np.asarray([len(prompt) for prompt in PROMPTS])).min() > WINDOW + M


def garbage(state, rng, shift=0):
    """Every slot outside the next query's window, and every token beyond the pending one, filled with large finite values."""
    lengths = np.asarray(state.cache.lengths)[:, None]

    def fill(layer, leaf):
        size = leaf.shape[2]
        held = np.asarray(cache_lib.ring_positions(size, state.cache.lengths - 1)) if size < 128 else np.arange(size)[None]
        unseen = (held >= lengths) | (held < 0) | ((size < 128) & (held <= lengths - WINDOW + shift))
        return jnp.asarray(np.where(unseen[:, None, :, None], rng.choice([-1e30, 1e30, 3e4], leaf.shape).astype(leaf.dtype), leaf))

    filled = {name: tuple(fill(layer, leaf) for layer, leaf in enumerate(getattr(state.cache, name))) for name in ("keys", "values")}
    after = np.arange(state.tokens.shape[1])[None] > lengths
    tokens = np.where(after, rng.integers(0, 64, state.tokens.shape), state.tokens).astype(np.int32)
    return state.replace(cache=state.cache.replace(**filled), tokens=jnp.asarray(tokens))


def test_garbage_in_slots_that_no_query_sees_changes_nothing(backbone, drafting):
    drafter, params = drafting
    rng = np.random.default_rng(0)
    clean, step, context = prefilled(backbone, PROMPTS)
    own, dirty = step(drafter), clean
    for _ in range(10):
        dirty = garbage(dirty, rng)
        np.testing.assert_array_equal(drafts(drafter, params, context(dirty)), drafts(drafter, params, context(clean)))
        clean, dirty = own(params, clean), own(params, dirty)
        for name in ("hidden", "accepted", "pending"):
            np.testing.assert_array_equal(getattr(clean, name), getattr(dirty, name))
        np.testing.assert_array_equal(clean.cache.lengths, dirty.cache.lengths)
    one_more = garbage(dirty, rng, shift=1)  # control: the oldest position in the window
    assert (np.abs(np.asarray(own(params, one_more).hidden - own(params, dirty).hidden)).max(axis=1) > 1e-2).all()


# How many slots a ring needs -----------------------------------------------------------------------------------------


def test_a_ring_of_one_slot_less_is_refused(backbone):
    with pytest.raises(ConfigError, match="window_slots=7: must be at least 8: a window of 5 and 3 drafts"):
        prefilled(backbone, PROMPTS, window_slots=WINDOW + M - 1)


def test_a_pass_wider_than_the_ring_allows_is_refused(backbone):
    state, step, _ = prefilled(backbone, PROMPTS)
    wider = jax.jit(lambda tokens, cache: generate.backbone_lib.Backbone(backbone.config).apply({"params": backbone.params}, tokens, cache))
    wider(jnp.ones((3, M + 1), jnp.int32), state.cache)
    with pytest.raises(ConfigError, match="window_slots=8: must be at least 9"):
        wider(jnp.ones((3, M + 2), jnp.int32), state.cache)


def test_a_ring_of_one_slot_less_would_be_wrong(monkeypatch, runtime, vanilla, script):
    """The rule has nothing to spare."""
    monkeypatch.setattr(generate, "ring_size", lambda config, num_draft, before: config.sliding_window + num_draft - 1)
    monkeypatch.setattr(cache_lib, "check_window_slots", lambda *sizes: None)
    result = decode(dataclasses.replace(runtime, drafter=fakes.Wrong(), drafter_params=script), "ring")
    assert all(one.tokens != other.tokens for one, other in zip(result.outputs, vanilla.outputs, strict=True))


def test_sizes_of_rings(monkeypatch):
    monkeypatch.undo()
    config = dataclasses.replace(fakes.BACKBONE, sliding_window=512)
    assert {generate.ring_size(config, num_draft, None) for num_draft in (0, 4, 63)} == {576}
    assert generate.ring_size(dataclasses.replace(config, layer_types=("full",) * 4), 4, None) is None
    with pytest.raises(ConfigError, match="window_cache='small': must be 'full' or 'ring'"):
        config_lib.DecodeConfig(window_cache="small")


def test_bytes_of_gemma_3_270m():
    """15 of its 18 layers have a window of 512; a slot is one head of 256 keys and values, float32."""
    config = presets.gemma3_270m()

    def size(window_slots):
        made = jax.eval_shape(lambda: cache_lib.empty(config, 1, 8192, window_slots))
        return sum(leaf.size for leaf in (*made.keys, *made.values)) * 4

    assert size(None) == 18 * 8192 * 2 * 256 * 4 == 301_989_888
    assert size(576) == (3 * 8192 + 15 * 576) * 2 * 256 * 4 == 68_026_368


@pytest.mark.slow
def test_gemma_3_270m_with_a_short_window():
    gemma = load.load_backbone("gemma3-270m")
    narrow = dataclasses.replace(gemma, config=dataclasses.replace(gemma.config, sliding_window=16))
    texts = ["Once upon a time, there was a little", " ".join(f"{number} squared is {number * number}." for number in range(12))]
    prompts = [generate.encode_prompt(gemma, text) for text in texts]
    used = generate.make_runtime(narrow).without_drafter()
    full, ring = (decode(used, form, prompts, budget=48) for form in ("full", "ring"))
    assert slots(ring.state)[0] == 16 and slots(ring.state)[5] == 256
    assert [output.tokens for output in ring.outputs] == [output.tokens for output in full.outputs]
    np.testing.assert_allclose(ring.state.hidden, full.state.hidden, rtol=1e-3, atol=1e-2)
