"""Choosing a token from logits: greedy, or by temperature, top-k, top-p and min-p, in this order. Float32 throughout.

Each filter looks at what the ones before it have left: top-p at the probabilities renormalised after top-k. Min-p
compares with the most probable token, which every filter keeps, so for it the renormalising makes no difference. What
may not be sampled has a logit of exactly -inf.

Every position of every row has a key of its own, made from the seed, the row and the position. The same choice is
therefore made at a position whether it is reached one token a step or by a verify pass, and comparing drafts with it
(the sampler-match rule) is lossless for any drafter, and reproduces vanilla sampling token for token. What else is drawn
for a position, its draft and whether that is kept, has keys of other purposes (see verify.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib

# Purposes of a key besides the row's own token. They are folded into the row's key like positions, and lie beyond any of them.
DRAFT, ACCEPT = 2**32 - 1, 2**32 - 2


def choose(logits: Float[Array, "B T V"], positions: Int[Array, "B T"], row_keys: Array, config: config_lib.DecodeConfig) -> Int[Array, "B T"]:
    """The backbone's token at each position.

    Args:
      logits: float32.
      positions: index in the row's text that the token will have.
      row_keys: one key a row [B]; unused when greedy.
      config: temperature, top_k, top_p and min_p.
    """
    if config.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return draw(limited(logits, config), keys_at(row_keys, positions))


def draw(logits: Float[Array, "B T V"], keys: Array) -> Int[Array, "B T"]:
    """One token from each softmax(logits), each with its own key of keys [B, T]."""
    return jax.vmap(jax.vmap(jax.random.categorical))(keys, logits).astype(jnp.int32)


def limited(logits: Float[Array, "*rows V"], config: config_lib.DecodeConfig) -> Float[Array, "*rows V"]:
    """Logits after temperature (above 0) and all filters, float32: their softmax is what is sampled from."""
    return limit(logits.astype(jnp.float32) / config.temperature, config.top_k, config.top_p, config.min_p)


def limit(logits: Float[Array, "*rows V"], top_k: int, top_p: float, min_p: float = 0.0) -> Float[Array, "*rows V"]:
    """Set the logits outside the top k, then outside the smallest set that reaches probability top_p, then those of tokens
    less than min_p times as probable as the most probable one, to -inf. Only the first two need the logits sorted."""
    if top_k > 0 or top_p < 1:
        logits = _limit_sorted(logits, top_k, top_p)
    if min_p > 0:
        logits = jnp.where(logits - logits.max(axis=-1, keepdims=True) >= math.log(min_p), logits, -jnp.inf)
    return logits


def _limit_sorted(logits: Float[Array, "*rows V"], top_k: int, top_p: float) -> Float[Array, "*rows V"]:
    ranked = jnp.sort(logits, axis=-1, descending=True)
    lowest = ranked[..., min(top_k or ranked.shape[-1], ranked.shape[-1]) - 1]
    if top_p < 1:
        kept = jnp.where(ranked >= lowest[..., None], ranked, -jnp.inf)
        probs = jax.nn.softmax(kept, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # probability of the more probable tokens
        lowest = jnp.where(before < top_p, kept, jnp.inf).min(axis=-1)
    return jnp.where(logits >= lowest[..., None], logits, -jnp.inf)


def keys_at(row_keys: Array, positions: Int[Array, "B T"], purpose: int | None = None) -> Array:
    """Keys [B, T], one for each position of each row, for the row's own tokens or another purpose."""
    if purpose is not None:
        row_keys = jax.vmap(lambda key: jax.random.fold_in(key, purpose))(row_keys)
    return jax.vmap(lambda key, row: jax.vmap(lambda position: jax.random.fold_in(key, position))(row))(row_keys, positions)


def row_keys(seed: int, rows: Sequence[int]) -> Array:
    """One key for each row number."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.asarray(rows, jnp.int32))


def keys_of_seeds(seeds: Sequence[int]) -> Array:
    """One key for each seed: that of row 0 of a call with this seed.

    Raises:
      ConfigError: a seed outside 0..2**32 - 1.
    """
    for seed in seeds:
        if not 0 <= seed <= config_lib.MAX_SEED:
            raise config_lib.ConfigError(f"seeds holds {seed}: each must be in 0..{config_lib.MAX_SEED}")
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), 0))(jnp.asarray(seeds, jnp.uint32))
