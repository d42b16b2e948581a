"""Drafting with Medusa heads (Cai et al. 2024, arXiv 2401.10774), as a chain: all drafts at once from the backbone's newest state. No state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.drafters import mtp
from mtp_jax.models import baselines, layers
from mtp_jax.models import head as head_lib


@dataclass(frozen=True)
class MedusaDrafter:
    """Head k proposes draft k; none knows what the others propose."""

    heads: baselines.Medusa

    def init(self, batch: int, num_slots: int) -> tuple[()]:
        return ()

    def draft(self, params: mtp.Params, state: tuple[()], context: drafters.Context, rules: config_lib.DecodeConfig) -> tuple[drafters.Proposal, tuple[()]]:
        """Raises ConfigError where rules.num_draft exceeds the number of heads."""
        count = self.heads.config.num_draft
        if rules.num_draft > count:
            raise config_lib.ConfigError(f"num_draft={rules.num_draft}: must be at most {count}, the heads that this Medusa has")
        features: Any = self.heads.apply({"params": params.head}, context.hidden[:, None])
        logits = layers.matmul(features[:, 0, : rules.num_draft], params.vocab.unembedding).astype(jnp.float32)
        log_probs, keys = jax.nn.log_softmax(logits, axis=-1), mtp.keys_of_drafts(context, rules)  # [B, M, C]

        def take(number: int, token: Array, carry: tuple[()]) -> mtp.Step:
            mixture = head_lib.Mixture(vocab=log_probs[:, number : number + 1], slots=None, vocab_at_slots=None)
            return carry, *mtp.choose(mixture, params.vocab, context.tokens, rules, keys, number)

        return mtp.chain(take, context.pending[:, None], (), rules, skip=False)[0], state

    def commit(self, params: mtp.Params, state: tuple[()], seen: drafters.Seen, context: drafters.Context) -> tuple[()]:
        return state
