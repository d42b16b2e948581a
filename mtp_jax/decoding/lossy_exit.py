"""LOSSY: CALM's early exit by confidence. It changes the text, and is here only to compare with; nothing that decodes for users calls it.

Each token leaves the backbone at the first of the exit layers whose confidence reaches a threshold. Nothing verifies the choice.

    x = embed(pending)
    for each group of layers between exits e_1 < .. < e_n and the last layer:
        not out yet    x = layers(x);  p = softmax(unembed(final_norm(x)));  out when p_1st - p_2nd >= threshold
        out already    K/V of these layers from the x that the token left with: no attention, no MLP
    next token = argmax of the p it left with

Worked row, 6 layers, exits 2 and 4: a token whose confidence reaches the threshold after layers 0 and 1 has exit layer 2; layers 2..5
project keys and values from the state that layer 1 gave, each by its own norm and kernels, and later tokens attend to those.

The prompt is read by the whole backbone, except for its last token, which is the first to be decoded: so every new token, the first one
included, is chosen by the same rule. A check costs a product with the unembedding, which the last layer alone needs in exact decoding.
One row at a time: rows that left at different layers would have to wait for the deepest.

Source: Schuster et al. 2022 (CALM, arXiv 2207.07061): softmax response as confidence, state propagation for the layers skipped. CALM fits its
threshold to a promised quality and its models are trained for exits; here the backbone is frozen and thresholds are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, loop
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache as cache_lib


@dataclass(frozen=True)
class LossyOutput:
    """What the LOSSY mode chose for one prompt."""

    tokens: list[int]  # chosen ids; a stop token that ended the text is the last
    exit_layers: list[int]  # layers computed for each of them, num_layers where it left at no exit
    finish_reason: str  # "stop" or "length"


class State(struct.PyTreeNode):
    """Everything that changes while decoding one row (B = 1). Allocated whole before the loop."""

    cache: cache_lib.Cache  # without the pending token
    tokens: Int[Array, "B S+1"]  # prompt, then the text that is read on
    choices: Int[Array, "B S+1"]  # what the mode chose at each place; differs from `tokens` only where the text was given
    exit_layers: Int[Array, "B S+1"]  # layers computed for each choice
    done: Bool[Array, ""]
    stopped: Bool[Array, ""]  # ended by a stop token


class Pass(struct.PyTreeNode):
    """One token on its way through the backbone."""

    cache: cache_lib.Cache
    x: Float[Array, "B 1 D"]  # after the last layer computed, before the final norm
    choice: Int[Array, " B"]  # the most probable token by x
    depth: Int[Array, ""]  # layers computed
    out: Bool[Array, ""]  # confident enough: no more layers


def run(
    runtime: generate.Runtime,
    prompts: Sequence[Sequence[int]],
    config: config_lib.DecodeConfig,
    *,
    exits: Sequence[int],
    threshold: float,
    text: Sequence[int] | None = None,
) -> LossyOutput:
    """Greedy LOSSY decoding of one prompt.

    Args:
      runtime: from generate.make_runtime; a drafter in it is ignored.
      prompts: token ids of one prompt.
      config: budget and stop tokens; what concerns drafts is ignored.
      exits: e_1 < .. < e_n in 1..num_layers-1: how many layers are computed before each exit.
      threshold: confidence, probability of the most probable token less the second's, at which a token leaves. Above 1 none leaves, at 0
        or below every one leaves at the first exit.
      text: instead of its own choices the mode reads these tokens after the prompt (teacher forcing), and the result is what it chose at
        each of their places, after K/V of its own making. It is read to its end, stop tokens or not.

    Raises:
      PromptError: not just one prompt, or one that `generate.run` would refuse.
      ConfigError: exits or threshold against their rules, a config that is not greedy or has stop strings or rings, or a text that is empty, outside the
        vocabulary, or longer than the budget.
    """
    backbone = runtime.step_module.config
    exits, threshold = check_exits(exits, backbone.num_layers), check_threshold(threshold)
    if len(prompts) != 1:
        raise generate.PromptError(f"{len(prompts)} prompts: lossy exit takes exactly one, since rows would leave at different layers")
    for name, plain in (("temperature", 0.0), ("stop_strings", ()), ("window_cache", "full")):
        if (value := getattr(config, name)) != plain:
            raise config_lib.ConfigError(f"{name}={value!r}: lossy exit knows only {plain!r}")
    job = generate.make_job(runtime.without_drafter(), prompts, config)
    begin = int(job.starts[0])
    tokens = jnp.zeros((1, job.num_slots + 1), jnp.int32).at[:, :begin].set(jnp.asarray(prompts, jnp.int32))
    given, limit = begin, int(job.request.limits[0])
    if text is not None:
        if not 0 < len(text) <= config.max_new_tokens or min(text) < 0 or max(text) >= backbone.vocab_size:
            raise config_lib.ConfigError(f"text of {len(text)} tokens: must be 1..{config.max_new_tokens} (max_new_tokens) ids in 0..{backbone.vocab_size - 1}")
        given = limit = begin + len(text)
        tokens = tokens.at[0, begin:given].set(jnp.asarray(text, jnp.int32))

    state = State(
        cache=_read_all_but_last(job),
        tokens=tokens,
        choices=jnp.zeros_like(tokens),
        exit_layers=jnp.zeros_like(tokens),
        done=jnp.zeros((), bool),
        stopped=jnp.zeros((), bool),
    )
    module, params = job.backbone
    data = (jnp.int32(given), jnp.int32(limit), jnp.float32(threshold))
    state = decode(module, runtime.prefill_module, params, runtime.prefill_params, state, *data, exits=exits, stop_tokens=config.stop_tokens)
    end = int(state.cache.lengths[0]) + 1
    return LossyOutput(
        tokens=state.choices[0, begin:end].tolist(),
        exit_layers=state.exit_layers[0, begin:end].tolist(),
        finish_reason="stop" if bool(state.stopped) else "length",
    )


def check_exits(exits: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The exits as a tuple. Raise ConfigError unless they are ascending integers in 1..num_layers-1, at least one."""
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in exits)
    bounds = (0, *exits, num_layers)
    if not exits or not whole or not all(one < other for one, other in pairwise(bounds)):
        raise config_lib.ConfigError(f"exits={tuple(exits)!r}: must be ascending integers in 1..{num_layers - 1}, at least one; after the last layer all leave")
    return tuple(exits)


def check_threshold(threshold: float) -> float:
    """The threshold. Raise ConfigError unless it is a number."""
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or math.isnan(threshold):
        raise config_lib.ConfigError(f"threshold={threshold!r}: must be a number")
    return float(threshold)


def _read_all_but_last(job: generate.Job) -> cache_lib.Cache:
    """A cache of the prompt without its last token, by the whole backbone, in the chunks and the program of every prefill."""
    module = job.runtime.prefill_module
    cache = cache_lib.empty(module.config, 1, job.num_slots)
    hidden = jnp.zeros((1, module.config.width), module.config.dtype)
    for begin in range(0, job.prompts.shape[1], loop.CHUNK):
        chunk = jnp.asarray(job.prompts[:, begin : begin + loop.CHUNK])
        counts = jnp.clip(jnp.asarray(job.prompt_lengths) - 1 - begin, 0, chunk.shape[1])
        cache, hidden, _ = loop.read(module, job.runtime.prefill_params, cache, hidden, chunk, counts)
    return cache


@partial(jax.jit, static_argnames=("module", "fill_module", "exits", "stop_tokens"), donate_argnames=("state",))
def decode(
    module: backbone_lib.Backbone,
    fill_module: backbone_lib.Backbone,
    params: Any,
    fill_params: Any,
    state: State,
    given: Int[Array, ""],
    limit: Int[Array, ""],
    threshold: Float[Array, ""],
    *,
    exits: tuple[int, ...],
    stop_tokens: tuple[int, ...],
) -> State:
    """LOSSY steps until the row is done. The state's buffers are donated and updated in place.

    Args:
      module: runs the layers, with `params`.
      fill_module: gives skipped layers their K/V, with `fill_params`: the same backbone in the plain layout, where k and v are products of their
        own; in column blocks they are joined with q, which is not needed.
      given: tokens of the text that are not the mode's to choose: the prompt, and what it is forced to read.
      limit: tokens the text may hold in all.
      threshold: see `run`.
    """

    def step(state: State) -> State:
        lengths = state.cache.lengths
        passed = token_pass(module, fill_module, params, fill_params, state.tokens[0, lengths], state.cache, threshold, exits=exits)
        place = lengths[0] + 1
        token = jnp.where(place < given, state.tokens[0, place], passed.choice[0])
        stopped = (place >= given) & jnp.isin(token, jnp.asarray(stop_tokens, jnp.int32))  # a given text is read to its end
        return State(
            cache=passed.cache.replace(lengths=lengths + 1),
            tokens=state.tokens.at[0, place].set(token),
            choices=state.choices.at[0, place].set(passed.choice[0]),
            exit_layers=state.exit_layers.at[0, place].set(passed.depth),
            done=stopped | (place + 1 >= limit),
            stopped=stopped,
        )

    return lax.while_loop(lambda state: ~state.done, step, state)


def token_pass(
    module: backbone_lib.Backbone,
    fill_module: backbone_lib.Backbone,
    params: Any,
    fill_params: Any,
    token: Int[Array, " B"],
    cache: cache_lib.Cache,
    threshold: Float[Array, ""],
    *,
    exits: tuple[int, ...],
) -> Pass:
    """One token through as many layers as it takes; its K/V are in all of them afterwards. `lengths` as it came in. Arguments as in `decode`."""
    x, own_inputs = _apply(module, params, _embed, token[:, None])

    def compute(first: int, last: int, at: Pass) -> Pass:
        x, cache, logits = _apply(module, params, _layers, at.x, own_inputs, at.cache, first, last)
        return Pass(cache=cache, x=x, choice=logits.argmax(axis=-1), depth=jnp.int32(last), out=(confidence(logits) >= threshold).all())

    def fill(first: int, last: int, at: Pass) -> Pass:
        return at.replace(cache=_apply(fill_module, fill_params, _fill, at.x, at.cache, first, last))

    at = Pass(cache=cache, x=x, choice=jnp.zeros_like(token), depth=jnp.int32(0), out=jnp.zeros((), bool))
    at = compute(0, exits[0], at)
    for first, last in pairwise((*exits, module.config.num_layers)):
        before = at.out  # not what `compute` is about to find
        at = loop.once_if(~before, partial(compute, first, last), at)
        at = loop.once_if(before, partial(fill, first, last), at)
    return at


def confidence(logits: Float[Array, "B V"]) -> Float[Array, " B"]:
    """Softmax response: probability of the most probable token less that of the second; float32, 0 at a tie."""
    logits = logits.astype(jnp.float32)
    best = logits.argmax(axis=-1, keepdims=True)
    top = jnp.take_along_axis(logits, best, axis=-1)
    second = jnp.where(jnp.arange(logits.shape[-1]) == best, -jnp.inf, logits).max(axis=-1, keepdims=True)
    return ((1 - jnp.exp(second - top)) / jnp.exp(logits - top).sum(axis=-1, keepdims=True))[:, 0]


def _apply(module: backbone_lib.Backbone, params: Any, method: Callable[..., Any], *args: Any) -> Any:
    """method(module with its parameters, *args)."""
    return module.apply({"params": params}, *args, method=method)


def _embed(module: backbone_lib.Backbone, tokens: Int[Array, "B 1"]) -> tuple[Float[Array, "B 1 D"], Array | None]:
    """State before the first layer, and every layer's own input where there is one."""
    x = backbone_lib.scale_embedding(module.embed(tokens), module.config.embedding_scale)
    return x, module.layer_inputs(tokens, x) if module.config.per_layer_input_width else None


def _layers(
    module: backbone_lib.Backbone, x: Float[Array, "B 1 D"], own_inputs: Array | None, cache: cache_lib.Cache, first: int, last: int
) -> tuple[Float[Array, "B 1 D"], cache_lib.Cache, Float[Array, "B V"]]:
    """Layers first..last-1 of one token: state, cache with its K/V added, logits."""
    cfg, keys, values = module.config, list(cache.keys), list(cache.values)
    span = cache_lib.Span(cache.lengths, None, cache.num_slots)
    for index in range(first, last):
        owner = cfg.kv_owner(index)
        slots = (keys[owner], values[owner]) if owner == index else cache_lib.View(keys[owner], values[owner], cache.num_slots)
        x, _, kv = module.layers[index](x, cache.lengths[:, None], slots, span, None if own_inputs is None else own_inputs[:, :, index])
        if owner == index:
            keys[index], values[index] = kv
    logits = module.logits(module.final_norm(x))[:, 0]
    return x, cache.replace(keys=tuple(keys), values=tuple(values)), logits


def _fill(module: backbone_lib.Backbone, x: Float[Array, "B 1 D"], cache: cache_lib.Cache, first: int, last: int) -> cache_lib.Cache:
    """K/V of x in those of layers first..last-1 that own theirs. Only K/V are taken from a layer without slots, so no more of it is compiled."""
    keys, values = list(cache.keys), list(cache.values)
    span = cache_lib.Span(cache.lengths, None, cache.num_slots)
    for index in range(first, min(last, module.config.num_kv_layers)):
        _, _, (key, value) = module.layers[index](x, cache.lengths[:, None], None, span, None)
        keys[index], values[index] = cache_lib.write(keys[index], key, cache.lengths), cache_lib.write(values[index], value, cache.lengths)
    return cache.replace(keys=tuple(keys), values=tuple(values))
