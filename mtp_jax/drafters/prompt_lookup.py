"""Prompt lookup: draft what followed the last occurrence of the newest tokens. Nothing is trained, no state.

Worked row, text A B C D A B with B pending, M = 3: the longest earlier match of the text's end is "A B" (2 tokens, at
slots 0..1), so the drafts are C D A; a copy that reaches the end goes on from where it began.

Source: Saxena 2023, prompt lookup decoding; the search runs on the token buffer inside the compiled loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from mtp_jax import config as config_lib
from mtp_jax import drafters


@dataclass(frozen=True)
class PromptLookup:
    """Drafts where something matches, and none elsewhere."""

    max_match: int = 3  # longer matches count as this long; among equals the latest wins

    def init(self, batch: int, num_slots: int) -> tuple[()]:
        return ()

    def draft(self, params: Any, state: tuple[()], context: drafters.Context, rules: config_lib.DecodeConfig) -> tuple[drafters.Proposal, tuple[()]]:
        tokens, found = lookup(context.tokens, context.cache.lengths, self.max_match, rules.num_draft)
        return drafters.Proposal(tokens=jnp.where(found[:, None] > 0, tokens, -1)), state

    def commit(self, params: Any, state: tuple[()], seen: drafters.Seen, context: drafters.Context) -> tuple[()]:
        return state


def lookup(tokens: Int[Array, "B S+1"], last: Int[Array, " B"], max_match: int, num_draft: int) -> tuple[Int[Array, "B M"], Int[Array, " B"]]:
    """Continuation of the longest, then latest, earlier match of each row's end.

    Args:
      tokens: the text so far; entries beyond `last` are ignored.
      last: index of the pending token.
      max_match: matches are compared over so many tokens at most.
      num_draft: M.

    Returns:
      drafts, and the length of the match, 0..max_match.
    """
    places = jnp.arange(tokens.shape[1])
    length = jnp.zeros(tokens.shape, jnp.int32)  # of the match that ends at each place
    going = places < last[:, None]
    for back in range(max_match):
        wanted = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0)[:, None], axis=1)  # [B, 1]
        here = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]  # tokens[place - back]
        going = going & (here == wanted) & (places >= back)
        length = length + going
    best = jnp.argmax(length * tokens.shape[1] + places * (places < last[:, None]), axis=1)  # [B]
    period = jnp.maximum(last - best, 1)[:, None]
    source = best[:, None] + 1 + jnp.arange(num_draft) % period
    found = jnp.take_along_axis(length, best[:, None], axis=1)[:, 0]
    return jnp.take_along_axis(tokens, jnp.minimum(source, last[:, None]), axis=1), found
