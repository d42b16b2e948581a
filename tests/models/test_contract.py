"""The five proofs that training and decoding are one computation, in float32, on texts longer than the sliding window.

 1. a row's gradient reaches the slots it may see and no other;
 2. the parallel training pass gives what step-by-step decoding gives after prefilling as many tokens;
 3. a draft after a rejection is the draft from a fresh prefill;
 4. the output with any head is the backbone's own, token for token;
 5. what lies in slots beyond the length changes nothing, bit for bit.

Each has a control next to it: the same comparison with one thing shifted must fail.
"""

import dataclasses
from functools import partial

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.decoding import generate, loop, sampling
from mtp_jax.drafters import mtp
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache as cache_lib
from mtp_jax.models import head as head_lib
from mtp_jax.training import data, fit, loss
from mtp_jax.training import features as features_lib

M = 3
T = 16  # tokens of the text; the window is 5
S = 24  # cache slots


@dataclasses.dataclass(frozen=True)
class Case:
    """A head, a text whose second half the head drafted itself, and the parallel pass over it."""

    backbone: object
    loaded: object
    head: head_lib.Head
    params: mtp.Params
    frozen: loss.Frozen
    features: features_lib.Features
    batch: data.Batch
    block_starts: list[int]  # rows whose M drafts are the text

    def fresh(self, tokens, length):
        """Context after a prefill of all tokens but the last, without a cached forward; slots behind hold other K/V."""
        return _fresh(self.backbone.config, self.backbone.params, jnp.asarray(tokens), jnp.asarray(length))


def _fresh(config, params, tokens, length):
    output = backbone_lib.Backbone(config).apply({"params": params}, tokens[:, :-1])
    hidden = jnp.take_along_axis(output.hidden, (length - 2)[:, None, None], axis=1)[:, 0]
    pending = jnp.take_along_axis(tokens, (length - 1)[:, None], axis=1)[:, 0]
    return drafters.Context(tokens=tokens, pending=pending, hidden=hidden, cache=output.cache.replace(lengths=length - 1), backbone_params=params)


_fresh = jax.jit(_fresh, static_argnums=0)


@partial(jax.jit, static_argnums=(0, 3))
def _draft(drafter, params, context, count):
    return drafter.draft(params, (), context, config_lib.DecodeConfig(num_draft=count))[0].tokens


@pytest.fixture(scope="module", params=["pending", "last"])
def case(request, backbone):
    config = dataclasses.replace(fakes.HEAD, query_position=request.param)
    loaded = fakes.head(backbone, config)
    head = head_lib.Head(config, backbone.config)
    params = mtp.make_params(head, loaded.params, jnp.asarray(loaded.draft_ids), backbone.params)
    drafter = mtp.MTPDrafter(head)
    text, starts = fakes.prompts(7, seed=8)[0], []
    while len(text) < T:
        starts.append(len(text) - 2)  # slots 0..len-2 are valid, the last token is pending
        padded = np.zeros((1, S + 1), np.int32)
        padded[0, : len(text)] = text
        text = text + np.asarray(_draft(drafter, params, _fresh(backbone.config, backbone.params, padded, jnp.asarray([len(text)])), M))[0].tolist()
    text = text[:T]
    other = fakes.prompts(T, seed=9)[0]
    tokens = np.asarray([text, other], np.int32)
    rows = np.arange(T - 2)
    batch = data.Batch(
        tokens=tokens,
        lengths=np.asarray([T, T], np.int32),
        answer=np.ones((2, T), bool),
        rows=np.stack([rows, rows]),
        row_mask=np.ones((2, T - 2), bool),
        index=np.arange(2, dtype=np.int32),
    )
    frozen = fit.make_frozen(backbone, loaded.draft_ids)
    features = features_lib.compute(backbone_lib.Backbone(backbone.config), backbone.params, tokens, key_layers=(2, 3), value_layers=(2, 3))
    return Case(backbone, loaded, head, params, frozen, features, batch, [start for start in starts if start + M + 1 < T])


# 1 -----------------------------------------------------------------------------------------------------------------


def may_see(layer, row):
    """Slots that training row `row` may read in backbone layer `layer`."""
    return list(reference.visible_slots(fakes.BACKBONE, layer, row))


@pytest.fixture(scope="module")
def gradients(case):
    """|d loss of draft step k of row i / d K or V| by layer: [M, R, T], largest over heads."""

    def per_row(keys, values):
        features = case.features.replace(keys=keys, values=values)
        return loss.unroll(case.head, case.loaded.params, case.frozen, features, case.batch, M).loss[:, 0]

    jacobian = jax.jit(jax.jacrev(per_row, argnums=(0, 1)))(case.features.keys, case.features.values)
    return {
        (name, layer): np.abs(np.asarray(part[layer])[:, :, 0]).max(axis=(2, 4))
        for name, part in zip(("keys", "values"), jacobian, strict=True)
        for layer in (2, 3)
    }


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("layer", [2, 3])
def test_gradient_reaches_the_visible_slots_and_no_other(gradients, name, layer):
    found = gradients[name, layer]
    for k in range(M):
        for row in range(2, T - 2):  # one visible slot alone has weight 1 whatever its key
            seen = may_see(layer, row)
            hidden = sorted(set(range(T)) - set(seen))
            assert (found[k, row, hidden] == 0).all(), f"step {k + 1}, row {row}"
            assert (found[k, row, seen] > 0).all(), f"step {k + 1}, row {row}"


def test_the_sliding_donor_is_cut_and_the_full_one_is_not():
    """Control of the rule itself, by hand: row 9, window 5, pending token at 10: slots 6..9."""
    assert may_see(3, 9) == [6, 7, 8, 9] and may_see(2, 9) == list(range(10))


# 2 -----------------------------------------------------------------------------------------------------------------


def teacher_forced(case, hidden, tokens_at, keys, values, last_slot, followers):
    """Outputs and mixtures of M draft steps with the text as input; the head is called just as the loss calls it."""
    steps = []
    for k in range(1, M + 1):
        embedded = case.frozen.table[tokens_at(k)]
        output = case.head.apply({"params": case.loaded.params}, embedded, hidden, keys, values, last_slot, case.frozen.vocab.unembedding)
        slot_logits = head_lib.gather_slot_logits(output.logits, case.frozen.vocab.index[followers])
        mixture = head_lib.mix(output, slot_logits, followers, last_slot)
        steps.append((output, head_lib.greedy(mixture, case.frozen.vocab.ids, followers)))
        hidden = output.hidden
    return steps


def parallel(case, hidden=None, last_slot=None):
    """All rows of the text at once."""
    tokens, rows = jnp.asarray(case.batch.tokens), jnp.asarray(case.batch.rows)
    followers = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    hidden = case.features.hidden[:, : T - 2] if hidden is None else hidden

    def run(hidden, last_slot):
        return teacher_forced(
            case, hidden, lambda k: tokens[:, jnp.minimum(rows[0] + k, T - 1)], case.features.keys, case.features.values, last_slot, followers
        )

    return jax.tree.map(np.asarray, jax.jit(run)(hidden, rows if last_slot is None else last_slot))


@pytest.fixture(scope="module")
def decoded(case):
    """Row by row: feed one token to a cached backbone, then draft from the cache as it stands. Outputs by row."""
    tokens = jnp.asarray(case.batch.tokens)
    padded = jnp.pad(tokens, ((0, 0), (0, S + 1 - T)))
    module = backbone_lib.Backbone(case.backbone.config)

    @jax.jit
    def feed(cache, token):
        output = module.apply({"params": case.backbone.params}, token, cache)
        return output.hidden, output.cache.replace(lengths=cache.lengths + 1)

    @jax.jit
    def draft(hidden, cache, ahead):
        keys, values = ({layer: part[layer] for layer in (2, 3)} for part in (cache.keys, cache.values))
        return teacher_forced(case, hidden, lambda k: ahead[:, k - 1 : k], keys, values, cache.lengths[:, None] - 1, padded[:, 1:])

    cache, steps, ahead = cache_lib.empty(case.backbone.config, 2, S), [], np.asarray(padded)
    for row in range(T - 2):
        hidden, cache = feed(cache, ahead[:, row : row + 1])
        steps.append(jax.tree.map(np.asarray, draft(hidden, cache, ahead[:, row + 1 : row + 1 + M])))
    return steps


def differences(case, together, decoded):
    """Largest difference of logits, hidden, copy weights and gate, by row [T - 2]; and greedy drafts that differ."""
    worst, drafts = np.zeros(T - 2), 0
    for row in range(T - 2):
        for k in range(min(M, T - 1 - row)):  # beyond, there is no text to feed
            (one, token), (many, tokens) = decoded[row][k], together[k]
            pairs = [(one.logits[:, 0], many.logits[:, row]), (one.hidden[:, 0], many.hidden[:, row]), (one.gate[:, 0], many.gate[:, row])]
            pairs.append((one.copy[:, 0, :T], many.copy[:, row]))
            worst[row] = max(worst[row], *(float(np.abs(a - b).max()) for a, b in pairs))
            drafts += int((token[:, 0] != tokens[:, row]).sum())
    return worst, drafts


def test_parallel_training_pass_equals_step_by_step_decoding(case, decoded):
    worst, drafts = differences(case, parallel(case), decoded)
    np.testing.assert_allclose(worst, 0.0, rtol=0, atol=1e-4)  # logits reach 10
    assert drafts == 0


def test_a_pairing_off_by_one_does_not(case, decoded):
    shifted = jnp.roll(case.features.hidden, 1, axis=1)[:, : T - 2]
    worst, drafts = differences(case, parallel(case, hidden=shifted), decoded)
    assert worst.min() > 1e-2 and drafts > 5


def test_a_mask_that_shows_one_slot_more_does_not(case, decoded):
    worst, _ = differences(case, parallel(case, last_slot=jnp.asarray(case.batch.rows) + 1), decoded)
    assert worst.min() > 1e-2


def test_drafts_of_the_training_loss_are_the_drafters(case):
    """unroll feeds the text, the drafter its own drafts: they agree as far as the drafts are the text, here for whole blocks."""
    unrolled = jax.jit(lambda params: loss.unroll(case.head, params, case.frozen, case.features, case.batch, M))(case.loaded.params)
    unrolled = jax.tree.map(np.asarray, unrolled)
    drafter, deep = mtp.MTPDrafter(case.head), 0
    for row in range(T - 2):
        padded = np.zeros((2, S + 1), np.int32)
        padded[:, : row + 2] = case.batch.tokens[:, : row + 2]
        drafts = np.asarray(_draft(drafter, case.params, case.fresh(padded, np.full(2, row + 2)), M))
        for b in range(2):
            for k in range(M):
                assert unrolled.drafts[k, b, row] == drafts[b, k], f"row {row}, step {k + 1}"
                deep += int(k > 0)
                if row + 2 + k >= T or drafts[b, k] != case.batch.tokens[b, row + 2 + k]:
                    break
    for start in case.block_starts:
        assert unrolled.correct[:, 0, start].all()
    assert len(case.block_starts) >= 2 and deep >= 2 * len(case.block_starts)


def test_drafts_equal_numpy(case):
    """The whole chain of a block, against the slow implementation."""
    for length in (4, 9, 13):
        padded = np.zeros((2, S + 1), np.int32)
        padded[:, :length] = case.batch.tokens[:, :length]
        drafts = np.asarray(_draft(mtp.MTPDrafter(case.head), case.params, case.fresh(padded, np.full(2, length)), M))
        for b in range(2):
            text = case.batch.tokens[b, :length].tolist()
            expected, _ = reference.draft(case.loaded.params, case.head.config, case.loaded.draft_ids, case.backbone.params, case.backbone.config, text, M)
            assert drafts[b].tolist() == expected


# 3 and 5 -----------------------------------------------------------------------------------------------------------

RULES = config_lib.DecodeConfig(max_new_tokens=1, num_draft=M)
LENGTHS = np.array([4, 9, 11])
REQUEST = loop.Request(limits=jnp.asarray(LENGTHS + 30), keys=sampling.row_keys(0, [0, 1, 2]))


@pytest.fixture(scope="module")
def start(backbone):
    """State after the prefill of three unequal prompts, in a cache of 48 slots."""
    padded = np.zeros((3, 12), np.int32)
    for row, prompt in enumerate(fakes.prompts(*LENGTHS)):
        padded[row, : len(prompt)] = prompt
    module = backbone_lib.Backbone(backbone.config)
    return loop.prefill(module, backbone.params, padded, jnp.asarray(LENGTHS), REQUEST, num_slots=48, drafter=None, config=RULES)


def stepper(case, drafter):
    module = backbone_lib.Backbone(case.backbone.config)
    return jax.jit(lambda params, state: loop.step(module, drafter, case.backbone.params, params, state, REQUEST, config=RULES))


def draft_logits(case, context, extra_slots=0):
    """Logits of the first draft step from a context."""
    keys, values = ({layer: part[layer] for layer in (2, 3)} for part in (context.cache.keys, context.cache.values))
    table = context.backbone_params["embed"]["embedding"]
    last_slot = context.cache.lengths[:, None] - 1 + extra_slots
    unembedding = case.params.vocab.unembedding
    return case.head.apply(
        {"params": case.loaded.params}, table[context.pending][:, None], context.hidden[:, None], keys, values, last_slot, unembedding
    ).logits


def test_a_draft_after_a_rejection_is_the_draft_of_a_fresh_prefill(case, start):
    """First a drafter that is always wrong fills M slots of each row with rejected K/V, then the head's own rejections follow."""
    drafter, state = mtp.MTPDrafter(case.head), start
    wrong = jnp.zeros_like(state.tokens)
    step_wrong, step_own = stepper(case, fakes.Wrong()), stepper(case, drafter)
    for number in range(5):
        state = step_wrong(wrong, state) if number < 2 else step_own(case.params, state)
        context = loop.context_of(state, case.backbone.params, REQUEST)
        fresh = case.fresh(state.tokens, state.cache.lengths + 1)
        np.testing.assert_array_equal(_draft(drafter, case.params, context, M), _draft(drafter, case.params, fresh, M))
        np.testing.assert_allclose(draft_logits(case, context), draft_logits(case, fresh), rtol=1e-4, atol=1e-4)
        if number == 1:
            stale = draft_logits(case, context, extra_slots=1) - draft_logits(case, fresh)
            assert np.abs(stale).max(axis=(1, 2)).min() > 1e-2  # one leftover slot visible would show
    assert int(state.accepted.sum()) < 3 * 5 * M


def garbage(state, rng):
    """The same state with every slot beyond the length, and every token beyond the pending one, filled with large finite values."""
    lengths = np.asarray(state.cache.lengths)
    beyond = np.arange(state.cache.num_slots)[None] >= lengths[:, None]

    def fill(leaf):
        return jnp.asarray(np.where(beyond[:, None, :, None], rng.choice([-1e30, 1e30, 3e4], leaf.shape).astype(leaf.dtype), leaf))

    cache = state.cache.replace(keys=tuple(map(fill, state.cache.keys)), values=tuple(map(fill, state.cache.values)))
    after = np.arange(state.tokens.shape[1])[None] > lengths[:, None]
    noise = rng.integers(0, fakes.BACKBONE.vocab_size, state.tokens.shape)
    return state.replace(cache=cache, tokens=jnp.asarray(np.where(after, noise, state.tokens).astype(np.int32)))


def test_garbage_beyond_the_length_changes_nothing(case, start):
    rng = np.random.default_rng(0)
    step = stepper(case, mtp.MTPDrafter(case.head))
    clean, dirty = start, start
    for _ in range(4):
        dirty = garbage(dirty, rng)
        np.testing.assert_array_equal(
            _draft(mtp.MTPDrafter(case.head), case.params, loop.context_of(dirty, case.backbone.params, REQUEST), M),
            _draft(mtp.MTPDrafter(case.head), case.params, loop.context_of(clean, case.backbone.params, REQUEST), M),
        )
        clean, dirty = step(case.params, clean), step(case.params, dirty)
        np.testing.assert_array_equal(clean.hidden, dirty.hidden)
        np.testing.assert_array_equal(clean.accepted, dirty.accepted)
        np.testing.assert_array_equal(clean.cache.lengths, dirty.cache.lengths)
        for row, length in enumerate(np.asarray(clean.cache.lengths)):
            np.testing.assert_array_equal(clean.tokens[row, : length + 1], dirty.tokens[row, : length + 1])
            for a, b in zip(jax.tree.leaves((clean.cache.keys, clean.cache.values)), jax.tree.leaves((dirty.cache.keys, dirty.cache.values)), strict=True):
                np.testing.assert_array_equal(a[row, :, :length], b[row, :, :length])


def test_garbage_inside_the_length_would_show(case, start):
    """Control: the same values one slot earlier change the drafts' logits in every row."""
    spoiled = garbage(start.replace(cache=start.cache.replace(lengths=start.cache.lengths - 1)), np.random.default_rng(0))
    spoiled = spoiled.replace(cache=spoiled.cache.replace(lengths=start.cache.lengths), tokens=start.tokens)
    before, after = (draft_logits(case, loop.context_of(state, case.backbone.params, REQUEST)) for state in (start, spoiled))
    assert (np.abs(before - after).max(axis=(1, 2)) > 1e-2).all()


# 4 -----------------------------------------------------------------------------------------------------------------

PROMPTS = fakes.prompts(3, 9, 20)
BUDGET = 26


@pytest.fixture(scope="module")
def own_text(backbone):
    """The backbone's greedy answers by whole forward passes, without a cache."""
    forward = jax.jit(lambda tokens: backbone_lib.Backbone(backbone.config).apply({"params": backbone.params}, tokens).logits)
    answers = []
    for prompt in PROMPTS:
        text = np.zeros((1, 48), np.int32)
        text[0, : len(prompt)] = prompt
        for place in range(len(prompt), len(prompt) + BUDGET):
            text[0, place] = int(jnp.argmax(forward(text)[0, place - 1]))
        answers.append(text[0, len(prompt) : len(prompt) + BUDGET].tolist())
    return answers


def test_whole_forward_passes_agree_with_numpy(backbone, own_text):
    assert reference.greedy_text(backbone.params, backbone.config, PROMPTS[1], 8) == own_text[1][:8]
    assert len(set(own_text[0])) > 10  # no constant text, on which any loop would look right


@pytest.mark.parametrize("num_draft", [0, 1, 2, 3, 4])
def test_output_with_an_untrained_head_is_the_backbones_own(runtime, own_text, num_draft):
    """num_draft 0 is vanilla decoding. The budgets end rows inside a block; the stop token of row 1 is in none of the others' way."""
    used = runtime if num_draft else runtime.without_drafter()
    result = generate.run(used, PROMPTS, config_lib.DecodeConfig(max_new_tokens=BUDGET, num_draft=num_draft))
    assert [output.tokens for output in result.outputs] == own_text
    stop = own_text[1][11]
    result = generate.run(used, PROMPTS, config_lib.DecodeConfig(max_new_tokens=BUDGET, num_draft=num_draft, stop_tokens=(stop,)))
    for output, text in zip(result.outputs, own_text, strict=True):
        expected = text[: text.index(stop) + 1] if stop in text else text
        assert output.tokens == expected
        assert output.finish_reason == ("stop" if stop in text else "length")
    assert result.outputs[1].finish_reason == "stop"


def test_blocked_and_plain_layout_write_the_same(backbone, head, own_text):
    for blocked in (False, True):
        used = generate.make_runtime(backbone, head, column_blocks=blocked)
        result = generate.run(used, PROMPTS[:1], config_lib.DecodeConfig(max_new_tokens=BUDGET, num_draft=3))
        assert result.outputs[0].tokens == own_text[0]
