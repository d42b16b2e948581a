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


def cut(ends: Bool[Array, "B M+1"], accepted: Int[Array, " B"], remaining: Int[Array, " B"]) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """How many of the step's tokens to commit: the accepted and one more, up to the first that ends the row (kept) and the row's budget.

    Args:
      ends: whether the row ends if this token is committed.
      accepted: 0..M.
      remaining: tokens the row may still commit.

    Returns:
      committed: 0..accepted+1 per row.
      stopped: whether the last committed token ends the row.
    """
    first_end = jnp.where(ends, jnp.arange(ends.shape[1]), ends.shape[1]).min(axis=1)
    committed = jnp.minimum(jnp.minimum(accepted + 1, first_end + 1), remaining)
    return committed, first_end < committed
