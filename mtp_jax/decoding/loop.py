"""The decode loop: one jitted `lax.while_loop`, for vanilla decoding and every drafter, with its cache updated in place.

One step of a row, whose slots 0..p are valid and whose token x_{p+1} is pending:

    propose  M tokens that may follow the pending one (none when vanilla)
    verify   backbone on [x_{p+1}, d_1..d_M]: writes slots p+1..p+1+M, gives M+1 choices of its own
    commit   n accepted drafts and one token more, cut at a stop token and at the row's budget:
             lengths grow by the number committed; slots of rejected drafts stay behind the length, masked, overwritten later

Worked row, M = 3: tokens x_0..x_5, lengths 5, drafts [a b c], backbone's choices [a z ..] -> n = 1, commit a z,
lengths 7, pending z, next hidden is row 1 of the verify pass; slot 7 (b) and 8 (c) hold leftovers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.decoding import sampling, verify
from mtp_jax.decoding import stops as stops_lib
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache as cache_lib

Tree = TypeVar("Tree")

Rules = config_lib.DecodeConfig  # static: see `rules_of`
CHUNK = 512  # tokens of a prompt that go through the backbone at a time
WITHOUT_END = np.int32(2**31 - 1)


def rules_of(config: config_lib.DecodeConfig, num_draft: int) -> Rules:
    """The part of a config that programs are compiled for. What differs from call to call (budget, seed, stop strings) is data, in `Request`, or shape."""
    shorter = tuple(drafts for drafts in config.short_drafts if drafts < num_draft)
    return dataclasses.replace(config, num_draft=num_draft, short_drafts=shorter, max_new_tokens=1, seed=0, stop_strings=(), window_cache="full")


class Request(struct.PyTreeNode):
    """What a call asks of each row."""

    limits: Int[Array, " B"]  # tokens the row may hold in all, prompt included
    keys: Array  # one random key a row [B], for sampling
    stops: stops_lib.StopTable | None = None  # stop strings


class DecodeState(struct.PyTreeNode):
    """Everything that changes while decoding. Allocated whole before the loop."""

    # evolving
    cache: cache_lib.Cache  # lengths == number of tokens - 1, always: the pending token is not in it
    hidden: Float[Array, "B E"]  # backbone's state at slot lengths - 1, and its taps
    done: Bool[Array, " B"]
    drafter_state: Any
    # output
    tokens: Int[Array, "B S+1"]  # prompt, then what was generated
    stopped: Bool[Array, " B"]  # ended by a stop token or string (otherwise by the budget)
    matched: Int[Array, "B N"]  # how far each of N stop strings has been matched (see stops.py)
    logits: Float[Array, "B S+1 V"] | None  # that each generated token was chosen from; only on demand
    # statistics
    steps: Int[Array, " B"]  # verify passes of a row, until it was done
    drafted: Int[Array, " B"]  # tokens proposed
    accepted: Int[Array, "B M"]  # steps in which draft k was kept and emitted

    @property
    def pending(self) -> Int[Array, " B"]:
        return jnp.take_along_axis(self.tokens, self.cache.lengths[:, None], axis=1)[:, 0]


def context_of(state: DecodeState, backbone_params: Any, request: Request) -> drafters.Context:
    """What a drafter may read of the state."""
    return drafters.Context(
        tokens=state.tokens, pending=state.pending, hidden=state.hidden, cache=state.cache, backbone_params=backbone_params, keys=request.keys
    )


def prefill(
    backbone: backbone_lib.Backbone,
    backbone_params: Any,
    prompts: Int[Array, "B T"],
    prompt_lengths: Int[Array, " B"],
    request: Request,
    *,
    num_slots: int,
    drafter: drafters.Drafter | None,
    drafter_params: Any = None,
    config: Rules,
    before: DecodeState | None = None,
    window_slots: int | None = None,
) -> DecodeState:
    """Run the prompts through the backbone, in chunks, and choose each row's first token.

    The expensive program (`read`) does not depend on the drafter or the rules, so all share it but one that taps the backbone. A drafter that keeps a state is
    told of every chunk.

    Args:
      backbone: module (static); its layout is that of `backbone_params`.
      prompts: token ids, each row padded on the right with any token.
      prompt_lengths: 1..T.
      request: its limits are more than the tokens each row has before generation.
      num_slots: S; at least every limit + num_draft, and the longest row before this call + T, which the caller has checked.
      before: state to go on from, which is donated: its text, pending token included, comes before the prompts.
      window_slots: R of the layers with a window (see models/cache.py); None gives them S as well.

    Raises:
      ConfigError: window_slots are too few for the window and config.num_draft, or the drafter's state, or taps, are not in `before`.
    """
    batch, window = len(prompts), backbone.config.sliding_window
    if window is not None and window_slots is not None:
        cache_lib.check_window_slots(window, config.num_draft, window_slots)
    if before is None:
        cache = cache_lib.empty(backbone.config, batch, num_slots, window_slots)
        text = jnp.zeros((batch, num_slots + 1), jnp.int32)
        hidden = jnp.zeros((batch, backbone.hidden_width), backbone.config.dtype)
    else:
        cache, text, hidden = before.cache, before.tokens, _hidden_of(before, backbone)
        prompts, prompt_lengths = jnp.concatenate([before.pending[:, None], prompts], axis=1), prompt_lengths + 1
        if not cache_lib.has_shape(cache, backbone.config, num_slots, window_slots):
            cache, text = cache_lib.grow(cache, backbone.config, num_slots, window_slots), jnp.pad(text, ((0, 0), (0, num_slots - cache.num_slots)))
            for leaf in jax.tree.leaves(before.cache):
                leaf.delete()  # as donation does; a copy, or the memory, is nobody's to keep
    drafter_state = () if drafter is None else _drafter_state(drafter, batch, num_slots, before)
    text = _write_tokens(text, prompts, cache.lengths)
    for begin_at in range(0, prompts.shape[1], CHUNK):
        chunk = prompts[:, begin_at : begin_at + CHUNK]
        counts = jnp.clip(prompt_lengths - begin_at, 0, chunk.shape[1])
        start = jnp.copy(cache.lengths) if jax.tree.leaves(drafter_state) else None  # the cache is donated
        previous = hidden
        cache, hidden, states = read(backbone, backbone_params, cache, hidden, chunk, counts)
        if start is not None:
            seen = drafters.Seen(start=start, counts=counts, previous=previous, hidden=states)
            drafter_state = _tell(drafter, drafter_params, drafter_state, seen, backbone_params, cache, hidden, text, request)
    return begin(backbone, backbone_params, cache, hidden, text, request, drafter_state, config=config)


def _hidden_of(before: DecodeState, backbone: backbone_lib.Backbone) -> Float[Array, "B E"]:
    """The state of `before` for this backbone, without taps that it has not."""
    if before.hidden.shape[1] < backbone.hidden_width:
        rule = "are not kept of a text decoded without them; begin again with the whole text as prompt"
        raise config_lib.ConfigError(f"taps={backbone.taps}: {rule}")
    return before.hidden if before.hidden.shape[1] == backbone.hidden_width else before.hidden[:, : backbone.hidden_width]


def _drafter_state(drafter: drafters.Drafter, batch: int, num_slots: int, before: DecodeState | None) -> Any:
    """The drafter's state to begin with: a fresh one, or that of `before` with room for so many slots."""
    fresh = drafter.init(batch, num_slots)
    if before is None or not jax.tree.leaves(fresh):
        return fresh
    old = before.drafter_state
    if jax.tree.structure(old) != jax.tree.structure(fresh):
        rule = "keeps a state of its own, which a text decoded with another drafter lacks; begin again with the whole text as prompt"
        raise config_lib.ConfigError(f"drafter={type(drafter).__name__}: {rule}")
    return jax.tree.map(lambda leaf, like: jnp.pad(leaf, [(0, new - now) for now, new in zip(leaf.shape, like.shape, strict=True)]), old, fresh)


@partial(jax.jit, static_argnames=("drafter",), donate_argnames=("drafter_state",))
def _tell(
    drafter: drafters.Drafter,
    drafter_params: Any,
    drafter_state: Any,
    seen: drafters.Seen,
    backbone_params: Any,
    cache: cache_lib.Cache,
    hidden: Float[Array, "B E"],
    tokens: Int[Array, "B S+1"],
    request: Request,
) -> Any:
    """`drafter.commit` of a piece of the prompts as a program of its own."""
    pending = jnp.take_along_axis(tokens, cache.lengths[:, None], axis=1)[:, 0]
    context = drafters.Context(tokens=tokens, pending=pending, hidden=hidden, cache=cache, backbone_params=backbone_params, keys=request.keys)
    return drafter.commit(drafter_params, drafter_state, seen, context)


@partial(jax.jit, static_argnames=("backbone",), donate_argnames=("cache",))
def read(
    backbone: backbone_lib.Backbone,
    backbone_params: Any,
    cache: cache_lib.Cache,
    hidden: Float[Array, "B E"],
    tokens: Int[Array, "B T"],
    counts: Int[Array, " B"],
) -> tuple[cache_lib.Cache, Float[Array, "B E"], Float[Array, "B T E"]]:
    """Append the first `counts` (0..T) tokens of each row to the cache; hidden state of each row's last token, the one given where there
    is none, and of all of them."""
    output = backbone.apply({"params": backbone_params}, tokens, cache, counts=counts, with_logits=False)
    assert isinstance(output, backbone_lib.BackboneOutput)
    last = jnp.take_along_axis(output.hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return output.cache.replace(lengths=cache.lengths + counts), jnp.where((counts > 0)[:, None], last, hidden), output.hidden


@partial(jax.jit, static_argnames=("backbone", "config"), donate_argnames=("cache", "tokens", "drafter_state"))
def begin(
    backbone: backbone_lib.Backbone,
    backbone_params: Any,
    cache: cache_lib.Cache,
    hidden: Float[Array, "B E"],
    tokens: Int[Array, "B S+1"],
    request: Request,
    drafter_state: Any = (),
    *,
    config: Rules,
) -> DecodeState:
    """Choose each row's first token and allocate the state. Cache, text and the drafter's state are donated."""
    batch, lengths = len(tokens), cache.lengths
    logits = backbone.apply({"params": backbone_params}, hidden[:, None], method="logits")
    assert isinstance(logits, jax.Array)
    first = sampling.choose(logits, lengths[:, None], request.keys, config)
    tokens = _write_tokens(tokens, first, lengths)
    start = jnp.zeros((batch, 0), jnp.int32) if request.stops is None else jnp.broadcast_to(request.stops.start, (batch, request.stops.num_strings))
    matched, ends = _ends(first, start, request, config)
    kept = None
    if config.keep_logits:
        kept = jnp.zeros((*tokens.shape, logits.shape[-1])).at[jnp.arange(batch), lengths].set(logits[:, 0])
    return DecodeState(
        cache=cache,
        hidden=hidden,
        done=ends[:, 0] | (lengths + 1 >= request.limits),
        drafter_state=drafter_state,
        tokens=tokens,
        stopped=ends[:, 0],
        matched=matched[:, 0],
        logits=kept,
        steps=jnp.zeros((batch,), jnp.int32),
        drafted=jnp.zeros((batch,), jnp.int32),
        accepted=jnp.zeros((batch, config.num_draft), jnp.int32),
    )


@partial(jax.jit, static_argnames=("backbone", "drafter", "config"), donate_argnames=("state",))
def decode(
    backbone: backbone_lib.Backbone,
    drafter: drafters.Drafter | None,
    backbone_params: Any,
    drafter_params: Any,
    state: DecodeState,
    request: Request,
    at_most: Int[Array, ""] | np.int32 = WITHOUT_END,
    *,
    config: Rules,
) -> DecodeState:
    """Step until every row is done, or `at_most` times. The state's buffers are donated and updated in place."""

    def unfinished(carry: tuple[DecodeState, Array]) -> Bool[Array, ""]:
        state, left = carry
        return ~state.done.all() & (left > 0)

    def one_step(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, left = carry
        return step(backbone, drafter, backbone_params, drafter_params, state, request, config=config), left - 1

    return lax.while_loop(unfinished, one_step, (state, jnp.asarray(at_most)))[0]


def step(
    backbone: backbone_lib.Backbone,
    drafter: drafters.Drafter | None,
    backbone_params: Any,
    drafter_params: Any,
    state: DecodeState,
    request: Request,
    *,
    config: Rules,
) -> DecodeState:
    """One propose, verify, commit round. Rows that are done keep all of their state.

    With `config.short_drafts`, the verify pass is no wider than the longest proposal needs.
    """
    proposal, state = after_draft(state, *propose(drafter, backbone_params, drafter_params, state, request, config=config))
    longest = jnp.where(state.done, 0, (proposal.tokens >= 0).sum(axis=1)).max()
    previous = -1
    for width in (*config.short_drafts, config.num_draft):
        short = jax.tree.map(lambda leaf, width=width: leaf[:, :width], proposal)
        finish = partial(finish_step, backbone, drafter, backbone_params, drafter_params, proposal=short, request=request, config=config)
        state = once_if((longest > previous) & (longest <= width), finish, state) if config.short_drafts else finish(state)
        previous = width
    return state


def once_if(condition: Bool[Array, ""], update: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """update(tree), or tree. A loop that runs once or not at all updates caches in place; XLA's CPU backend copies them all for lax.cond."""

    def run(carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.zeros((), bool), update(carry[1])

    return lax.while_loop(lambda carry: carry[0], run, (condition, tree))[1]


@partial(jax.jit, static_argnames=("drafter", "config"))
def propose_alone(
    drafter: drafters.Drafter | None, backbone_params: Any, drafter_params: Any, state: DecodeState, request: Request, *, config: Rules
) -> tuple[drafters.Proposal, Any]:
    """The first half of `step` as a program of its own."""
    return propose(drafter, backbone_params, drafter_params, state, request, config=config)


@partial(jax.jit, static_argnames=("backbone", "drafter", "config"), donate_argnames=("state",))
def finish_step(
    backbone: backbone_lib.Backbone,
    drafter: drafters.Drafter | None,
    backbone_params: Any,
    drafter_params: Any,
    state: DecodeState,
    proposal: drafters.Proposal,
    request: Request,
    *,
    config: Rules,
) -> DecodeState:
    """The second half of `step`: verify and commit. The state is donated."""
    new, seen = verify_and_commit(backbone, backbone_params, state, proposal, request, config=config)
    if drafter is not None:
        new = new.replace(drafter_state=drafter.commit(drafter_params, new.drafter_state, seen, context_of(new, backbone_params, request)))
    return new


def after_draft(state: DecodeState, proposal: drafters.Proposal, drafter_state: Any) -> tuple[drafters.Proposal, DecodeState]:
    """What `propose` gave, taken into the state: the proposal without a cache, and the state with the drafter's state and what it wrote into the cache."""
    cache = state.cache if proposal.cache is None else proposal.cache
    return proposal.replace(cache=None), state.replace(cache=cache, drafter_state=drafter_state)


def propose(
    drafter: drafters.Drafter | None, backbone_params: Any, drafter_params: Any, state: DecodeState, request: Request, *, config: Rules
) -> tuple[drafters.Proposal, Any]:
    """The drafter's proposal (none without a drafter) and its new state."""
    if drafter is None:
        return drafters.Proposal(tokens=jnp.zeros((len(state.tokens), 0), jnp.int32)), state.drafter_state
    return drafter.draft(drafter_params, state.drafter_state, context_of(state, backbone_params, request), config)


def verify_and_commit(
    backbone: backbone_lib.Backbone, backbone_params: Any, state: DecodeState, proposal: drafters.Proposal, request: Request, *, config: Rules
) -> tuple[DecodeState, drafters.Seen]:
    """One backbone pass over pending token and drafts: the new state, and what a drafter is told of the pass."""
    drafts, num_draft = proposal.tokens, proposal.tokens.shape[1]
    block = jnp.concatenate([state.pending[:, None], jnp.maximum(drafts, 0)], axis=1)  # [B, M+1]
    output = backbone.apply({"params": backbone_params}, block, state.cache)
    assert isinstance(output, backbone_lib.BackboneOutput) and output.logits is not None
    lengths = state.cache.lengths
    places = lengths[:, None] + 1 + jnp.arange(num_draft + 1)  # of the tokens chosen here
    accepted, targets = verify.judge(drafts, proposal.probs, output.logits, places, request.keys, config)

    matched, ends = _ends(targets, state.matched, request, config)
    committed, stopped = verify.cut(ends, accepted, request.limits - (lengths + 1))
    committed = jnp.where(state.done, 0, committed)
    kept = jnp.minimum(accepted, committed)  # drafts kept and emitted
    last = jnp.maximum(committed - 1, 0)

    def of_last(values: Array) -> Array:
        return jnp.take_along_axis(values, last[:, None, None], axis=1)[:, 0]

    new = state.replace(
        cache=output.cache.replace(lengths=lengths + committed),
        hidden=jnp.where(state.done[:, None], state.hidden, of_last(output.hidden)),
        done=state.done | stopped | (lengths + 1 + committed >= request.limits),
        tokens=_write_tokens(state.tokens, targets, lengths + 1),
        stopped=state.stopped | (stopped & ~state.done),
        matched=jnp.where(state.done[:, None], state.matched, of_last(matched)),
        steps=state.steps + jnp.where(state.done, 0, 1),
        drafted=state.drafted + jnp.where(state.done, 0, (drafts >= 0).sum(axis=1)),
        accepted=state.accepted + (jnp.arange(config.num_draft) < kept[:, None]),
    )
    if state.logits is not None:
        new = new.replace(logits=jax.vmap(lambda row, update, at: lax.dynamic_update_slice(row, update, (at, 0)))(state.logits, output.logits, lengths + 1))
    return new, drafters.Seen(start=lengths, counts=committed, previous=state.hidden, hidden=output.hidden, targets=targets)


def _ends(chosen: Int[Array, "B T"], matched: Int[Array, "B N"], request: Request, config: Rules) -> tuple[Int[Array, "B T N"], Bool[Array, "B T"]]:
    """State of the stop strings after each of the chosen tokens, and whether a row that commits it ends there."""
    ends = jnp.isin(chosen, jnp.asarray(config.stop_tokens, jnp.int32)) if config.stop_tokens else jnp.zeros_like(chosen, bool)
    if request.stops is None:
        return jnp.zeros((*chosen.shape, 0), jnp.int32), ends
    after, found = stops_lib.advance(request.stops, matched, chosen)
    return after, ends | found


def _write_tokens(tokens: Int[Array, "B S+1"], new: Int[Array, "B T"], start: Int[Array, " B"]) -> Int[Array, "B S+1"]:
    """All T tokens go in, from `start` on; those beyond what was committed are overwritten before they count."""
    return jax.vmap(lambda row, update, begin: lax.dynamic_update_slice(row, update, (begin,)))(tokens, new, start)
