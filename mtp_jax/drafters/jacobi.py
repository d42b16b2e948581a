"""Jacobi decoding: draft what the backbone itself chose, one step ago, behind the first of its choices that was not confirmed.

A verify pass gives a choice after every token that it reads, after rejected drafts too. Those were made behind a wrong token, but they
may be right all the same, and step by step they become so. Nothing is trained; the state are the guesses.

Worked row, M = 3: drafts [a b c], choices [a x y z]: a is kept, x committed, and the next drafts are [y z z]: what was chosen behind x,
its last one repeated for want of more.

Source: Santilli et al. 2023, arXiv 2305.10427. Lookahead decoding (Fu et al. 2024, arXiv 2402.02057) also keeps a pool of the guesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from mtp_jax import config as config_lib
from mtp_jax import drafters

MOST = 16  # guesses kept a row, and so the longest draft


@dataclass(frozen=True)
class Jacobi:
    """Drafts the backbone's own unconfirmed choices."""

    def init(self, batch: int, num_slots: int) -> Int[Array, "B MOST"]:
        return jnp.full((batch, MOST), -1, jnp.int32)

    def draft(
        self, params: Any, state: Int[Array, "B MOST"], context: drafters.Context, rules: config_lib.DecodeConfig
    ) -> tuple[drafters.Proposal, Int[Array, "B MOST"]]:
        """The guesses; in a row's first step the pending token, as often as may be. Raises ConfigError where rules.num_draft exceeds MOST."""
        if rules.num_draft > MOST:
            raise config_lib.ConfigError(f"num_draft={rules.num_draft}: must be at most {MOST} with drafter='jacobi'")
        guesses = state[:, : rules.num_draft]
        return drafters.Proposal(tokens=jnp.where(guesses < 0, context.pending[:, None], guesses)), state

    def commit(self, params: Any, state: Int[Array, "B MOST"], seen: drafters.Seen, context: drafters.Context) -> Int[Array, "B MOST"]:
        if seen.targets is None:  # a prompt: what was guessed behind another text is worth nothing
            return jnp.full_like(state, -1)
        last = seen.targets.shape[1] - 1
        places = jnp.minimum(seen.counts[:, None] + jnp.arange(MOST), last)
        return jnp.take_along_axis(seen.targets, places, axis=1)
