"""LOSSY early exit: against vanilla where it never leaves, and elsewhere against a reference in numpy that carries states layer by layer."""

import dataclasses
import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, lossy_exit
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache as cache_lib

PROMPTS = fakes.prompts(1, 3, 40, 17)
# Layers 4 and 5 read the K/V of layers 3 and 2.
SHARING = dataclasses.replace(
    fakes.TIED, num_layers=6, layer_types=("full", "sliding", "full", "sliding", "sliding", "full"), full_head_dim=8, full_kv_heads=1, shared_kv_layers=2
)
# Switches of Gemma 4: inputs of each layer, norms after, keys as values.
SWITCHES = dataclasses.replace(
    SHARING,
    per_layer_input_width=4,
    layer_scalars=True,
    sandwich_norms=True,
    qk_norm=True,
    v_norm=True,
    keys_are_values=True,
    embedding_scale=1.5,
    final_softcap=9.0,
    activation="gelu_tanh",
)
BACKBONES = {"tied": fakes.TIED, "untied": fakes.BACKBONE, "sharing": SHARING, "switches": SWITCHES}
PLAIN = ("tied", "untied", "sharing")  # that the reference knows
EXITS = (1, 3)
NEVER = 1.001
CONFIG = config_lib.DecodeConfig(max_new_tokens=24, stop_tokens=(16,))


@functools.cache
def loaded(name):
    return fakes.backbone(BACKBONES[name])


@functools.cache
def runtime_of(name, blocks=True):
    return generate.make_runtime(loaded(name), column_blocks=blocks)


def slow(backbone, prompt, count, exits, threshold, text=None, stop_tokens=CONFIG.stop_tokens):
    """Tokens and exit layers, one position and one layer at a time: K/V lists grow, and a state that has left is carried through the layers above."""
    params, config = backbone.params, backbone.config
    table = np.asarray(params["embed"]["embedding"], np.float64)
    unembedding = table.T if config.tied_embeddings else np.asarray(params["unembed"]["kernel"], np.float64)
    keys, values = [[] for _ in range(config.num_layers)], [[] for _ in range(config.num_layers)]
    read, tokens, depths = list(prompt), [], []
    for position in range(len(prompt) + count - 1):
        x, depth, decides = table[read[position]], None, position >= len(prompt) - 1
        for index in range(config.num_layers):
            layer, owner, head_dim = params[f"layers_{index}"], config.kv_owner(index), config.head_dim_of(index)
            normed = reference.rms_norm(x, layer["attn_norm"]["scale"], config.norm_eps)
            product = {name: (normed @ np.asarray(part["kernel"], np.float64)).reshape(-1, head_dim) for name, part in layer["attn"].items() if name in "qkv"}
            if owner == index:
                keys[index].append(reference.rope(product["k"], position, config.rope_theta))
                values[index].append(product["v"])
            if depth is not None:
                continue
            q = reference.rope(product["q"], position, config.rope_theta)
            window = config.window(index) or position + 1
            k, v = (np.stack(rows[owner]).swapaxes(0, 1) for rows in (keys, values))
            mixed = reference.attend(q, k, v, range(max(0, position - window + 1), position + 1))
            x = x + mixed @ np.asarray(layer["attn"]["o"]["kernel"], np.float64)
            x = x + reference.gated_mlp(reference.rms_norm(x, layer["mlp_norm"]["scale"], config.norm_eps), layer["mlp"])
            if decides and index + 1 in (*exits, config.num_layers):
                probs = reference.softmax(reference.rms_norm(x, params["final_norm"]["scale"], config.norm_eps) @ unembedding)
                second, first = np.sort(probs)[-2:]
                if first - second >= threshold or index + 1 == config.num_layers:
                    depth = index + 1
                    tokens.append(int(probs.argmax()))
                    depths.append(depth)
        if decides:
            read.append(tokens[-1] if text is None else text[len(tokens) - 1])
            if text is None and tokens[-1] in stop_tokens:
                break
    return tokens, depths


@pytest.mark.parametrize("blocks", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BACKBONES)
def test_a_threshold_above_one_gives_vanillas_tokens(name, blocks):
    runtime, reasons = runtime_of(name, blocks), set()
    for prompt in PROMPTS:
        (vanilla,) = generate.run(runtime, [prompt], CONFIG).outputs
        found = lossy_exit.run(runtime, [prompt], CONFIG, exits=EXITS, threshold=NEVER)
        assert (found.tokens, found.finish_reason) == (vanilla.tokens, vanilla.finish_reason)
        assert found.exit_layers == [runtime.step_module.config.num_layers] * len(vanilla.tokens)
        reasons.add(found.finish_reason)
    assert name == "switches" or "length" in reasons


@pytest.mark.parametrize("threshold", [0.0, -1.0])
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("name", PLAIN)
def test_a_threshold_of_zero_leaves_at_the_first_exit(name, blocks, threshold):
    for prompt in PROMPTS:
        found = lossy_exit.run(runtime_of(name, blocks), [prompt], CONFIG, exits=EXITS, threshold=threshold)
        assert (found.tokens, found.exit_layers) == slow(loaded(name), prompt, 24, EXITS, threshold)
        assert set(found.exit_layers) == {EXITS[0]}


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("name", PLAIN)
def test_a_threshold_between_leaves_where_the_reference_does(name, blocks):
    seen = set()
    for prompt in PROMPTS:
        for threshold in (0.1, 0.4):
            found = lossy_exit.run(runtime_of(name, blocks), [prompt], CONFIG, exits=EXITS, threshold=threshold)
            assert (found.tokens, found.exit_layers) == slow(loaded(name), prompt, 24, EXITS, threshold)
            seen.update(found.exit_layers)
    assert seen == {*EXITS, loaded(name).config.num_layers}  # all of them were used


def test_a_stop_token_ends_the_text():
    runtime, prompt = runtime_of("tied"), PROMPTS[2]
    free = lossy_exit.run(runtime, [prompt], config_lib.DecodeConfig(max_new_tokens=24), exits=EXITS, threshold=0.1)
    assert (len(free.tokens), free.finish_reason) == (24, "length")
    stop = free.tokens[7]
    end = free.tokens.index(stop) + 1
    found = lossy_exit.run(runtime, [prompt], config_lib.DecodeConfig(max_new_tokens=24, stop_tokens=(stop,)), exits=EXITS, threshold=0.1)
    assert found == lossy_exit.LossyOutput(free.tokens[:end], free.exit_layers[:end], "stop")


def test_on_a_given_text_it_chooses_place_by_place():
    runtime, prompt, config = runtime_of("untied"), PROMPTS[2], config_lib.DecodeConfig(max_new_tokens=24, stop_tokens=(16, 3))
    text = generate.run(runtime, [prompt], config_lib.DecodeConfig(max_new_tokens=20)).outputs[0].tokens
    kept = lossy_exit.run(runtime, [prompt], config, exits=EXITS, threshold=NEVER, text=text)
    assert kept.tokens == text
    for threshold in (0.0, 0.1):
        found = lossy_exit.run(runtime, [prompt], config, exits=EXITS, threshold=threshold, text=text)
        assert (found.tokens, found.exit_layers) == slow(loaded("untied"), prompt, 20, EXITS, threshold, text)
        assert found.tokens != text


@pytest.mark.parametrize("name", ["untied", "switches"])
def test_filling_writes_the_keys_and_values_that_the_layer_itself_would(name):
    backbone, rng = loaded(name), np.random.default_rng(3)
    cfg, module, variables = backbone.config, backbone_lib.Backbone(backbone.config), {"params": backbone.params}
    cache = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), cache_lib.empty(cfg, 1, 12)).replace(lengths=jnp.array([7]))
    x, own = module.apply(variables, jnp.array([[5]]), method=lossy_exit._embed)
    for index in range(cfg.num_layers):
        filled = module.apply(variables, x, cache, index, index + 1, method=lossy_exit._fill)
        _, computed, _ = module.apply(variables, x, own, cache, index, index + 1, method=lossy_exit._layers)
        for one, other in zip(jax.tree.leaves(filled), jax.tree.leaves(computed), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        changed = [layer for layer in range(cfg.num_kv_layers) if (filled.keys[layer] != cache.keys[layer]).any()]
        assert changed == ([index] if index < cfg.num_kv_layers else [])


def test_confidence_is_the_first_probability_less_the_second():
    logits = np.random.default_rng(0).normal(size=(5, 9)).astype(np.float32) * 3
    logits[4, [2, 6]] = 20.0  # a tie
    probs = np.sort([reference.softmax(row) for row in logits.astype(np.float64)])
    np.testing.assert_allclose(lossy_exit.confidence(jnp.asarray(logits)), probs[:, -1] - probs[:, -2], atol=1e-6)
    assert lossy_exit.confidence(jnp.asarray(logits, jnp.bfloat16)).dtype == jnp.float32


@pytest.fixture
def optimised():
    """Programs as they are when the compiler takes its time (see conftest.py)."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_no_step_copies_a_layers_cache(optimised):
    from test_no_copy import S, full_size_writes

    runtime, slots = runtime_of("untied"), S
    cfg = fakes.BACKBONE
    tokens = jnp.zeros((1, slots + 1), jnp.int32)
    state = lossy_exit.State(cache_lib.empty(cfg, 1, slots), tokens, tokens, tokens, jnp.zeros((), bool), jnp.zeros((), bool))
    arguments = (runtime.step_module, runtime.prefill_module, runtime.step_params, runtime.prefill_params)
    data = (jnp.int32(5), jnp.int32(50), jnp.float32(0.5))
    program = lossy_exit.decode.lower(*arguments, jax.eval_shape(lambda: state), *data, exits=EXITS, stop_tokens=(16,)).compile().as_text()
    assert full_size_writes(program, cfg.num_kv_heads * slots * cfg.head_dim) == []
    assert program.count("may-alias") >= 2 * cfg.num_layers, "the caches that come in are not the ones that go out"


def test_a_skipped_layer_costs_its_keys_and_values_alone(optimised):
    backbone = loaded("untied")
    cfg, module = backbone.config, backbone_lib.Backbone(backbone.config)
    x, cache = jnp.zeros((1, 1, cfg.width)), cache_lib.empty(cfg, 1, 128)
    fill = jax.jit(lambda params, x, cache: module.apply({"params": params}, x, cache, 1, 3, method=lossy_exit._fill), donate_argnums=2)
    costs = fill.lower(backbone.params, x, cache).compile().cost_analysis()
    products = 2 * 2 * 2 * cfg.width * cfg.num_kv_heads * cfg.head_dim  # two layers, K and V, multiply and add
    queries = 2 * 2 * cfg.width * cfg.num_heads * cfg.head_dim
    assert products <= costs["flops"] < products + queries / 2  # norms and rotation are a little; a query product would be too much


@pytest.mark.parametrize("exits", [(), (0,), (4,), (1, 4), (2, 1), (2, 2), (1.0,), (True,), ("1",)])
def test_exits_are_ascending_layers_before_the_last(exits):
    with pytest.raises(config_lib.ConfigError, match=r"exits=.*must be ascending integers in 1\.\.3, at least one"):
        lossy_exit.run(runtime_of("untied"), PROMPTS[:1], CONFIG, exits=exits, threshold=0.5)


@pytest.mark.parametrize("threshold", [float("nan"), "0.5", None, True])
def test_a_threshold_is_a_number(threshold):
    with pytest.raises(config_lib.ConfigError, match="threshold=.*must be a number"):
        lossy_exit.run(runtime_of("untied"), PROMPTS[:1], CONFIG, exits=EXITS, threshold=threshold)


def test_one_prompt_greedy_and_plain():
    def run(prompts, config=CONFIG, **options):
        return lossy_exit.run(runtime_of("untied"), prompts, config, exits=EXITS, threshold=0.5, **options)

    for prompts in ([], PROMPTS[:2]):
        with pytest.raises(generate.PromptError, match=f"{len(prompts)} prompts: lossy exit takes exactly one"):
            run(prompts)
    with pytest.raises(generate.PromptError, match="prompt 0 is empty"):
        run([[]])
    for name, value in (("temperature", 0.7), ("stop_strings", ("x",)), ("window_cache", "ring")):
        with pytest.raises(config_lib.ConfigError, match=f"{name}=.*lossy exit knows only"):
            run(PROMPTS[:1], dataclasses.replace(CONFIG, **{name: value}))
    for text in ([], [1] * 25, [64], [-1]):
        with pytest.raises(config_lib.ConfigError, match=f"text of {len(text)} tokens: must be 1..24"):
            run(PROMPTS[:1], text=text)
