"""Sampled text has the backbone's distribution, whatever drafts: whole sequences against the chain rule, in closed form.

A vocabulary of 5 and four tokens after one prompt, in many rows: 625 sequences. The first token comes from the prefill, the next from judged
drafts, and the last is often a bonus. Every count is compared: of all sequences and all their beginnings, and of each token at each place.

Bound on false failure, for any number of rows n and without approximation: a count of mean n p strays so far that n KL(count / n || p) >= t with
probability at most 2 exp(-t) (Chernoff). Over K counts t = log(2 K / 1e-6), so a right sampler fails once in a million seeds; seeds are fixed.
"""

import dataclasses
import itertools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.decoding import generate, loop, sampling, verify
from mtp_jax.drafters import hybrid

BACKBONE = dataclasses.replace(fakes.BACKBONE, vocab_size=5, num_layers=1, layer_types=("full",))
# The last two tokens are drafted only where the text holds them: 3 does, 4 does not.
HEAD = config_lib.head_config_for(BACKBONE, donors=(0,), width=16, mlp_width=24, draft_vocab_size=3, pointer_heads=2)
PROMPT = [1, 0, 3, 1, 0]
ROWS, LENGTH, M, V = 16384, 4, 2, 5
RULES = config_lib.DecodeConfig(num_draft=M, max_new_tokens=LENGTH, temperature=2.0, accept="rejection")
FILTERS = {"none": {}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.75}, "min_p": {"min_p": 0.3}, "all": {"top_k": 4, "top_p": 0.9, "min_p": 0.15}}


@dataclasses.dataclass(frozen=True)
class Guess:
    """Drafts that follow from the text: any token, and now and then none."""

    def init(self, batch, num_slots):
        return ()

    def draft(self, params, state, context, rules):
        places = context.cache.lengths[:, None] + jnp.arange(rules.num_draft)
        return drafters.Proposal(tokens=(places * 7 + context.pending[:, None] * 4) % (V + 1) - 1), state

    def commit(self, params, state, seen, context):
        return state


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all of the time here goes into compiling programs that run for a moment."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def loaded():
    return fakes.backbone(BACKBONE, seed=4)


@pytest.fixture(scope="module")
def head(loaded):
    return dataclasses.replace(fakes.head(loaded, HEAD), draft_ids=np.arange(3, dtype=np.int32))


@pytest.fixture(scope="module")
def runtime(loaded, head):
    return generate.make_runtime(loaded, head, column_blocks=False)


@pytest.fixture(scope="module")
def logits(loaded, runtime):
    """The backbone's logits after the prompt and each of the 125 continuations by three tokens, by place: [125, 4, V]."""
    texts = jnp.asarray([[*PROMPT, *more] for more in itertools.product(range(V), repeat=LENGTH - 1)])
    return np.asarray(runtime.prefill_module.apply({"params": loaded.params}, texts).logits, np.float64)[:, len(PROMPT) - 1 :]


def limited(logits, rules):
    """Probabilities after temperature and filters, in float64, one row at a time."""
    scaled = logits / rules.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs)[: rules.top_k or None]
    ahead = np.concatenate([[0.0], np.cumsum(probs[order] / probs[order].sum())[:-1]])
    kept = [token for token, before in zip(order, ahead, strict=True) if before < rules.top_p and probs[token] >= rules.min_p * probs.max()]
    return np.where(np.isin(np.arange(len(probs)), kept), probs, 0.0) / probs[kept].sum()


def sequences(logits, rules):
    """Probability of each sequence of four tokens [V, V, V, V], by the chain rule."""
    steps = [np.stack([limited(row, rules) for row in logits[:, place]]).reshape(V, V, V, V) for place in range(LENGTH)]
    first, second, third, fourth = steps[0][0, 0, 0], steps[1][:, 0, 0], steps[2][:, :, 0], steps[3]
    return first[:, None, None, None] * second[:, :, None, None] * third[:, :, :, None] * fourth


def prefilled(runtime, rules):
    """State after the prefill, and the request."""
    request = loop.Request(limits=jnp.full((ROWS,), len(PROMPT) + LENGTH), keys=sampling.row_keys(7, range(ROWS)))
    prompts, lengths = jnp.tile(jnp.asarray(PROMPT), (ROWS, 1)), jnp.full((ROWS,), len(PROMPT))
    module, params, slots = runtime.prefill_module, runtime.prefill_params, len(PROMPT) + LENGTH + M
    return loop.prefill(module, params, prompts, lengths, request, num_slots=slots, drafter=None, config=loop.rules_of(rules, M)), request


def counted(state):
    """How many rows wrote each sequence [V, V, V, V], and the share of drafts kept."""
    text = np.asarray(state.tokens)[:, len(PROMPT) : len(PROMPT) + LENGTH]
    found = np.zeros((V,) * LENGTH)
    np.add.at(found, tuple(text.T), 1)
    return found, float(state.accepted.sum() / state.drafted.sum())


def strays(found, expected):
    """The largest n KL(count / n || p) of all counts, over the bound that the module's docstring states: above 1 is a failure."""
    rows, worst, cells = found.sum(), 0.0, 0
    beginnings = [tuple(range(length, LENGTH)) for length in range(1, LENGTH + 1)]
    places = [tuple(axis for axis in range(LENGTH) if axis != place) for place in range(1, LENGTH)]
    for axes in beginnings + places:
        share, probs = found.sum(axis=axes) / rows, expected.sum(axis=axes)
        worst, cells = max(worst, rows * divergence(share, probs).max()), cells + probs.size
    return worst / np.log(2 * cells / 1e-6)


def divergence(share, probs):
    """KL of coins, elementwise; infinite where what is impossible has happened."""
    probs = np.minimum(probs, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [np.where(a > 0, a * np.log(a / b), 0.0) for a, b in ((share, probs), (1 - share, 1 - probs))]
    return parts[0] + parts[1]


def test_the_filters_matter(logits):
    """Each one takes sequences away, and leaves many; all probabilities add up."""
    for name, changes in FILTERS.items():
        expected = sequences(logits, dataclasses.replace(RULES, **changes))
        np.testing.assert_allclose(expected.sum(), 1.0, rtol=1e-12)
        assert (expected > 0).sum() == 625 if name == "none" else 30 < (expected > 0).sum() < 400, name


CASES = [("match", "guess", "all")]
CASES += [("rejection", name, filters) for name in ("guess", "mtp") for filters in ("none", "all")]


@pytest.mark.parametrize("accept, name, filters", CASES)
def test_sequences_have_the_backbones_distribution(runtime, logits, accept, name, filters):
    rules = dataclasses.replace(RULES, accept=accept, **FILTERS[filters])
    drafter = Guess() if name == "guess" else runtime.drafter
    state, request = prefilled(runtime, dataclasses.replace(rules, accept="rejection"))  # the first token is the same
    params = runtime.prefill_params, runtime.drafter_params
    state = loop.decode(runtime.prefill_module, drafter, *params, state, request, config=loop.rules_of(rules, M))
    found, kept = counted(state)
    assert 0.1 < kept < 0.9, "one of the two branches is hardly taken"
    assert strays(found, sequences(logits, rules)) < 1


@dataclasses.dataclass(frozen=True)
class Named:
    """Tells compiled programs apart: the loop's are kept by drafter, so another name is traced anew."""

    name: str

    def commit(self, params, state, seen, context):
        return state


def step_by_step(runtime, name, change=lambda proposal: proposal):
    """`counted` after decoding by the loop's two half steps, with the head's sampled drafts."""
    (state, request), rules = prefilled(runtime, RULES), loop.rules_of(RULES, M)
    while not state.done.all():
        proposal, _ = loop.propose_alone(runtime.drafter, runtime.prefill_params, runtime.drafter_params, state, request, config=rules)
        state = loop.finish_step(runtime.prefill_module, Named(name), runtime.prefill_params, None, state, change(proposal), request, config=rules)
    return counted(state)[0]


def rejection_with(fault):
    """The rule once more, by inverse transform, with one fault."""

    def rejection(drafts, q, logits, positions, row_keys):
        p = jax.nn.softmax(logits, axis=-1)
        uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (2,))))(sampling.keys_at(row_keys, positions))  # [B, M+1, 2]
        ratio = jnp.take_along_axis(p[:, :-1] / jnp.maximum(q, 1e-30), drafts[..., None], axis=-1)[..., 0]
        keep = jnp.ones_like(drafts, bool) if fault == "accepts always" else uniform[:, :-1, 0] < ratio
        accepted = jnp.cumprod(keep, axis=1).sum(axis=1)
        left = p[:, :-1] if fault == "recovers from p" else jnp.maximum(p[:, :-1] - q, 0)
        left = jnp.concatenate([left, p[:, -1:]], axis=1)
        total = 1.0 if fault == "does not renormalise" else left.sum(axis=-1, keepdims=True)
        drawn = jnp.minimum((jnp.cumsum(left, axis=-1) <= uniform[..., 1:] * total).sum(axis=-1), V - 1)
        return accepted, jnp.where(jnp.arange(M + 1) < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), drawn).astype(jnp.int32)

    return rejection


@pytest.mark.parametrize("fault", ["nothing", "accepts always", "recovers from p", "does not renormalise"])
def test_the_check_finds_a_broken_rule(runtime, logits, monkeypatch, fault):
    """Power of the check above, at the same number of rows: broken rules exceed its bound many times; the same code without a fault does not."""
    monkeypatch.setattr(verify, "rejection", rejection_with(fault))
    worst = strays(step_by_step(runtime, fault), sequences(logits, RULES))
    assert worst < 1 if fault == "nothing" else worst > 3, worst


def test_the_check_finds_drafts_that_were_not_drawn_from_their_distribution(runtime, logits):
    """The classic mistake: the most probable drafts, proposed together with the head's distribution."""
    found = step_by_step(runtime, "own", lambda proposal: proposal.replace(tokens=jnp.argmax(proposal.probs, axis=-1).astype(jnp.int32)))
    assert strays(found, sequences(logits, RULES)) > 3


@pytest.fixture(scope="module", params=["none", "all"])
def proposed(runtime, request):
    """Rules; a state with the same text in all rows (its first token is the greedy one), its request, and what the head proposes there."""
    rules = dataclasses.replace(RULES, **FILTERS[request.param])
    state, asked = prefilled(runtime, dataclasses.replace(RULES, temperature=0.0))
    params = runtime.prefill_params, runtime.drafter_params
    proposal, _ = loop.propose_alone(runtime.drafter, *params, state, asked, config=loop.rules_of(rules, M))
    return rules, state, asked, proposal


def mixtures(loaded, head, text, drafts):
    """The head's distribution [M, V] at each draft step where it is given `drafts`, in float64."""
    hidden, _, keys, values = reference.backbone(loaded.params, loaded.config, text[:-1])
    table, rows = np.asarray(loaded.params["embed"]["embedding"]), np.asarray(loaded.params["unembed"]["kernel"]).T[head.draft_ids]
    last, state, found = len(text) - 2, hidden[-1], []
    for token in [text[-1], *drafts[:-1]]:
        out, state, copy, gate = reference.draft_step(
            head.params, head.config, loaded.config, table[token], state, dict(enumerate(keys)), dict(enumerate(values)), last, rows
        )
        found.append(reference.dense_q(out, copy, gate, head.draft_ids, np.asarray(text[1:]), last, V))
    return np.stack(found)


def test_a_drafts_distribution_is_the_heads_mixture_limited_as_the_backbones(loaded, head, proposed):
    """In every row, given the draft before; a token outside the draft vocabulary is drafted by copying alone, another by both ways."""
    rules, state, _, proposal = proposed
    text = np.asarray(state.tokens)[0, : len(PROMPT) + 1].tolist()
    assert proposal.probs.dtype == jnp.float32 and proposal.probs.shape == (ROWS, M, V)
    for first in np.unique(proposal.tokens[:, 0]):
        with np.errstate(divide="ignore"):
            expected = [limited(np.log(q), rules) for q in mixtures(loaded, head, text, [int(first), 0])]
        rows = np.asarray(proposal.probs)[np.asarray(proposal.tokens[:, 0]) == first]
        np.testing.assert_allclose(rows, np.broadcast_to(expected, rows.shape), rtol=2e-4, atol=1e-6)
        assert (rows[..., 4] == 0).all() and (rules.min_p > 0 or (rows[..., :4] > 0).all())


def test_drafts_are_drawn_from_their_distribution(proposed):
    """Both drafts together: frequencies against q(d1) q(d2 | d1), under the bound of the module's docstring; with keys that nothing else uses."""
    _, _, asked, proposal = proposed
    tokens, probs = np.asarray(proposal.tokens), np.asarray(proposal.probs, np.float64)
    joint, found = np.zeros((V, V)), np.zeros((V, V))
    for first in np.unique(tokens[:, 0]):
        joint[first] = probs[0, 0, first] * probs[tokens[:, 0] == first][0, 1]
    np.add.at(found, tuple(tokens.T), 1)
    assert (ROWS * divergence(found / ROWS, joint)).max() < np.log(2 * V * V / 1e-6)
    assert len(np.unique(tokens[:, 0])) > 1
    keys = sampling.keys_at(asked.keys, jnp.tile(len(PROMPT) + 1 + jnp.arange(M), (ROWS, 1)), sampling.DRAFT)
    assert (np.asarray(sampling.draw(jnp.log(proposal.probs), keys)) == tokens).mean() > 0.999  # all, but for rounding


def test_a_draft_is_kept_as_often_as_the_distributions_overlap(runtime, logits, proposed):
    """One step: draft 1 with probability sum min(p, q), draft 2 with that of the two after draft 1, which was kept. Bound as above."""
    rules, state, asked, proposal = proposed
    pending = int(state.pending[0])
    tokens, q = np.asarray(proposal.tokens), np.asarray(proposal.probs, np.float64)
    after = logits.reshape(V, V, V, LENGTH, V)[pending]  # of the greedy first token
    p = limited(after[0, 0, 1], rules)
    both = sum(
        min(p[first], q[0, 0, first]) * np.minimum(limited(after[first, 0, 2], rules), q[tokens[:, 0] == first][0, 1]).sum()
        for first in np.unique(tokens[:, 0])
    )
    expected = np.array([np.minimum(p, q[0, 0]).sum(), both])
    copy = jax.tree.map(jnp.copy, state)  # it is donated
    new = loop.finish_step(runtime.prefill_module, Named("own"), runtime.prefill_params, None, copy, proposal, asked, config=loop.rules_of(rules, M))
    share = np.asarray(new.accepted).mean(axis=0)
    assert (ROWS * divergence(share, expected)).max() < np.log(2 * M / 1e-6)
    assert abs(p[q[0, 0].argmax()] - expected[0]) > 0.02, "keeping the most probable draft would look the same"


def test_the_hybrids_copied_drafts_are_certain_and_the_others_the_heads(runtime):
    """Half of the rows are made to end in three tokens that occurred before."""
    rules, (state, request) = loop.rules_of(RULES, M), prefilled(runtime, dataclasses.replace(RULES, temperature=0.0))
    copies = np.arange(ROWS) % 2 == 0
    text = jnp.where(copies[:, None], jnp.asarray([1, 0, 1, 0, 1, 0]), jnp.asarray([4, 4, 2, 1, 3, 0]))
    state = state.replace(tokens=state.tokens.at[:, :6].set(text))
    params = runtime.prefill_params, runtime.drafter_params

    def propose(drafter):
        proposal, _ = loop.propose_alone(drafter, *params, state, request, config=rules)
        return np.asarray(proposal.tokens), np.asarray(proposal.probs)

    (tokens, probs), (own_tokens, own_probs) = propose(hybrid.Hybrid(runtime.drafter, min_match=3)), propose(runtime.drafter)
    assert (tokens[copies] == [1, 0]).all() and (probs[copies] == np.eye(V)[[1, 0]]).all()
    assert (tokens[~copies] == own_tokens[~copies]).all()
    np.testing.assert_allclose(probs[~copies], own_probs[~copies], rtol=1e-5)
    assert own_probs.max() < 1


def test_greedy_decoding_knows_one_rule(runtime):
    """At temperature 0 no distribution is made, and a draft is kept if it is the backbone's choice."""
    rules = loop.rules_of(dataclasses.replace(RULES, temperature=0.0), M)
    state, request = prefilled(runtime, RULES)
    proposal, _ = loop.propose_alone(runtime.drafter, runtime.prefill_params, runtime.drafter_params, state, request, config=rules)
    assert proposal.probs is None
    scores = jnp.asarray([[[0.0, 0.1, 0, 0, 0], [0, 0, 0, 0.1, 0], [0.1, 0, 0, 0, 0]]])
    accepted, targets = verify.judge(jnp.asarray([[1, 4]]), None, scores, jnp.asarray([[4, 5, 6]]), request.keys[:1], rules)
    assert (accepted.tolist(), targets.tolist()) == ([1], [[1, 3, 0]])


def test_a_rows_seed_decides_its_text_in_any_batch(runtime):
    """A row of a batch with seeds, and the same prompt alone with that seed in the config: equal, statistics included."""
    prompts, seeds = fakes.prompts(3, 9, 5, 9, vocab_size=V), [5, 2**32 - 1, 0, 5]
    config = dataclasses.replace(RULES, max_new_tokens=20, num_draft=1)
    together = generate.run(runtime, prompts, config, seeds=seeds).outputs
    for prompt, seed, output in zip(prompts, seeds, together, strict=True):
        assert generate.run(runtime, [prompt], dataclasses.replace(config, seed=seed)).outputs == [output]
    again = generate.run(runtime, prompts[::-1], config, seeds=[1, 0, 1, 5]).outputs  # other places and neighbours
    assert (again[1], again[3]) == (together[2], together[0]) and again[2].tokens != together[1].tokens


@pytest.mark.parametrize(
    "seeds, message",
    [
        ([1], "seeds has 1 entries for 2 prompts: must be as many"),
        ([1, 2, 3], "seeds has 3 entries for 2 prompts: must be as many"),
        ([1, -1], "seeds holds -1: each must be in 0..4294967295"),
        ([2**32, 1], "seeds holds 4294967296: each must be in 0..4294967295"),
    ],
)
def test_bad_seeds_are_refused(runtime, seeds, message):
    with pytest.raises(config_lib.ConfigError, match=message):
        generate.run(runtime, [[1], [2]], RULES, seeds=seeds)
