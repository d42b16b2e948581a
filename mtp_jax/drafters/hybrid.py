"""Prompt lookup where the text's end occurred before, the MTP head elsewhere. Both are stateless, so this is too.

Copying is most of what proofreading and rewriting do, and a long match is better evidence of it than any head has; the
head drafts the rest. When every row of a step has a match, the head does not run at all. A copied draft is not drawn: where
the head draws its drafts, the distribution of a copied one is all on that token.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.drafters import mtp, prompt_lookup


@dataclass(frozen=True)
class Hybrid:
    """Chooses row by row, by the length of the match."""

    head: mtp.MTPDrafter
    min_match: int = 3  # tokens that must have occurred before in this order for the lookup to be preferred
    head_draft: int = 4  # tokens the head drafts at most: a copy goes on being right for longer

    def init(self, batch: int, num_slots: int) -> tuple[()]:
        return ()

    def draft(self, params: mtp.Params, state: tuple[()], context: drafters.Context, rules: config_lib.DecodeConfig) -> tuple[drafters.Proposal, tuple[()]]:
        copied, found = prompt_lookup.lookup(context.tokens, context.cache.lengths, self.min_match, rules.num_draft)
        use = found >= self.min_match
        certain = jax.nn.one_hot(copied, params.vocab.index.shape[0]) if rules.by_rejection else None
        lookup = drafters.Proposal(tokens=copied, probs=certain)

        def mixed() -> drafters.Proposal:
            fewer = dataclasses.replace(rules, num_draft=min(self.head_draft, rules.num_draft), short_drafts=())
            drafted, _ = self.head.draft(params, state, context, fewer)
            drafted = drafters.pad(drafted, rules.num_draft)
            return jax.tree.map(lambda one, other: jnp.where(use.reshape(-1, *[1] * (one.ndim - 1)), one, other), lookup, drafted)

        return lax.cond(use.all(), lambda: lookup, mixed), state

    def commit(self, params: mtp.Params, state: tuple[()], seen: drafters.Seen, context: drafters.Context) -> tuple[()]:
        return state
