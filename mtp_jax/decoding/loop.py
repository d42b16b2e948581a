"""The decode loop: one jitted `lax.while_loop`, for vanilla decoding and every drafter, with its cache updated in place.

One step of a row, whose slots 0..p are valid and whose token x_{p+1} is pending:

    draft    M tokens that may follow the pending one (none when vanilla)
    verify   backbone on [x_{p+1}, d_1..d_M]: writes slots p+1..p+1+M, gives M+1 choices of its own
    commit   n accepted drafts and one token more, cut at a stop token and at the row's budget:
             lengths grow by the number committed; slots of rejected drafts stay behind the length, masked, overwritten later

Worked row, M = 3: tokens x_0..x_5, lengths 5, drafts [a b c], backbone's choices [a z ..] -> n = 1, commit a z,
lengths 7, pending z, next hidden is row 1 of the verify pass; slot 7 (b) and 8 (c) hold leftovers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.decoding import sampling, verify
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache as cache_lib

Rules = config_lib.DecodeConfig  # max_new_tokens and seed are data, not rules: pass them as 1 and 0 to compile once


class DecodeState(struct.PyTreeNode):
    """Everything that changes while decoding. Allocated whole before the loop."""

    # evolving
    cache: cache_lib.Cache  # lengths == number of tokens - 1, always: the pending token is not in it
    hidden: Float[Array, "B D"]  # backbone's state at slot lengths - 1
    done: Bool[Array, " B"]
    drafter_state: Any
    # output
    tokens: Int[Array, "B S+1"]  # prompt, then what was generated
    stopped: Bool[Array, " B"]  # ended by a stop token (otherwise by the budget)
    # statistics
    steps: Int[Array, " B"]  # verify passes of a row, until it was done
    accepted: Int[Array, "B M"]  # steps in which draft k was kept and emitted

    @property
    def pending(self) -> Int[Array, " B"]:
        return jnp.take_along_axis(self.tokens, self.cache.lengths[:, None], axis=1)[:, 0]


def context_of(state: DecodeState, backbone_params: Any) -> drafters.Context:
    """What a drafter may read of the state."""
    return drafters.Context(tokens=state.tokens, pending=state.pending, hidden=state.hidden, cache=state.cache, backbone_params=backbone_params)


def prefill(
    backbone: backbone_lib.Backbone,
    backbone_params: Any,
    prompts: Int[Array, "B T"],
    prompt_lengths: Int[Array, " B"],
    limits: Int[Array, " B"],
    row_keys: Array,
    *,
    num_slots: int,
    drafter: drafters.Drafter | None,
    config: Rules,
) -> DecodeState:
    """Run the prompts through the backbone and choose each row's first token.

    Two compiled programs: the expensive one does not depend on the drafter or the rules, so all share it.

    Args:
      backbone: module (static); its layout is that of `backbone_params`.
      prompts: token ids, each row padded on the right with any token.
      prompt_lengths: 1..T.
      limits: tokens each row may hold in all, prompt included; more than prompt_lengths.
      row_keys: one random key a row, for sampling.
      num_slots: S; at least every limit + num_draft, which the caller has checked.
    """
    cache, hidden, logits = read_prompts(backbone, backbone_params, prompts, prompt_lengths, num_slots=num_slots)
    return begin(cache, hidden, logits, prompts, limits, row_keys, backbone_params, drafter=drafter, config=config)


@partial(jax.jit, static_argnames=("backbone", "num_slots"))
def read_prompts(
    backbone: backbone_lib.Backbone, backbone_params: Any, prompts: Int[Array, "B T"], prompt_lengths: Int[Array, " B"], *, num_slots: int
) -> tuple[cache_lib.Cache, Float[Array, "B D"], Float[Array, "B V"]]:
    """Cache of the prompts, and hidden state and logits of each row's last token."""
    output = backbone.apply({"params": backbone_params}, prompts, cache_lib.empty(backbone.config, len(prompts), num_slots), with_logits=False)
    assert isinstance(output, backbone_lib.BackboneOutput)
    hidden = jnp.take_along_axis(output.hidden, (prompt_lengths - 1)[:, None, None], axis=1)  # [B, 1, D]
    logits = backbone.apply({"params": backbone_params}, hidden, method="logits")
    assert isinstance(logits, jax.Array)
    return output.cache.replace(lengths=prompt_lengths), hidden[:, 0], logits[:, 0]


@partial(jax.jit, static_argnames=("drafter", "config"), donate_argnames=("cache",))
def begin(
    cache: cache_lib.Cache,
    hidden: Float[Array, "B D"],
    logits: Float[Array, "B V"],
    prompts: Int[Array, "B T"],
    limits: Int[Array, " B"],
    row_keys: Array,
    backbone_params: Any,
    *,
    drafter: drafters.Drafter | None,
    config: Rules,
) -> DecodeState:
    """Choose each row's first token and allocate the state. The cache is donated."""
    batch, length = prompts.shape
    prompt_lengths = cache.lengths
    first = sampling.choose(logits[:, None], prompt_lengths[:, None], row_keys, config)[:, 0]
    tokens = jnp.zeros((batch, cache.num_slots + 1), jnp.int32).at[:, :length].set(prompts)
    tokens = tokens.at[jnp.arange(batch), prompt_lengths].set(first)
    stopped = jnp.isin(first, jnp.asarray(config.stop_tokens, jnp.int32)) if config.stop_tokens else jnp.zeros((batch,), bool)
    state = DecodeState(
        cache=cache,
        hidden=hidden,
        done=stopped | (prompt_lengths + 1 >= limits),
        drafter_state=(),
        tokens=tokens,
        stopped=stopped,
        steps=jnp.zeros((batch,), jnp.int32),
        accepted=jnp.zeros((batch, config.num_draft), jnp.int32),
    )
    if drafter is not None:
        state = state.replace(drafter_state=drafter.init(context_of(state, backbone_params)))
    return state


@partial(jax.jit, static_argnames=("backbone", "drafter", "config"), donate_argnames=("state",))
def decode(
    backbone: backbone_lib.Backbone,
    drafter: drafters.Drafter | None,
    backbone_params: Any,
    drafter_params: Any,
    state: DecodeState,
    limits: Int[Array, " B"],
    row_keys: Array,
    *,
    config: Rules,
) -> DecodeState:
    """Step until every row is done. The state's buffers are donated and updated in place."""

    def unfinished(state: DecodeState) -> Bool[Array, ""]:
        return ~state.done.all()

    def one_step(state: DecodeState) -> DecodeState:
        return step(backbone, drafter, backbone_params, drafter_params, state, limits, row_keys, config=config)

    return lax.while_loop(unfinished, one_step, state)


def step(
    backbone: backbone_lib.Backbone,
    drafter: drafters.Drafter | None,
    backbone_params: Any,
    drafter_params: Any,
    state: DecodeState,
    limits: Int[Array, " B"],
    row_keys: Array,
    *,
    config: Rules,
) -> DecodeState:
    """One draft, verify, commit round. Rows that are done keep all of their state."""
    num_draft = config.num_draft
    drafts = jnp.zeros((state.tokens.shape[0], 0), jnp.int32)
    drafter_state = state.drafter_state
    if drafter is not None:
        drafts, drafter_state = drafter.draft(drafter_params, drafter_state, context_of(state, backbone_params), num_draft)

    block = jnp.concatenate([state.pending[:, None], drafts], axis=1)  # [B, M+1]
    output = backbone.apply({"params": backbone_params}, block, state.cache)
    assert isinstance(output, backbone_lib.BackboneOutput) and output.logits is not None
    lengths = state.cache.lengths
    places = lengths[:, None] + 1 + jnp.arange(num_draft + 1)  # of the tokens chosen here
    targets = sampling.choose(output.logits, places, row_keys, config)  # [B, M+1]

    accepted = verify.matching(drafts, targets)
    committed, stopped = verify.cut(targets, accepted, limits - (lengths + 1), config.stop_tokens)
    committed = jnp.where(state.done, 0, committed)
    kept = jnp.minimum(accepted, committed)  # drafts kept and emitted

    last = jnp.maximum(committed - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(output.hidden, last, axis=1)[:, 0]
    new = DecodeState(
        cache=output.cache.replace(lengths=lengths + committed),
        hidden=jnp.where(state.done[:, None], state.hidden, hidden),
        done=state.done | stopped | (lengths + 1 + committed >= limits),
        drafter_state=drafter_state,
        tokens=_write_tokens(state.tokens, targets, lengths + 1),
        stopped=state.stopped | (stopped & ~state.done),
        steps=state.steps + jnp.where(state.done, 0, 1),
        accepted=state.accepted + (jnp.arange(num_draft) < kept[:, None]),
    )
    if drafter is not None:
        new = new.replace(drafter_state=drafter.commit(drafter_state, kept, context_of(new, backbone_params)))
    return new


def _write_tokens(tokens: Int[Array, "B S+1"], new: Int[Array, "B M+1"], start: Int[Array, " B"]) -> Int[Array, "B S+1"]:
    """All M+1 choices go in; those beyond what was committed are overwritten before they count."""
    return jax.vmap(lambda row, update, begin: lax.dynamic_update_slice(row, update, (begin,)))(tokens, new, start)
