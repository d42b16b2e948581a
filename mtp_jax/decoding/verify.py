"""Accept rules: how many of a step's drafts are kept, and what the backbone puts after them.

Both are lossless. `matching` keeps what the backbone chose itself, argmax or sample; `rejection` keeps a sampled draft
as often as the two distributions allow, and its text has the distribution of vanilla sampling, not its very tokens.

Random numbers are keyed by row, position and purpose. A position whose draft fell behind a rejection is drafted again
with the same key in the next step: nothing that was kept depended on it, so it is as good as new.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax import config as config_lib
from mtp_jax.decoding import sampling


def judge(
    drafts: Int[Array, "B M"],
    draft_probs: Float[Array, "B M V"] | None,
    logits: Float[Array, "B M+1 V"],
    positions: Int[Array, "B M+1"],
    row_keys: Array,
    config: config_lib.DecodeConfig,
) -> tuple[Int[Array, " B"], Int[Array, "B M+1"]]:
    """Apply the rule of the config: number of drafts kept, and the tokens of which accepted + 1 may be committed.

    Args:
      drafts, draft_probs: a Proposal's.
      logits: the backbone's, after the pending token and after each draft.
      positions: index in the row's text of each token chosen here.
      row_keys: one key a row [B]; unused when greedy.
    """
    if config.by_rejection:
        return rejection(drafts, draft_probs, sampling.limited(logits, config), positions, row_keys)
    targets = sampling.choose(logits, positions, row_keys, config)
    return matching(drafts, targets), targets


def matching(drafts: Int[Array, "B M"], targets: Int[Array, "B M+1"]) -> Int[Array, " B"]:
    """Number of leading drafts that equal the backbone's own choice, 0..M per row.

    Row j of `targets` is the backbone's choice (argmax, or its sample with that position's key) after the pending token
    and j drafts, so the tokens to commit are targets[:, : accepted + 1]: the kept drafts, then the recovered or bonus
    token. Stern et al. 2018. Lossless whatever the drafts are, since only the backbone's choices are ever committed.

        drafts [7 8 9], targets [7 8 5 3] -> 2: commit 7 8 5
    """
    return _leading(drafts == targets[:, :-1])


def rejection(
    drafts: Int[Array, "B M"],
    draft_probs: Float[Array, "B M V"] | None,
    logits: Float[Array, "B M+1 V"],
    positions: Int[Array, "B M+1"],
    row_keys: Array,
) -> tuple[Int[Array, " B"], Int[Array, "B M+1"]]:
    """Speculative sampling: keep draft d with probability min(1, p(d) / q(d)), and let p replace the first that is not kept.

    The recovered token is drawn from norm(max(0, p - q)), so that kept or recovered it has the distribution p:

        min(p, q) + (1 - sum min(p, q)) * max(0, p - q) / sum max(0, p - q) = p

    The bonus token after M kept drafts is drawn from p, and so is the token in place of a draft -1, with the key of
    `sampling.choose`: without drafts this is vanilla sampling, token for token. Leviathan et al. 2023, algorithm 1;
    Chen et al. 2023, algorithm 2.

    Args:
      drafts: -1 is no draft; it and what follows it are not kept.
      draft_probs: q, float32: the very distribution each draft was drawn from, temperature and filters included. None means
        that drafts were not drawn: each is a point mass, kept with probability p(d), and p without d replaces it.
      logits: float32, after temperature and filters: p is their softmax. -inf is never committed.
      positions: index in the row's text of each token chosen here.
      row_keys: one key a row [B].

    Returns:
      accepted: 0..M per row.
      targets: in each row its accepted drafts, the recovered or bonus token, and then what does not matter.
    """
    num_draft = drafts.shape[1]
    there, index = drafts >= 0, jnp.maximum(drafts, 0)[..., None]  # [B, M], [B, M, 1]
    before = logits[:, :num_draft]  # of the tokens that stand against a draft
    p = jax.nn.softmax(before, axis=-1)
    p_of_draft = jnp.take_along_axis(p, index, axis=-1)[..., 0]
    if draft_probs is None:
        q_of_draft: Array | float = 1.0
        replacement = jnp.where(jnp.arange(p.shape[-1]) == index, -jnp.inf, before)
    else:
        q_of_draft = jnp.take_along_axis(draft_probs, index, axis=-1)[..., 0]
        replacement = jnp.log(jnp.maximum(p - draft_probs, 0.0))  # drawing needs no normalised logits
    # Where p and q are equal up to rounding nothing may be left to replace a draft with, nor is there anything to reject.
    from_p = ~there | (replacement.max(axis=-1) == -jnp.inf)
    replacement = jnp.where(from_p[..., None], before, replacement)
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(sampling.keys_at(row_keys, positions[:, :num_draft], sampling.ACCEPT))  # in [0, 1)
    keep = there & (uniform * q_of_draft < p_of_draft)
    accepted = _leading(keep)
    drawn = sampling.draw(jnp.concatenate([replacement, logits[:, num_draft:]], axis=1), sampling.keys_at(row_keys, positions))
    kept = jnp.pad(drafts, ((0, 0), (0, 1)))
    return accepted, jnp.where(jnp.arange(num_draft + 1) < accepted[:, None], kept, drawn)


def _leading(kept: Bool[Array, "B M"]) -> Int[Array, " B"]:
    return jnp.cumprod(kept.astype(jnp.int32), axis=1).sum(axis=1)


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
