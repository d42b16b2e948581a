"""The MTP head as a drafter: no state at all, since it reads the backbone's cache and the text.

Every draft step of a row uses the same slots 0..p and the same query position; only the token and the hidden state
move on. What the head needs beyond the cache are its parameters and the draft vocabulary (`Params`).

Drafts are the most probable ones, unless they are to be kept by rejection: then they are drawn from the head's mixture at
the temperature and under the filters that the backbone is sampled with, and the proposal holds that very distribution.

`min_confidence` ends a row's drafts early: once the product of their probabilities has fallen below it, no further one is
proposed. The decision rests on drafts that are proposed, never on one that is dropped, so it is lossless for sampled ones too.
The rule is that of CALM (Schuster et al. 2022) and EAGLE-2 (Li et al. 2024), applied to a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.decoding import sampling
from mtp_jax.models import head as head_lib
from mtp_jax.models import layers


class Params(struct.PyTreeNode):
    """Arrays of the head; beyond the backbone, this is all there is."""

    head: Any
    vocab: head_lib.DraftVocab


@dataclass(frozen=True)
class MTPDrafter:
    """Drafting with an MTP head, greedy or sampled."""

    head: head_lib.Head

    def init(self, batch: int, num_slots: int) -> tuple[()]:
        return ()

    def draft(self, params: Params, state: tuple[()], context: drafters.Context, rules: config_lib.DecodeConfig) -> tuple[drafters.Proposal, tuple[()]]:
        config = self.head.config
        keys = {donor: context.cache.keys[donor] for donor in config.layers_read}
        values = {donor: context.cache.values[donor] for donor in config.donors}
        last_slot = context.cache.lengths[:, None] - 1  # p
        positions = context.cache.ring_positions(config.layers_read)
        pointed = head_lib.pointer_positions(config, positions)
        followers = context.tokens[:, 1:]  # x_{s+1} of every slot s
        if pointed is not None:
            followers = jnp.take_along_axis(followers, jnp.maximum(pointed, 0), axis=1)
        index_at_slots = params.vocab.index[followers]
        table = context.backbone_params["embed"]["embedding"]

        draft_keys = keys_of_drafts(context, rules)

        def take(step: int, token: Array, hidden: Array) -> Step:
            output = self.head.apply({"params": params.head}, table[token], hidden, keys, values, last_slot, params.vocab.unembedding, positions)
            assert isinstance(output, head_lib.HeadOutput)
            slot_logits = head_lib.gather_slot_logits(output.logits, index_at_slots)
            mixture = head_lib.mix(output, slot_logits, followers, last_slot, pointed)
            return output.hidden, *choose(mixture, params.vocab, followers, rules, draft_keys, step)

        return chain(take, context.pending[:, None], context.hidden[:, None], rules)[0], state

    def commit(self, params: Any, state: tuple[()], seen: drafters.Seen, context: drafters.Context) -> tuple[()]:
        return state


Step = tuple[Any, Array, Array, Array | None]  # what the next draft step takes over; token [B, 1], its probability, and the distribution it was drawn from


def chain(
    take: Callable[[int, Array, Any], Step], token: Int[Array, "B 1"], carry: Any, rules: config_lib.DecodeConfig, *, skip: bool = True
) -> tuple[drafters.Proposal, Any]:
    """Draft rules.num_draft tokens, each from the one before; the proposal, and what the last step leaves.

    Args:
      take: a draft step: (its number from 0, newest token, what the step before left) -> Step.
      token: the pending one.
      carry: what the first step takes over.
      skip: with min_confidence, compute no further step once no row goes on. Not for steps that write into large arrays: on CPU
        a branch copies them.
    """
    drafts, probs = [], []
    going, confidence = jnp.ones_like(token, bool), jnp.ones(token.shape)
    for number in range(rules.num_draft):
        step = partial(take, number)
        if skip and rules.min_confidence > 0 and number > 0:
            nothing = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(step, token, carry))
            carry, token, probability, drawn_from = lax.cond(going.any(), step, lambda *_, nothing=nothing: nothing(), token, carry)
        else:
            carry, token, probability, drawn_from = step(token, carry)
        drafts.append(jnp.where(going, token, -1))
        if drawn_from is not None:
            probs.append(drawn_from)
        confidence = confidence * probability
        going = going & (confidence >= rules.min_confidence)
    return drafters.Proposal(tokens=jnp.concatenate(drafts, axis=1), probs=jnp.concatenate(probs, axis=1) if probs else None), carry


def choose(
    mixture: head_lib.Mixture, vocab: head_lib.DraftVocab, followers: Int[Array, "B S"], rules: config_lib.DecodeConfig, keys: Array | None, number: int
) -> tuple[Int[Array, "B 1"], Float[Array, "B 1"], Float[Array, "B 1 V"] | None]:
    """The draft: the most probable token, or one drawn with `keys` [B, M]; its probability, and the distribution it was drawn from.

    Args:
      number: of the draft step, from 0.
    """
    if keys is None:
        return head_lib.greedy(mixture, vocab.ids, followers), head_lib.highest(mixture), None
    return choose_by_logits(spread(mixture, vocab, followers), rules, keys, number)


def choose_by_logits(
    logits: Float[Array, "B 1 V"], rules: config_lib.DecodeConfig, keys: Array | None, number: int
) -> tuple[Int[Array, "B 1"], Float[Array, "B 1"], Float[Array, "B 1 V"] | None]:
    """`choose` by logits of the whole vocabulary."""
    if keys is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), jax.nn.softmax(logits, axis=-1).max(axis=-1), None
    logits = sampling.limited(logits, rules)
    token = sampling.draw(logits, keys[:, number : number + 1])
    drawn_from = jax.nn.softmax(logits, axis=-1)
    return token, jnp.take_along_axis(drawn_from, token[..., None], axis=-1)[..., 0], drawn_from


def keys_of_drafts(context: drafters.Context, rules: config_lib.DecodeConfig) -> Array | None:
    """Keys [B, M] to draw the drafts with; None where drafts are greedy."""
    if not rules.by_rejection:
        return None
    if context.keys is None:
        raise ValueError("context.keys is None: drafts are sampled, which needs one key a row")
    return sampling.keys_at(context.keys, context.cache.lengths[:, None] + 1 + jnp.arange(rules.num_draft), sampling.DRAFT)


def spread(mixture: head_lib.Mixture, vocab: head_lib.DraftVocab, followers: Int[Array, "B S"]) -> Float[Array, "B T V"]:
    """The mixture's log probabilities over the whole vocabulary, -inf where a token can't be drafted.

    Where a token stands in both lists, the entry of `slots` is the sum of both ways to it and the larger one.
    """
    batch, length = mixture.vocab.shape[:2]
    full = jnp.full((batch, length, vocab.index.shape[0]), -jnp.inf).at[..., vocab.ids].set(mixture.vocab)
    if mixture.slots is None:
        return full
    copied = jnp.where(mixture.slots > jnp.finfo(jnp.float32).min, mixture.slots, -jnp.inf)
    return full.at[jnp.arange(batch)[:, None, None], jnp.arange(length)[:, None], followers[:, None]].max(copied)


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
