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
    small = isinstance(head, baselines.Standalone)
    ids = jnp.asarray(draft_ids, jnp.int32)
    vocab = head_lib.draft_vocab(ids, backbone_params, head.backbone, column_blocks=head.column_blocks, with_rows=not small)
    if head.column_blocks:
        params = backbone_lib.to_column_blocks(params, head.model.config) if isinstance(head, baselines.Standalone) else layers.to_column_blocks(params)
    return mtp.Params(head=params, vocab=vocab)
