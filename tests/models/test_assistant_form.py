"""The head in the form of Gemma 4's assistants, on random weights: decoding and training draft the same, every number is learnt, shapes, refusals.

That it computes what transformers computes is for test_assistant_parity.py to say.
"""

import dataclasses
import json

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_families import GEMMA4, TEXTS, steps

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import assistant, heads
from mtp_jax.config import ConfigError
from mtp_jax.decoding import generate
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache as cache_lib
from mtp_jax.models import head as head_lib
from mtp_jax.models import layers, presets

M, T, S = 2, 14, 20
OWN = config_lib.assistant_head_config_for(GEMMA4, width=16, mlp_width=24)
HEADS = {"own table": OWN, "centroids": dataclasses.replace(OWN, output="centroids", num_centroids=16, top_centroids=5)}


@pytest.fixture(scope="module")
def backbone():
    return fakes.backbone(GEMMA4, seed=2)


@pytest.fixture(scope="module", params=HEADS)
def head(request, backbone):
    loaded = fakes.head(backbone, HEADS[request.param])
    if request.param == "centroids":
        loaded.draft_ids = np.random.default_rng(6).permutation(64).astype(np.int32)
    return loaded


def test_parallel_draft_steps_equal_step_by_step_decoding(backbone, head):
    """Two rows of 12 in parallel score the whole table, single ones only their clusters; texts are much longer than the window."""
    module = backbone_lib.Backbone(GEMMA4)
    plain = head_lib.Head(head.config, GEMMA4)
    blocked, blocks = head_lib.Head(head.config, GEMMA4, column_blocks=True), layers.to_column_blocks(head.params)
    table, tokens, rows = backbone.params["embed"]["embedding"], jnp.asarray(TEXTS[:2]), jnp.arange(T - M)

    def donors(cache):
        return ({donor: part[donor] for donor in (2, 3)} for part in (cache.keys, cache.values))

    @jax.jit
    def parallel():
        output = module.apply({"params": backbone.params}, tokens)
        last_slot = jnp.broadcast_to(rows, (2, T - M))
        return steps(plain, head.params, table, lambda k: tokens[:, rows + k], output.hidden[:, : T - M], *donors(output.cache), last_slot, ())

    @jax.jit
    def one_row(cache, token, ahead):
        output = module.apply({"params": backbone.params}, token, cache)
        drafted = steps(blocked, blocks, table, lambda k: ahead[:, k - 1 : k], output.hidden, *donors(output.cache), cache.lengths[:, None], ())
        return drafted, output.cache.replace(lengths=cache.lengths + 1)

    together, cache = parallel(), cache_lib.empty(GEMMA4, 2, S)
    for row in range(T - M):
        drafted, cache = one_row(cache, tokens[:, row : row + 1], tokens[:, row + 1 : row + 1 + M])
        for one, many in zip(drafted, together, strict=True):
            np.testing.assert_allclose(one.logits[:, 0], many.logits[:, row], rtol=1e-4, atol=2e-4)
            np.testing.assert_allclose(one.hidden[:, 0], many.hidden[:, row], rtol=1e-4, atol=2e-4)


def test_every_draft_in_the_decode_loop(backbone, head):
    """One to four tokens are committed a step, other numbers in the other row. The reference takes each step for itself, from a
    pass over the whole text; what comes after a row's slots is spoilt there, and is another draft's leftover in the loop."""
    prompt_length, num_draft, gaps = 4, 3, [[4, 2, 1, 3, 4, 1], [1, 3, 4, 2, 1, 4]]
    runtime, prompts = generate.make_runtime(backbone, head), fakes.prompts(prompt_length, prompt_length)
    answers = generate.run(runtime.without_drafter(), prompts, config_lib.DecodeConfig(max_new_tokens=16)).outputs
    texts = np.asarray([prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)])
    whole = jax.jit(backbone_lib.Backbone(GEMMA4).apply)({"params": backbone.params}, texts)
    text, plain, table = jnp.asarray(texts), head_lib.Head(head.config, GEMMA4), backbone.params["embed"]["embedding"]

    @jax.jit
    def one_by_one(row, slots):
        after = jnp.arange(texts.shape[1])[:, None] >= slots
        keys, values = ({donor: jnp.where(after, 9.0, part[donor][row])[None] for donor in (2, 3)} for part in (whole.cache.keys, whole.cache.values))
        token, hidden, drafts = text[row, slots], whole.hidden[row, slots - 1][None, None], []
        for _ in range(num_draft):
            output = plain.apply({"params": head.params}, table[token][None, None], hidden, keys, values, (slots - 1)[None, None], ())
            token, hidden = jnp.asarray(head.draft_ids)[output.logits.argmax()], output.hidden
            drafts.append(token)
        return jnp.stack(drafts)

    found = fakes.drafts_in_the_loop(runtime, texts, prompt_length, gaps)
    for (row, slots), drafts in found.items():
        np.testing.assert_array_equal(drafts, one_by_one(row, slots), err_msg=f"row {row} after {slots} slots")
    assert len({token for drafts in found.values() for token in drafts}) > 9  # not a few tokens always


def test_text_is_the_backbones_own(backbone, head):
    """Drafting adds the head's parameters and two lists of the vocabulary's length, no rows of the backbone."""
    runtime = generate.make_runtime(backbone, head)
    config = config_lib.DecodeConfig(max_new_tokens=12, num_draft=3)
    prompts = fakes.prompts(3, 9)
    found, plain = (generate.run(r, prompts, config) for r in (runtime, runtime.without_drafter()))
    assert [output.tokens for output in found.outputs] == [output.tokens for output in plain.outputs]
    assert found.drafter_bytes == {"parameters": sum(leaf.nbytes for leaf in jax.tree.leaves(head.params)) + 2 * 4 * 64, "state": 0}


def test_gradients_reach_every_parameter_but_the_choice_of_clusters(backbone, head):
    rows, text, table = jnp.asarray([[0, 3, 9]]), jnp.asarray(TEXTS[0]), backbone.params["embed"]["embedding"]

    @jax.jit
    @jax.grad
    def gradient(params):
        output = backbone_lib.Backbone(GEMMA4).apply({"params": backbone.params}, text[None])
        keys, values = ({donor: part[donor] for donor in (2, 3)} for part in (output.cache.keys, output.cache.values))
        module, hidden = head_lib.Head(head.config, GEMMA4), output.hidden[0][rows]
        for k in (1, 2):
            drafted = module.apply({"params": params}, table[text[rows + k]], hidden, keys, values, rows, ())
            hidden = drafted.hidden
        return head_lib.mix(drafted, None, text[None], rows).vocab[..., :7].sum()

    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(head.params)):
        assert np.isfinite(leaf).all() and (np.abs(leaf).max() > 0) == ("centroids" not in jax.tree_util.keystr(path)), jax.tree_util.keystr(path)


@pytest.mark.parametrize("rows", [1, 7])
def test_clusters_by_numpy(rows):
    """Three of eight clusters of five; one row reads them alone, seven the whole table."""
    rng = np.random.default_rng(0)
    features, scores, table = rng.normal(size=(1, rows, 6)), rng.normal(size=(1, rows, 8)), rng.normal(size=(40, 6))
    found = head_lib.cluster_logits(*(jnp.asarray(x, jnp.float32) for x in (features, scores, table)), 3)
    for row in range(rows):
        entries = np.concatenate([np.arange(5 * c, 5 * c + 5) for c in np.argsort(-scores[0, row])[:3]])
        expected = np.full(40, (table @ features[0, row])[entries].min() - 1)
        expected[entries] = (table @ features[0, row])[entries]
        np.testing.assert_allclose(found[0, row], expected, rtol=1e-5, atol=1e-5)


def test_shapes_of_the_published_sizes():
    """E2B's head, 256 wide with 2048 clusters, and 31B's, 1024 wide, under their stored names; and donors that own their K/V."""
    small, large = presets.gemma4_e2b(), presets.gemma4_31b()
    e2b = config_lib.assistant_head_config_for(small, output="centroids", num_centroids=2048, top_centroids=32)
    b31 = config_lib.assistant_head_config_for(large, width=1024, num_heads=32)
    assert e2b.donors == (13, 13, 13, 14) and b31.donors == (58, 58, 58, 59) and (e2b.num_heads, e2b.mlp_width) == (4, 2048)
    stored = {name: entry.shape for name, entry in assistant._table(e2b, small, np.arange(262_144)).entries.items()}
    assert stored["model.embed_tokens.weight"] == (262_144, 256) and stored["masked_embedding.centroids.weight"] == (2048, 256)
    assert stored["pre_projection.weight"] == (256, 2 * 1536) and stored["post_projection.weight"] == (1536, 256)
    assert stored["model.layers.0.self_attn.q_proj.weight"] == (4 * 256, 256) and stored["model.layers.3.self_attn.q_proj.weight"] == (4 * 512, 256)
    assert stored["model.layers.3.layer_scalar"] == (1,) and stored["model.layers.3.self_attn.q_norm.weight"] == (512,)
    stored = {name: entry.shape for name, entry in assistant._table(b31, large, np.arange(262_144)).entries.items()}
    assert stored["model.embed_tokens.weight"] == (262_144, 1024) and stored["pre_projection.weight"] == (1024, 2 * 5376)
    assert stored["model.layers.3.self_attn.o_proj.weight"] == (1024, 32 * 512) and len(stored) == 4 + 11 * 4


def test_a_backbone_with_one_type_of_layers():
    config = config_lib.assistant_head_config_for(dataclasses.replace(fakes.BACKBONE, layer_types=(), num_kv_heads=4), width=16)
    assert config.donors == (3, 3, 3, 3) and config.num_heads == 4


def test_files_of_light_heads_stay_as_they_were():
    """The shipped head's config is written as it stands; switches of the other form are written where they are on."""
    record = json.loads((heads.SHIPPED / "smollm2-135m-instruct-mtp" / heads.RECORD).read_text())["config"]
    config = config_lib.from_dict(config_lib.HeadConfig, record, where="here")
    assert json.loads(json.dumps(config_lib.to_dict(config))) == record
    assert (config.norms, config.layer_scalars, config.output) == ("pre", False, "backbone")
    for config in HEADS.values():
        assert config_lib.from_dict(config_lib.HeadConfig, json.loads(json.dumps(config_lib.to_dict(config))), where="here") == config


def test_impossible_forms_are_refused_by_field():
    for change, named in [
        (dict(norms="post"), "norms='post': must be 'pre' or 'sandwich'"),
        (dict(output="clusters"), "output='clusters'"),
        (dict(pointer=True), "pointer=True: must be off with output='own'"),
        (dict(num_centroids=4), "num_centroids=4: must be 0 with output='own'"),
        (dict(output="centroids"), "num_centroids=0: must be an integer of at least 1"),
        (dict(output="centroids", num_centroids=5, top_centroids=2), "num_centroids=5: must divide draft_vocab_size=64"),
        (dict(output="centroids", num_centroids=8, top_centroids=9), "top_centroids=9: must not exceed num_centroids=8"),
    ]:
        with pytest.raises(ConfigError, match=named):
            dataclasses.replace(OWN, **change)
