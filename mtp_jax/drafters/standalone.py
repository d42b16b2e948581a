"""Drafting with a small language model, which has a token table and a KV cache of its own (Leviathan et al. 2023, arXiv 2211.17192).

State: its K/V. Before a draft, with backbone slots 0..p valid, slots 0..p-1 are right. Slot p may lack: when all M drafts were kept, no
pass has read the last of them. So the first pass reads two tokens, x_p and the pending x_{p+1}, and later ones one each; slot p gets what it
may have had before. Rejected drafts stay behind the text, unread, until they are overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.drafters import mtp
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import baselines, layers
from mtp_jax.models import cache as cache_lib
from mtp_jax.models import head as head_lib


class State(struct.PyTreeNode):
    """K/V of each layer, [B, K, S, H]."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]


@dataclass(frozen=True)
class StandaloneDrafter:
    """Drafting with a small language model, greedy or sampled."""

    small: baselines.Standalone

    def init(self, batch: int, num_slots: int) -> State:
        empty = cache_lib.empty(self.small.model.config, batch, num_slots)
        return State(keys=empty.keys, values=empty.values)

    def draft(self, params: mtp.Params, state: State, context: drafters.Context, rules: config_lib.DecodeConfig) -> tuple[drafters.Proposal, State]:
        lengths = context.cache.lengths
        newest = jnp.take_along_axis(context.tokens, lengths[:, None] - 1, axis=1)  # x_p
        keys = mtp.keys_of_drafts(context, rules)

        def take(number: int, token: Array, cache: cache_lib.Cache) -> mtp.Step:
            tokens = jnp.concatenate([newest, token], axis=1) if number == 0 else token
            hidden, cache = self._read(params, tokens, cache)
            mixture = head_lib.Mixture(vocab=jax.nn.log_softmax(self._logits(params, hidden[:, -1:]), axis=-1), slots=None, vocab_at_slots=None)
            return cache, *mtp.choose(mixture, params.vocab, context.tokens, rules, keys, number)

        proposal, cache = mtp.chain(take, context.pending[:, None], _cache(state, lengths - 1), rules, skip=False)
        return proposal, State(keys=cache.keys, values=cache.values)

    def commit(self, params: mtp.Params, state: State, seen: drafters.Seen, context: drafters.Context) -> State:
        """Of a prompt, read T tokens, from the one before the piece on: that one may lack (see above), and the last of the piece then waits."""
        if seen.targets is not None:
            return state
        first = jnp.maximum(seen.start - 1, 0)
        tokens = jnp.take_along_axis(context.tokens, first[:, None] + jnp.arange(seen.hidden.shape[1]), axis=1)
        _, cache = self._read(params, tokens, _cache(state, first))
        return State(keys=cache.keys, values=cache.values)

    def _logits(self, params: mtp.Params, hidden: Float[Array, "B T W"]) -> Float[Array, "B T C"]:
        if isinstance(params.vocab.unembedding, tuple) and not params.vocab.unembedding:  # it drafts all tokens of its table
            logits: Any = self.small.model.apply({"params": params.head}, hidden, method="logits")
            return logits
        return layers.matmul(hidden, params.vocab.unembedding).astype(jnp.float32)

    def _read(self, params: mtp.Params, tokens: Int[Array, "B T"], cache: cache_lib.Cache) -> tuple[Array, cache_lib.Cache]:
        """Hidden states [B, T, W], and the cache with T tokens more."""
        output = self.small.model.apply({"params": params.head}, tokens, cache, with_logits=False)
        assert isinstance(output, backbone_lib.BackboneOutput)
        return output.hidden, output.cache.replace(lengths=cache.lengths + tokens.shape[1])


def _cache(state: State, lengths: Int[Array, " B"]) -> cache_lib.Cache:
    return cache_lib.Cache(keys=state.keys, values=state.values, lengths=lengths, num_slots=state.keys[0].shape[2])
