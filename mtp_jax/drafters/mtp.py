"""The MTP head as a drafter: no state at all, since it reads the backbone's cache and the text.

Every draft step of a row uses the same slots 0..p and the same query position; only the token and the hidden state
move on. What the head needs beyond the cache are its parameters and the draft vocabulary (`Params`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.models import head as head_lib
from mtp_jax.models import layers


class Params(struct.PyTreeNode):
    """Arrays of the head; beyond the backbone, this is all there is."""

    head: Any
    vocab: head_lib.DraftVocab


@dataclass(frozen=True)
class MTPDrafter:
    """Greedy drafting with an MTP head."""

    head: head_lib.Head

    def init(self, context: drafters.Context) -> tuple[()]:
        return ()

    def draft(self, params: Params, state: tuple[()], context: drafters.Context, rules: config_lib.DecodeConfig) -> tuple[drafters.Proposal, tuple[()]]:
        config = self.head.config
        keys = {donor: context.cache.keys[donor] for donor in config.layers_read}
        values = {donor: context.cache.values[donor] for donor in config.donors}
        last_slot = context.cache.lengths[:, None] - 1  # p
        followers = context.tokens[:, 1:]  # x_{s+1} of every slot s
        index_at_slots = params.vocab.index[followers]
        table = context.backbone_params["embed"]["embedding"]

        token, hidden = context.pending[:, None], context.hidden[:, None]
        drafts = []
        for _ in range(rules.num_draft):
            output = self.head.apply({"params": params.head}, table[token], hidden, keys, values, last_slot, params.vocab.unembedding)
            assert isinstance(output, head_lib.HeadOutput)
            slot_logits = head_lib.gather_slot_logits(output.logits, index_at_slots)
            token = head_lib.greedy(head_lib.mix(output, slot_logits, followers, last_slot), params.vocab.ids, followers)
            hidden = output.hidden
            drafts.append(token)
        return drafters.Proposal(tokens=jnp.concatenate(drafts, axis=1)), state

    def commit(self, state: tuple[()], accepted: Int[Array, " B"], context: drafters.Context) -> tuple[()]:
        return state


def make_params(head: head_lib.Head, head_params: dict[str, Any], draft_ids: Array, backbone_params: dict[str, Any]) -> Params:
    """Bring a head's stored parameters (plain layout) into the layout of `head`, and cut the draft rows of the unembedding
    where the head has no table of its own.

    Args:
      head: module whose `column_blocks` gives the layout wanted.
      head_params: as trained and stored.
      draft_ids: token id of each draft entry [C].
      backbone_params: of the frozen backbone, in the plain layout.
    """
    with_rows = head.config.output == "backbone"
    vocab = head_lib.draft_vocab(jnp.asarray(draft_ids, jnp.int32), backbone_params, head.backbone, column_blocks=head.column_blocks, with_rows=with_rows)
    return Params(head=layers.to_column_blocks(head_params) if head.column_blocks else head_params, vocab=vocab)
