"""The backbone's first layers as drafter, against a backbone that has no other layers and no cache."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, loop
from mtp_jax.models import backbone as backbone_lib

PROMPTS = fakes.prompts(3, 40, 17)
M = 3
# Layers 4 and 5 read the K/V of layers 3 and 2.
SHARING = dataclasses.replace(
    fakes.TIED, num_layers=6, layer_types=("full", "sliding", "full", "sliding", "sliding", "full"), full_head_dim=8, full_kv_heads=1, shared_kv_layers=2
)
BACKBONES = {"tied": fakes.TIED, "untied": fakes.BACKBONE, "sharing": SHARING}


def exits(loaded, **options):
    return generate.attach(generate.make_runtime(loaded, **options), None, "early_exit")


def tokens_of(result):
    return [output.tokens for output in result.outputs]


def cut(loaded, depth):
    """The first layers as a backbone of their own: logits [B, T, V] of whole texts."""
    config = dataclasses.replace(loaded.config, num_layers=depth, layer_types=loaded.config.layer_types[:depth], shared_kv_layers=0)
    params = {name: leaf for name, leaf in loaded.params.items() if not name.startswith("layers_") or int(name[7:]) < depth}
    return jax.jit(lambda tokens: backbone_lib.Backbone(config).apply({"params": params}, tokens).logits)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("name", BACKBONES)
def test_drafts_are_those_of_a_backbone_cut_short(name, blocks):
    """In every step of the loop, after rejections and after whole drafts were kept."""
    loaded, depth, seen = fakes.backbone(BACKBONES[name]), 2, []
    runtime = exits(loaded, column_blocks=blocks)

    def note(lengths, drafts):
        seen.append((np.array(lengths), np.array(drafts)))

    runtime = dataclasses.replace(runtime, drafter=fakes.Watched(runtime.drafter, note, 64), drafter_params=(None, None))
    config = config_lib.DecodeConfig(max_new_tokens=30, num_draft=M, exit_layer=depth)
    result = generate.run(runtime, PROMPTS, config)
    jax.effects_barrier()
    texts = [prompt + output.tokens for prompt, output in zip(PROMPTS, result.outputs, strict=True)]
    assert {len(output.tokens) for output in result.outputs} == {30} and sum(sum(output.accepted) for output in result.outputs) > 0
    expected, wanted = cut(loaded, depth), []
    for lengths, drafts in seen:
        wanted += [(row, int(length), drafts[row].tolist()) for row, length in enumerate(lengths) if length + 1 < len(texts[row])]
    assert len({(row, length) for row, length, _ in wanted}) > 20
    for row, length, drafts in wanted:
        text = np.zeros((1, 80), np.int32)
        text[0, : length + 1] = texts[row][: length + 1]
        for number, draft in enumerate(drafts):
            chosen = int(expected(text)[0, length + number].argmax())
            assert draft == chosen, f"row {row}, {length} slots, draft {number + 1}"
            text[0, length + 1 + number] = draft


@pytest.mark.parametrize("window_cache", ["full", pytest.param("ring", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["untied", "sharing", pytest.param("tied", marks=pytest.mark.slow)])
def test_output_is_vanillas(name, window_cache):
    runtime = exits(fakes.backbone(BACKBONES[name]))
    for changes in ({}, {"temperature": 0.8}):
        config = config_lib.DecodeConfig(max_new_tokens=40, num_draft=M, stop_tokens=(16, 3), exit_layer=3, window_cache=window_cache, **changes)
        assert tokens_of(generate.run(runtime, PROMPTS, config)) == tokens_of(generate.run(runtime.without_drafter(), PROMPTS, config))


def test_all_layers_draft_what_the_backbone_chooses():
    runtime = exits(fakes.backbone())
    config = config_lib.DecodeConfig(max_new_tokens=1 + 5 * (M + 1), num_draft=M, exit_layer=4)
    for output in generate.run(runtime, PROMPTS, config).outputs:
        assert (output.steps, output.accepted) == (5, [5, 5, 5])


def test_sampled_drafts_come_with_their_distribution():
    loaded = fakes.backbone()
    runtime, depth = exits(loaded), 2
    config = config_lib.DecodeConfig(max_new_tokens=9, num_draft=2, exit_layer=depth, temperature=0.7, top_k=9, accept="rejection")
    job = generate.make_job(runtime, PROMPTS, config)
    state = job.prefill()
    proposal, _ = loop.propose_alone(runtime.drafter, job.backbone[1], None, state, job.request, config=job.rules)
    expected = cut(loaded, depth)
    for row, prompt in enumerate(PROMPTS):
        text = np.zeros((1, 80), np.int32)
        text[0, : len(prompt) + 1] = [*prompt, int(state.pending[row])]
        for number, draft in enumerate(np.asarray(proposal.tokens[row])):
            logits = np.asarray(expected(text)[0, len(prompt) + number], np.float64) / 0.7
            kept = logits >= np.sort(logits)[-9]
            probs = np.where(kept, np.exp(logits - logits.max()), 0)
            np.testing.assert_allclose(proposal.probs[row, number], probs / probs.sum(), atol=1e-4)
            assert kept[draft]
            text[0, len(prompt) + 1 + number] = draft
    np.testing.assert_array_equal(proposal.cache.lengths, state.cache.lengths)


def test_it_writes_behind_the_lengths_and_into_its_own_layers_alone():
    loaded, depth = fakes.backbone(), 2
    runtime = exits(loaded)
    job = generate.make_job(runtime, PROMPTS, config_lib.DecodeConfig(max_new_tokens=9, num_draft=M, exit_layer=depth))
    state = job.prefill()
    before = jax.tree.map(jnp.copy, state.cache)
    proposal, _ = loop.propose_alone(runtime.drafter, job.backbone[1], None, state, job.request, config=job.rules)
    for layer, (old, new) in enumerate(zip(before.keys, proposal.cache.keys, strict=True)):
        changed = np.argwhere((np.asarray(old) != np.asarray(new)).any(axis=(1, 3)))  # [row, slot]
        slots = [[row, length + k] for row, length in enumerate(before.lengths.tolist()) for k in range(M)]
        assert changed.tolist() == (slots if layer < depth else [])


def test_no_more_layers_than_there_are():
    config = config_lib.DecodeConfig(max_new_tokens=9, num_draft=M, exit_layer=5)
    with pytest.raises(config_lib.ConfigError, match="exit_layer=5: must be at most 4, the backbone's layers"):
        generate.run(exits(fakes.backbone()), PROMPTS, config)
    with pytest.raises(config_lib.ConfigError, match="exit_layer=-1: must be an integer of at least 0"):
        config_lib.DecodeConfig(exit_layer=-1)
