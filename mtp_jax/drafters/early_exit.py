"""The backbone's own first layers as drafter: they, the final norm and the unembedding. Nothing is trained, nothing is kept.

Draft step k reads one token at slot p+k: the pending one, then the drafts. Its K/V of the first layers go into the backbone's own cache,
behind the rows' lengths, where the next draft steps see them and the verify pass puts the same again. So there is no second cache
and no prefill, as with an MTP head.

Sources: Elhoushi et al. 2024 (LayerSkip, arXiv 2404.16710), whose models are trained for it, as most are not; Schuster et al. 2022 (CALM,
arXiv 2207.07061), which stops early for good and changes the text: here the whole backbone verifies, and the text is its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Int

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.drafters import mtp
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache as cache_lib


@dataclass(frozen=True)
class EarlyExit:
    """Drafting with the first `rules.exit_layer` layers, greedy or sampled."""

    backbone: config_lib.BackboneConfig

    def init(self, batch: int, num_slots: int) -> tuple[()]:
        return ()

    def draft(self, params: Any, state: tuple[()], context: drafters.Context, rules: config_lib.DecodeConfig) -> tuple[drafters.Proposal, tuple[()]]:
        """Raises ConfigError unless rules.exit_layer is in 0..num_layers."""
        depth = rules.exit_layer or max(self.backbone.num_layers // 2, 1)
        if depth > self.backbone.num_layers:
            raise config_lib.ConfigError(f"exit_layer={depth}: must be at most {self.backbone.num_layers}, the backbone's layers; 0 is half of them")
        model = backbone_lib.Backbone(self.backbone, column_blocks=backbone_lib.in_column_blocks(context.backbone_params))
        keys = mtp.keys_of_drafts(context, rules)

        def take(number: int, token: Int[Array, "B 1"], cache: cache_lib.Cache) -> mtp.Step:
            output = model.apply({"params": context.backbone_params}, token, cache, depth=depth)
            assert isinstance(output, backbone_lib.BackboneOutput) and output.logits is not None
            return output.cache.replace(lengths=cache.lengths + 1), *mtp.choose_by_logits(output.logits, rules, keys, number)

        proposal, cache = mtp.chain(take, context.pending[:, None], context.cache, rules, skip=False)
        return proposal.replace(cache=cache.replace(lengths=context.cache.lengths)), state

    def commit(self, params: Any, state: tuple[()], seen: drafters.Seen, context: drafters.Context) -> tuple[()]:
        return state
