"""Ways to propose tokens. A drafter is three pure functions over its own state; the loop verifies what it proposes.

    init(context) -> state                     after the prefill
    draft(params, state, context, rules) -> proposal, state
    commit(state, accepted, context) -> state  after the verify pass

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
    hidden: Float[Array, "B D"]  # backbone's state after the final norm at slot lengths - 1
    cache: cache_lib.Cache  # slots 0..lengths-1 are valid
    backbone_params: Any
    keys: Array | None = None  # one random key a row [B], for drafters that sample


class Proposal(struct.PyTreeNode):
    """What a drafter puts forward to follow the pending token."""

    tokens: Int[Array, "B M"]  # -1 is no proposal: nothing equals it, so it and what follows it are never kept
    probs: Float[Array, "B M V"] | None = None  # float32: the very distribution each token was drawn from; None for tokens that were not drawn


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

    def init(self, context: Context) -> Any:
        """State after the prefill; () when there is none."""
        ...

    def draft(self, params: Any, state: Any, context: Context, rules: config_lib.DecodeConfig) -> tuple[Proposal, Any]:
        """Propose `rules.num_draft` tokens to follow the pending one."""
        ...

    def commit(self, state: Any, accepted: Int[Array, " B"], context: Context) -> Any:
        """Drop what the verify pass rejected; `accepted` drafts of each row were kept, `context` is the new one."""
        ...
