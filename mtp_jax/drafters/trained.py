"""The drafter of every form of trained head, and its parameters."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from mtp_jax import drafters
from mtp_jax.drafters import medusa, mtp, own_cache, standalone
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import baselines, forms, layers
from mtp_jax.models import head as head_lib


def make(head: forms.AnyHead) -> drafters.Drafter:
    """Who drafts with this head."""
    if isinstance(head, head_lib.Head):
        return mtp.MTPDrafter(head)
    if isinstance(head, baselines.PairHead):
        return own_cache.PairDrafter(head)
    if isinstance(head, baselines.OwnCacheHead):
        return own_cache.OwnCacheDrafter(head)
    return medusa.MedusaDrafter(head) if isinstance(head, baselines.Medusa) else standalone.StandaloneDrafter(head)


def make_params(head: forms.AnyHead, params: dict[str, Any], draft_ids: Array, backbone_params: dict[str, Any]) -> mtp.Params:
    """Stored parameters (plain layout) in the layout of `head`, and its draft vocabulary; arguments as of `mtp.make_params`.

    In a bfloat16 backbone the head's products run in bfloat16, as they did in training.
    """
    params = forms.in_forward_dtypes(head, params)
    if isinstance(head, head_lib.Head):
        return mtp.make_params(head, params, draft_ids, backbone_params)
    ids = jnp.asarray(draft_ids, jnp.int32)
    if isinstance(head, baselines.Standalone):
        return _standalone_params(head, params, ids)
    vocab = head_lib.draft_vocab(ids, backbone_params, head.backbone, column_blocks=head.column_blocks)
    return mtp.Params(head=layers.to_column_blocks(params) if head.column_blocks else params, vocab=vocab)


def _standalone_params(small: baselines.Standalone, params: dict[str, Any], ids: Array) -> mtp.Params:
    """Where it drafts only some tokens, their rows of its table are its unembedding; otherwise the whole table is."""
    config, cut = small.model.config, len(ids) < small.config.backbone_vocab_size
    vocab = head_lib.draft_vocab(ids, params, config, column_blocks=small.column_blocks, with_rows=cut)
    if small.column_blocks:
        params = backbone_lib.to_column_blocks(params, config)
        if cut:
            del params["unembed"]
    return mtp.Params(head=params, vocab=vocab)
