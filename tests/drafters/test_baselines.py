"""Baselines draft in the loop what a full recomputation of the text would, whatever was kept, rejected, or read in pieces; and nothing changes the output."""

import dataclasses

import baseline_reference
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from mtp_jax import config as config_lib
from mtp_jax.commands import shared
from mtp_jax.decoding import generate, loop
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import baselines, forms

KINDS = ("eagle", "eagle3", "deepseek", "own_cache", "medusa", "standalone")
M = 3
PROMPTS, MORE = fakes.prompts(3, 9, 20), fakes.prompts(6, 1, 11, seed=9)
CONFIG = config_lib.DecodeConfig(max_new_tokens=12, num_draft=M)
# A Llama, so that a standalone model can have its shape.
LLAMA = dataclasses.replace(fakes.BACKBONE, num_layers=2, layer_types=(), sliding_window=None, tied_embeddings=True)
SHAPE = dict(width=32, mlp_width=48, num_heads=4, num_kv_heads=2, head_dim=6, num_layers=2)


@dataclasses.dataclass
class Case:
    loaded: object
    head: object
    runtime: generate.Runtime

    @property
    def kind(self):
        return self.head.config.kind


def case_of(name, backbone):
    """A standalone model is the backbone with noise: it is right now and then, and sometimes M times."""
    kind, _, cut = name.partition(", ")
    if kind != "standalone":
        head = fakes.baseline(backbone, kind)
        return Case(backbone, head, generate.make_runtime(backbone, head, drafter=kind))
    loaded = fakes.backbone(LLAMA)
    head = fakes.baseline(loaded, kind, **SHAPE, **({"draft_vocab_size": 48} if cut else {}))
    rng = np.random.default_rng(3)
    head.params = jax.tree.map(lambda leaf: leaf + 0.12 * leaf.std() * rng.normal(size=leaf.shape).astype(leaf.dtype), loaded.params)
    return Case(loaded, head, generate.make_runtime(loaded, head, drafter=kind))


@pytest.fixture(scope="module", params=[*KINDS, "standalone, 48 tokens"])
def case(request, backbone):
    return case_of(request.param, backbone)


def check(case, text, drafts):
    """Each draft is the most probable one, up to rounding, by the full recomputation."""
    for k, q in enumerate(baseline_reference.draft(case.head, case.loaded, text, drafts)):
        assert q[drafts[k]] > q.max() - 1e-4, f"draft {k + 1} after {len(text)} tokens"
        assert q.max() - np.sort(q)[-2] > 0 and (q > 0).sum() > 1


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "deepseek", "own_cache", "medusa"])
def test_drafts_in_the_loop_whatever_was_kept(kind, backbone):
    """A script keeps 0 to M drafts; the drafter's own are looked at."""
    case = case_of(kind, backbone)
    gaps = [[1, 4, 2, 1, 4, 4, 3], [4, 1, 1, 3, 2, 4, 4]]
    prompts = fakes.prompts(7, 7)
    outputs = generate.run(case.runtime.without_drafter(), prompts, config_lib.DecodeConfig(max_new_tokens=20)).outputs
    texts = np.array([prompt + output.tokens for prompt, output in zip(prompts, outputs, strict=True)])
    seen = fakes.drafts_in_the_loop(case.runtime, texts, 7, gaps)
    for (row, length), drafts in seen.items():
        check(case, texts[row, : length + 1].tolist(), drafts)


def watched(case, prompts, **options):
    """A run, and every row's drafts by row and slots. Rows that have ended go on drafting at their end; those are left out."""
    seen = {}

    def note(lengths, drafts):
        seen.update({(row, int(length)): drafts[row].tolist() for row, length in enumerate(lengths)})

    drafter = fakes.Watched(case.runtime.drafter, note, case.loaded.config.vocab_size)
    runtime = dataclasses.replace(case.runtime, drafter=drafter, drafter_params=(None, case.runtime.drafter_params))
    result = generate.run(runtime, prompts, CONFIG, keep_state=True, **options)
    jax.effects_barrier()
    return result, {key: drafts for key, drafts in seen.items() if key[1] < int(result.state.cache.lengths[key[0]])}


def test_two_turns_read_in_pieces(case, monkeypatch):
    """Ragged rows whose turns end by a budget: at once (before any draft), in the middle of a step, with all drafts kept."""
    monkeypatch.setattr(loop, "CHUNK", 4)
    first, drafts = watched(case, PROMPTS, budgets=[6, 12, 1])
    texts = [prompt + output.tokens for prompt, output in zip(PROMPTS, first.outputs, strict=True)]
    seen = [(texts, drafts)]
    before = first.state
    second, drafts = watched(case, MORE, before=before)
    texts = [text + more + output.tokens for text, more, output in zip(texts, MORE, second.outputs, strict=True)]
    seen.append((texts, drafts))
    plain = generate.run(case.runtime.without_drafter(), [text[:-12] for text in texts], CONFIG)
    assert [output.tokens for output in plain.outputs] == [output.tokens for output in second.outputs]
    for whole, found in seen:
        assert len(found) > 4
        for (row, length), own in found.items():
            check(case, whole[row][: length + 1], own)
    if case.kind == "standalone":
        accepted = np.sum([output.accepted for output in first.outputs + second.outputs], axis=0)
        assert 0 < accepted[M - 1] < accepted[0] < sum(output.steps for output in first.outputs + second.outputs)


def test_sampled_output_is_the_backbones_own(case):
    """With a stop token, drafts that end early, and verify passes of two widths; greedy output is compared above."""
    config = config_lib.DecodeConfig(max_new_tokens=24, num_draft=4, temperature=0.8, min_confidence=0.2, short_drafts=(1,))
    stop = generate.run(case.runtime.without_drafter(), PROMPTS, config).outputs[0].tokens[6]
    config = dataclasses.replace(config, stop_tokens=(stop,))
    vanilla = generate.run(case.runtime.without_drafter(), PROMPTS, config).outputs
    drafted = generate.run(case.runtime, PROMPTS, config).outputs
    assert [(output.tokens, output.finish_reason) for output in drafted] == [(output.tokens, output.finish_reason) for output in vanilla]
    assert drafted[0].finish_reason == "stop" and all(output.drafted for output in drafted)


def test_drawn_drafts_come_with_their_distribution(case):
    """The condition under which rejection keeps the backbone's distribution (decoding/verify.py)."""
    rules = dataclasses.replace(CONFIG, temperature=1.0, accept="rejection", seed=4)
    job = generate.make_job(case.runtime, PROMPTS, rules)
    state = job.prefill()
    proposal, _ = loop.propose_alone(case.runtime.drafter, case.runtime.step_params, case.runtime.drafter_params, state, job.request, config=job.rules)
    for row, prompt in enumerate(PROMPTS):
        drawn = proposal.tokens[row].tolist()
        expected = baseline_reference.draft(case.head, case.loaded, prompt + [int(state.tokens[row, len(prompt)])], drawn)
        np.testing.assert_allclose(proposal.probs[row], expected, atol=2e-4)
    assert len({tuple(drafts) for drafts in proposal.tokens.tolist()}) == len(PROMPTS)


def test_garbage_behind_the_text_changes_nothing(case):
    job = generate.make_job(case.runtime, PROMPTS, CONFIG)
    state = job.prefill()
    behind = jnp.arange(state.cache.num_slots) >= state.cache.lengths[:, None] - 1  # the newest pair's, or token's, slot is written first

    def fill(leaf):
        return jnp.where(behind[:, None, :, None], jnp.where(jnp.arange(leaf.shape[-1]) % 2 == 0, 1e30, -3e4), leaf)

    dirty = state.replace(drafter_state=jax.tree.map(fill, state.drafter_state))
    assert jax.tree.leaves(state.drafter_state) or case.kind == "medusa"
    arguments = case.runtime.drafter, case.runtime.step_params, case.runtime.drafter_params
    clean, same = (loop.propose_alone(*arguments, s, job.request, config=job.rules)[0].tokens for s in (state, dirty))
    np.testing.assert_array_equal(clean, same)


def test_a_model_equal_to_the_backbone_is_always_right():
    loaded = fakes.backbone(LLAMA)
    head = fakes.baseline(loaded, "standalone", **SHAPE)
    head.params = loaded.params
    outputs = generate.run(generate.make_runtime(loaded, head, drafter="standalone"), PROMPTS, dataclasses.replace(CONFIG, max_new_tokens=13)).outputs
    assert [output.steps for output in outputs] == [3, 3, 3]  # one token by the prefill, then M + 1 a step


def test_a_drafter_and_a_head_of_another_form(backbone, head, runtime):
    eagle = fakes.baseline(backbone, "eagle")
    for drafter in ("mtp", "hybrid", "deepseek"):
        with pytest.raises(config_lib.ConfigError, match=f"drafter='{drafter}': head 'random' is of another form; it must be drafter='eagle'"):
            generate.attach(runtime, eagle, drafter)
    with pytest.raises(config_lib.ConfigError, match="drafter='eagle': head 'random' is of another form; it must be drafter='mtp'"):
        generate.attach(runtime, head, "eagle")
    with pytest.raises(config_lib.ConfigError, match="drafter='medusa': needs a head"):
        generate.attach(runtime, None, "medusa")
    with pytest.raises(shared.UsageError, match="--drafter eagle: needs a head; --head none"):
        shared.load_both("smollm2-135m-instruct", "none", "eagle")


def test_only_eagle3_taps_the_backbone(backbone, runtime):
    """Other drafters run the very programs of a backbone without taps; so does vanilla decoding beside an eagle3."""
    eagle3 = generate.attach(runtime, fakes.baseline(backbone, "eagle3"), "eagle3")
    assert eagle3.prefill_module.taps == eagle3.step_module.taps == (1, 2, 4)
    for other in (eagle3.without_drafter(), generate.attach(eagle3, fakes.baseline(backbone, "eagle"), "eagle"), generate.attach(eagle3, None, "jacobi")):
        assert (other.prefill_module, other.step_module) == (runtime.prefill_module, runtime.step_module)
        assert hash(other.step_module) == hash(runtime.step_module)


def test_a_turn_without_taps_after_one_with_them_and_the_other_way_round(backbone):
    case = case_of("eagle3", backbone)
    plain = case.runtime.without_drafter()
    first = generate.run(case.runtime, PROMPTS, CONFIG, keep_state=True)
    second = generate.run(plain, MORE, CONFIG, before=first.state, keep_state=True)
    texts = [prompt + output.tokens + more for prompt, output, more in zip(PROMPTS, first.outputs, MORE, strict=True)]
    assert [output.tokens for output in second.outputs] == [output.tokens for output in generate.run(plain, texts, CONFIG).outputs]
    eagle = generate.run(case_of("eagle", backbone).runtime, PROMPTS, CONFIG, keep_state=True)
    with pytest.raises(config_lib.ConfigError, match=r"taps=\(1, 2, 4\): are not kept of a text decoded without them"):
        generate.run(case.runtime, MORE, CONFIG, before=eagle.state)


def test_fused_features_by_hand(backbone):
    """fuse [low; middle; high] of the backbone in numpy, whatever the last state is; of 30 layers, the taps of the authors' code."""
    head = fakes.baseline(backbone, "eagle3")
    stream = []
    hidden = reference.backbone(backbone.params, backbone.config, PROMPTS[1], stream)[0]
    kernel = np.asarray(head.params["fuse"]["kernel"], np.float64)
    expected = stream[1] @ kernel[:32] + stream[2] @ kernel[32:64] + stream[4] @ kernel[64:]
    output = backbone_lib.Backbone(backbone.config, taps=(1, 2, 4)).apply({"params": backbone.params}, np.array([PROMPTS[1]]))
    np.testing.assert_allclose(output.hidden[0], np.concatenate([hidden, stream[1], stream[2], stream[4]], axis=1), rtol=1e-4, atol=1e-4)
    module = forms.make(head.config, backbone.config)
    fused = baselines.true_hidden(module, head.params, output.hidden)
    np.testing.assert_allclose(fused[0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(baselines.true_hidden(module, head.params, output.hidden.at[..., :32].set(7.0)), fused)
    deep = dataclasses.replace(LLAMA, num_layers=30, layer_types=())
    assert config_lib.baseline_config_for(deep, "eagle3").taps == (2, 15, 27)


def test_a_medusa_drafts_no_more_than_it_has_heads(backbone):
    runtime = generate.make_runtime(backbone, fakes.baseline(backbone, "medusa", num_draft=2), drafter="medusa")
    with pytest.raises(config_lib.ConfigError, match="num_draft=3: must be at most 2, the heads that this Medusa has"):
        generate.run(runtime, PROMPTS, CONFIG)


def test_another_drafters_state_is_refused(case):
    if case.kind != "medusa":
        first = generate.run(case.runtime.without_drafter(), PROMPTS, CONFIG, keep_state=True)
        with pytest.raises(config_lib.ConfigError, match=r"keeps a state of its own|taps=.* are not kept of a text"):
            generate.run(case.runtime, MORE, CONFIG, before=first.state)


@pytest.mark.parametrize(
    "kind, values, message",
    [
        ("eagel", {}, "kind='eagel': must be one of standalone, eagle, eagle3, deepseek, own_cache, medusa"),
        ("eagle", {"width": 16}, "width=16: must be the backbone's, 32, with kind='eagle'"),
        ("eagle3", {}, r"taps=\(2, 2, 1\): must be ascending numbers of backbone layers, each in 1..4"),
        ("eagle3", {"taps": (1, 2, 5)}, r"taps=\(1, 2, 5\): must be ascending"),
        ("eagle3", {"taps": (0, 2)}, r"taps=\(0, 2\): must be ascending"),
        ("eagle3", {"taps": ()}, r"taps=\(\): must be ascending"),
        ("eagle3", {"taps": (1, 2, 3), "width": 16}, "width=16: must be the backbone's, 32, with kind='eagle3'"),
        ("eagle", {"taps": (1, 2, 3)}, r"taps=\(1, 2, 3\): must be empty: eagle reads the backbone's last state alone"),
        ("eagle", {"num_layers": 2}, "num_layers=2: must be 0: eagle has no such part"),
        ("deepseek", {"num_heads": 3}, "num_heads=3: must be a multiple of num_kv_heads=2"),
        ("own_cache", {"head_dim": 7}, "head_dim=7: must be even"),
        ("medusa", {"num_draft": 0}, "num_draft=0: must be an integer of at least 1"),
        ("medusa", {"pointer_heads": 1}, "pointer_heads=1: must be 0: medusa has no pointer"),
        ("eagle", {"draft_vocab_size": 65}, "draft_vocab_size=65: must not exceed the backbone's vocabulary of 64"),
    ],
)
def test_impossible_shapes(kind, values, message):
    with pytest.raises(config_lib.ConfigError, match=message):
        config_lib.baseline_config_for(fakes.BACKBONE, kind, **values)
