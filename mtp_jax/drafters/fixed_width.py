"""No drafts at all, at the width of a verify pass: the reference for comparisons bit by bit.

Some devices give a matrix product with one row other last bits than one with several. A vanilla decode whose passes are as
wide as the verify pass has no such difference left: its logits and the drafting decode's are equal bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from mtp_jax import config as config_lib
from mtp_jax import drafters


@dataclass(frozen=True)
class FixedWidth:
    """Proposes nothing."""

    def init(self, batch: int, num_slots: int) -> tuple[()]:
        return ()

    def draft(self, params: Any, state: tuple[()], context: drafters.Context, rules: config_lib.DecodeConfig) -> tuple[drafters.Proposal, tuple[()]]:
        return drafters.Proposal(tokens=jnp.full((len(context.pending), rules.num_draft), -1, jnp.int32)), state

    def commit(self, params: Any, state: tuple[()], seen: drafters.Seen, context: drafters.Context) -> tuple[()]:
        return state
