"""Accept rules: which drafts the backbone would have written itself."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def matching(drafts: Int[Array, "B M"], targets: Int[Array, "B M+1"]) -> Int[Array, " B"]:
    """Number of leading drafts that equal the backbone's own choice, 0..M per row.

    Row j of `targets` is the backbone's choice (argmax, or its sample with that position's key) after the pending token
    and j drafts, so the tokens to commit are targets[:, : accepted + 1]: the kept drafts, then the recovered or bonus
    token. Stern et al. 2018. Lossless whatever the drafts are, since only the backbone's choices are ever committed.

        drafts [7 8 9], targets [7 8 5 3] -> 2: commit 7 8 5
    """
    matches = drafts == targets[:, :-1]
    return jnp.cumprod(matches.astype(jnp.int32), axis=1).sum(axis=1)


def cut(
    targets: Int[Array, "B M+1"], accepted: Int[Array, " B"], remaining: Int[Array, " B"], stop_tokens: tuple[int, ...]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """How many of targets[:, : accepted + 1] to commit: up to the first stop token (kept) and the row's budget.

    Returns:
      committed: 0..accepted+1 per row.
      stopped: whether the last committed token is a stop token.
    """
    place = jnp.arange(targets.shape[1])
    is_stop = jnp.isin(targets, jnp.asarray(stop_tokens, targets.dtype)) if stop_tokens else jnp.zeros_like(targets, bool)
    first_stop = jnp.where(is_stop, place, targets.shape[1]).min(axis=1)
    committed = jnp.minimum(jnp.minimum(accepted + 1, first_stop + 1), remaining)
    return committed, first_stop < committed
