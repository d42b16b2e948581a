"""Ways to propose tokens. A drafter is three pure functions over its own state; the loop verifies what it proposes.

    init(batch, num_slots) -> state                 allocated whole; () for a drafter that keeps nothing
    draft(params, state, context, rules) -> proposal, state
    commit(params, state, seen, context) -> state   the text has grown: by a piece of a prompt, or by a step

A drafter object is a frozen dataclass: hashable, static under jit. Its arrays travel separately, as `params`.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib
from mtp_jax.models import cache as cache_lib


class Context(struct.PyTreeNode):
    """What a drafter may read: all of it belongs to the backbone and the loop, none of it is copied."""

    tokens: Int[Array, "B S+1"]  # the text so far; beyond a row's pending token the entries mean nothing
    pending: Int[Array, " B"]  # newest committed token, tokens[lengths]; its K/V is not in the cache
    hidden: Float[Array, "B E"]  # backbone's state after the final norm at slot lengths - 1, and its taps (E is D: most drafters ask for none)
    cache: cache_lib.Cache  # slots 0..lengths-1 are valid
    backbone_params: Any
    keys: Array | None = None  # one random key a row [B], for drafters that sample


class Proposal(struct.PyTreeNode):
    """What a drafter puts forward to follow the pending token."""

    tokens: Int[Array, "B M"]  # -1 is no proposal: nothing equals it, so it and what follows it are never kept
    probs: Float[Array, "B M V"] | None = None  # float32: the very distribution each token was drawn from; None for tokens that were not drawn
    cache: cache_lib.Cache | None = None  # the backbone's, from a drafter that wrote into slots lengths .. lengths + M - 1 of it, and nowhere else


class Seen(struct.PyTreeNode):
    """What the backbone has just read of each row: T tokens of a prompt, or the M + 1 of a verify pass.

    Worked row, M = 3: slots 0..4 were valid, the pass read [x_5 a b c] and kept a: start 5, counts 2 (slots 5 and 6), and the new
    pending token is targets[1].
    """

    start: Int[Array, " B"]  # slot of the first of them
    counts: Int[Array, " B"]  # how many of them are text now: the rest is padding, or was rejected; 0 in rows that are done
    previous: Float[Array, "B E"]  # the backbone's state at slot start - 1; means nothing where start is 0
    hidden: Float[Array, "B T E"]  # the same at slots start .. start + T - 1, of rejected tokens too
    targets: Int[Array, "B T"] | None = None  # what the backbone chose after each of them; None while a prompt is read


def pad(proposal: Proposal, num_draft: int) -> Proposal:
    """The proposal with -1 (no proposal) for the tokens that it lacks to num_draft."""
    short = num_draft - proposal.tokens.shape[1]
    probs = proposal.probs
    return Proposal(
        tokens=jnp.pad(proposal.tokens, ((0, 0), (0, short)), constant_values=-1),
        probs=None if probs is None else jnp.pad(probs, ((0, 0), (0, short), (0, 0))),
    )


class Drafter(Protocol):
    """Interface of every drafter."""

    def init(self, batch: int, num_slots: int) -> Any:
        """State before any text, for texts of up to `num_slots` slots; () when there is none, and `commit` is then not called for prompts."""
        ...

    def draft(self, params: Any, state: Any, context: Context, rules: config_lib.DecodeConfig) -> tuple[Proposal, Any]:
        """Propose `rules.num_draft` tokens to follow the pending one."""
        ...

    def commit(self, params: Any, state: Any, seen: Seen, context: Context) -> Any:
        """Take in what became text and drop what the verify pass rejected. `context` is the new one; while a prompt is read, its `pending` is
        the prompt's next token, or means nothing at the end of the prompt."""
        ...
