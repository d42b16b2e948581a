"""Drafters with K/V of their own, one layer of it: EAGLE, EAGLE-3, the DeepSeek-V3 module, and the MTP head over its own K/V (models/baselines.py).

State: K/V of true pairs, pair t = (x_{t+1}, h_t) in slot t. Before a draft, with backbone slots 0..p valid, slots 0..p-1 are right; the
newest pair (pending, h_p) is the first draft step's. `commit` makes the pairs of all tokens that a pass has read, each with the state
before it, so that it needs no token that is not chosen yet:

    read      slots L..L+T-1, tokens x_L..x_{L+T-1}
    written   pairs L-1..L+T-2: (x_L, h_{L-1}) .. (x_{L+T-1}, h_{L+T-2})      from L = 0: pairs 0..T-1, the last one with any token

Pairs of rejected tokens lie behind the text; nothing reads them, and the next write covers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.drafters import mtp
from mtp_jax.models import baselines
from mtp_jax.models import cache as cache_lib
from mtp_jax.models import head as head_lib


class State(struct.PyTreeNode):
    """K/V of true pairs."""

    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S H"]


@dataclass(frozen=True)
class _OwnPairs:
    """The state, and how it follows the text."""

    model: Any

    def init(self, batch: int, num_slots: int) -> State:
        config = self.model.config
        shape = (batch, config.num_kv_heads, num_slots, config.head_dim)
        return State(keys=jnp.zeros(shape, self.model.backbone.dtype), values=jnp.zeros(shape, self.model.backbone.dtype))

    def commit(self, params: mtp.Params, state: State, seen: drafters.Seen, context: drafters.Context) -> State:
        first = jnp.maximum(seen.start - 1, 0)
        before = jnp.concatenate([seen.previous[:, None], seen.hidden[:, :-1]], axis=1)
        hidden = jnp.where((seen.start == 0)[:, None, None], seen.hidden, before)
        tokens = jnp.take_along_axis(context.tokens, first[:, None] + 1 + jnp.arange(hidden.shape[1]), axis=1)
        return self._write(params, state, context, tokens, hidden, first)

    def _write(
        self, params: mtp.Params, state: State, context: drafters.Context, tokens: Int[Array, "B T"], hidden: Float[Array, "B T E"], first: Int[Array, " B"]
    ) -> State:
        """Put pairs first..first+T-1 into their slots."""
        embedded = context.backbone_params["embed"]["embedding"][tokens]
        keys, values = baselines.keys_values(self.model, params.head, embedded, hidden, first[:, None] + jnp.arange(tokens.shape[1]))
        return State(keys=cache_lib.write(state.keys, keys, first), values=cache_lib.write(state.values, values, first))


@dataclass(frozen=True)
class PairDrafter(_OwnPairs):
    """EAGLE, EAGLE-3, or the DeepSeek-V3 module: drafted pairs are seen by the drafts after them, and are gone after the step."""

    model: baselines.PairHead

    def draft(self, params: mtp.Params, state: State, context: drafters.Context, rules: config_lib.DecodeConfig) -> tuple[drafters.Proposal, State]:
        model, last_slot = self.model, context.cache.lengths[:, None] - 1
        table, keys = context.backbone_params["embed"]["embedding"], mtp.keys_of_drafts(context, rules)

        def take(number: int, token: Array, carry: tuple[Array, baselines.Drafted]) -> mtp.Step:
            hidden, drafted = carry
            made: Any = model.apply(
                {"params": params.head}, table[token], hidden, state.keys, state.values, last_slot, drafted, number + 1, params.vocab.unembedding
            )
            output, drafted = made
            mixture = head_lib.mix(output, None, context.tokens, last_slot)
            return (output.hidden, drafted), *mtp.choose(mixture, params.vocab, context.tokens, rules, keys, number)

        drafted = baselines.no_drafts(model.config, len(context.pending), 1, rules.num_draft, state.keys.dtype)
        pending, hidden = context.pending[:, None], baselines.true_hidden(model, params.head, context.hidden[:, None])
        return mtp.chain(take, pending, (hidden, drafted), rules)[0], state


@dataclass(frozen=True)
class OwnCacheDrafter(_OwnPairs):
    """The MTP head, reading its own K/V in place of the backbone's; drafted pairs have none."""

    model: baselines.OwnCacheHead

    def draft(self, params: mtp.Params, state: State, context: drafters.Context, rules: config_lib.DecodeConfig) -> tuple[drafters.Proposal, State]:
        lengths = context.cache.lengths
        state = self._write(params, state, context, context.pending[:, None], context.hidden[:, None], lengths - 1)
        own = cache_lib.Cache(keys=(state.keys,), values=(state.values,), lengths=lengths, num_slots=state.keys.shape[2])
        return mtp.MTPDrafter(self.model.head).draft(params, (), context.replace(cache=own), rules)[0], state
