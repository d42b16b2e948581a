"""Choosing a token from the backbone's logits: greedy, or by temperature, top-k and top-p. Float32 throughout.

Every position of every row has a key of its own, made from the seed, the row and the position. The same choice is
therefore made at a position whether it is reached one token a step or by a verify pass, and comparing drafts with it
(the sampler-match rule) is lossless for any drafter, and reproduces vanilla sampling token for token.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib


def choose(logits: Float[Array, "B T V"], positions: Int[Array, "B T"], row_keys: Array, config: config_lib.DecodeConfig) -> Int[Array, "B T"]:
    """The backbone's token at each position.

    Args:
      logits: float32.
      positions: index in the row's text that the token will have.
      row_keys: one key a row [B]; unused when greedy.
      config: temperature, top_k and top_p.
    """
    if config.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    limited = limit(logits / config.temperature, config.top_k, config.top_p)
    keys = jax.vmap(lambda key, row: jax.vmap(lambda position: jax.random.fold_in(key, position))(row))(row_keys, positions)
    return jax.vmap(jax.vmap(jax.random.categorical))(keys, limited).astype(jnp.int32)


def limit(logits: Float[Array, "*rows V"], top_k: int, top_p: float) -> Float[Array, "*rows V"]:
    """Set the logits outside the top k, and outside the smallest set that reaches probability top_p, to -inf."""
    if top_k == 0 and top_p == 1:
        return logits
    ranked = jnp.sort(logits, axis=-1, descending=True)
    lowest = ranked[..., min(top_k or ranked.shape[-1], ranked.shape[-1]) - 1]
    if top_p < 1:
        kept = jnp.where(ranked >= lowest[..., None], ranked, -jnp.inf)
        probs = jax.nn.softmax(kept, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # probability of the more probable tokens
        lowest = jnp.where(before < top_p, kept, jnp.inf).min(axis=-1)
    return jnp.where(logits >= lowest[..., None], logits, -jnp.inf)


def row_keys(seed: int, rows: Sequence[int]) -> Array:
    """One key for each row number."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.asarray(rows, jnp.int32))


def keys_of_seeds(seeds: Sequence[int]) -> Array:
    """One key for each seed: that of row 0 of a call with this seed."""
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), 0))(jnp.asarray(seeds, jnp.uint32))
