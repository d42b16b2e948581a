"""The contract on real weights with a random head: SmolLM2-135M-Instruct, and Gemma 3 270M with a full and a sliding donor.

Slow: downloads or reads 135 M and 270 M parameters.
"""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.checkpoints import load
from mtp_jax.decoding import generate, loop, sampling
from mtp_jax.drafters import mtp
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import head as head_lib
from mtp_jax.training import data, fit, loss
from mtp_jax.training import features as features_lib

pytestmark = pytest.mark.slow

PROMPTS = ["What is the capital of France?", "Write a haiku about rain.", "Add 17 and 25.", "Repeat this word three times: lantern"]
M, T, S = 3, 48, 64


# Name, window, head layers' donors, pointer's donors. Gemma's windows are cut from 512 to 16 slots, so that short texts are beyond them.
MODELS = [("smollm2-135m-instruct", None, (29,), (12, 29)), ("gemma3-270m", 16, (16, 17), (16, 17))]


@pytest.fixture(scope="module", params=MODELS, ids=[name for name, *_ in MODELS])
def model(request):
    return request.param


@pytest.fixture(scope="module")
def real(model):
    name, window, _, _ = model
    loaded = load.load_backbone(name)
    return loaded if window is None else dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, sliding_window=window))


@pytest.fixture(scope="module")
def real_head(model, real):
    _, _, donors, pointer_donors = model
    config = config_lib.head_config_for(
        real.config, draft_vocab_size=2048, width=192, mlp_width=256, donors=donors, pointer_donors=pointer_donors, pointer_heads=2
    )
    return fakes.head(real, config)


@pytest.fixture(scope="module")
def plain(real, real_head):
    """Head, drafter parameters and frozen arrays in the plain layout."""
    module = head_lib.Head(real_head.config, real.config)
    params = mtp.make_params(module, real_head.params, jnp.asarray(real_head.draft_ids), real.params)
    return module, params, fit.make_frozen(real, real_head.draft_ids)


@pytest.fixture(scope="module")
def text(real):
    """The last 48 tokens of each of three prompts and their answers."""
    result = generate.generate_vanilla(real, PROMPTS[:3], config_lib.DecodeConfig(max_new_tokens=T, stop_tokens=(real.config.vocab_size - 1,)))
    prompts = [generate.encode_prompt(real, prompt) for prompt in PROMPTS[:3]]
    return np.asarray([(prompt + output.tokens)[-T:] for prompt, output in zip(prompts, result.outputs, strict=True)], np.int32)


@pytest.fixture(scope="module")
def context(real):
    """Context after a fresh prefill of all tokens but the last."""

    @jax.jit
    def make(params, tokens, lengths):
        output = backbone_lib.Backbone(real.config).apply({"params": params}, tokens[:, :-1], with_logits=False)
        hidden = jnp.take_along_axis(output.hidden, (lengths - 2)[:, None, None], axis=1)[:, 0]
        pending = jnp.take_along_axis(tokens, (lengths - 1)[:, None], axis=1)[:, 0]
        return hidden, pending, output.cache.replace(lengths=lengths - 1)

    def fresh(tokens, lengths):
        hidden, pending, cache = make(real.params, jnp.asarray(tokens), jnp.asarray(lengths))
        return drafters.Context(tokens=jnp.asarray(tokens), pending=pending, hidden=hidden, cache=cache, backbone_params=real.params)

    return fresh


def draft(plain, context):
    module, params, _ = plain
    rules = config_lib.DecodeConfig(num_draft=M)
    return np.asarray(jax.jit(lambda params, context: mtp.MTPDrafter(module).draft(params, (), context, rules)[0].tokens)(params, context))


def test_gradient_stops_at_the_row(real, real_head, plain, text):
    """Proof 1, for row 20: the gradient of all its draft steps is zero in slots 21.. and before the window, and nowhere else."""
    module, _, frozen = plain
    batch = rows_of(text, [20])
    read = features(real, real_head, text)

    def total(keys, values):
        return loss.unroll(module, real_head.params, frozen, read.replace(keys=keys, values=values), batch, M).loss.sum()

    for part in jax.jit(jax.grad(total, argnums=(0, 1)))(read.keys, read.values):
        for layer, gradient in part.items():
            size = np.abs(np.asarray(gradient)).max(axis=(1, 3))
            window = real.config.window(layer)
            first = 0 if window is None else 21 - window + 1  # the query stands at position 21
            assert (size[:, 21:] == 0).all() and (size[:, :first] == 0).all() and (size[:, first:21] > 0).all(), f"layer {layer}"


def rows_of(text, rows):
    rows = np.asarray([rows] * len(text))
    return data.Batch(
        tokens=text,
        lengths=np.full(len(text), T, np.int32),
        answer=np.ones(text.shape, bool),
        rows=rows,
        row_mask=np.ones_like(rows, bool),
        index=np.arange(len(text), dtype=np.int32),
    )


def features(real, real_head, text):
    donors = tuple(sorted(set(real_head.config.donors)))
    return features_lib.compute(backbone_lib.Backbone(real.config), real.params, text, key_layers=real_head.config.layers_read, value_layers=donors)


def test_training_drafts_are_decoding_drafts(real, real_head, plain, text, context):
    """Proof 2: the first draft of every row, and later ones as long as the drafts are the text."""
    module, _, frozen = plain
    rows = list(range(4, T - 3, 5))
    read, batch = features(real, real_head, text), rows_of(text, rows)
    unrolled = jax.jit(lambda params: loss.unroll(module, params, frozen, read, batch, M))(real_head.params)
    for place, row in enumerate(rows):
        padded = np.zeros((3, S + 1), np.int32)
        padded[:, : row + 2] = text[:, : row + 2]
        drafts = draft(plain, context(padded, np.full(3, row + 2)))
        np.testing.assert_array_equal(drafts[:, 0], unrolled.drafts[0, :, place])


def test_rejections_and_leftovers_leave_no_trace(real, plain, text, context):
    """Proofs 3 and 5: after steps of a drafter that is always wrong, and with garbage behind the lengths, drafts are those of a fresh prefill."""
    module, params, _ = plain
    lengths = np.array([20, 24, 28])
    rules = config_lib.DecodeConfig(max_new_tokens=1, num_draft=M)
    request = loop.Request(limits=jnp.asarray(lengths + 30), keys=sampling.row_keys(0, [0, 1, 2]))
    backbone = backbone_lib.Backbone(real.config)
    state = loop.prefill(backbone, real.params, text[:, :28], jnp.asarray(lengths), request, num_slots=S, drafter=None, config=rules)
    drafter = fakes.Wrong(vocab_size=real.config.vocab_size)
    step = jax.jit(lambda script, state: loop.step(backbone, drafter, real.params, script, state, request, config=rules))
    for _ in range(3):
        state = step(jnp.zeros_like(state.tokens), state)
        fresh = context(np.asarray(state.tokens), np.asarray(state.cache.lengths) + 1)
        drafts = draft(plain, loop.context_of(state, real.params, request))
        np.testing.assert_array_equal(drafts, draft(plain, fresh))
        beyond = (jnp.arange(S) >= state.cache.lengths[:, None])[:, None, :, None]
        spoil = jax.tree.map(lambda leaf, beyond=beyond: jnp.where(beyond, 1e30, leaf), (state.cache.keys, state.cache.values))
        spoiled = state.replace(cache=state.cache.replace(keys=spoil[0], values=spoil[1]))
        np.testing.assert_array_equal(draft(plain, loop.context_of(spoiled, real.params, request)), drafts)


@pytest.mark.parametrize("num_draft", [1, 4])
def test_generate_equals_vanilla(real, real_head, num_draft):
    """Proof 4, one prompt at a time (column blocks) and all four together."""
    config = config_lib.DecodeConfig(max_new_tokens=48, num_draft=num_draft)
    vanilla = [generate.generate_vanilla(real, [prompt], config).outputs[0] for prompt in PROMPTS]
    if real.tokenizer.has_chat_template:  # a base model goes on and on
        assert any(output.finish_reason == "stop" for output in vanilla)
    alone = [generate.generate(real, real_head, [prompt], config).outputs[0] for prompt in PROMPTS]
    together = generate.generate(real, real_head, PROMPTS, config).outputs
    for expected, one, of_many in zip(vanilla, alone, together, strict=True):
        assert one.tokens == expected.tokens == of_many.tokens
        assert one.text == expected.text and one.finish_reason == expected.finish_reason


def test_text_without_a_head_is_sensible():
    """The reader, tokenizer and template work together: the model knows this one. (For Gemma: tests/test_real_gemma.py.)"""
    smollm = load.load_backbone("smollm2-135m-instruct")
    output = generate.generate_vanilla(smollm, PROMPTS[:1], config_lib.DecodeConfig(max_new_tokens=24)).outputs[0]
    assert "Paris" in output.text
