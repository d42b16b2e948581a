"""Acceptance as decoded, from a teacher-forced pass: walk each answer as the decode loop would.

Averaging over all rows counts rows at which no step would ever start. On the backbone's own greedy answers the loop's
path is known without decoding: start at the first row, jump by the number of tokens committed, repeat. The numbers are
those of `decoding.loop` up to rounding in the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from mtp_jax import config as config_lib
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import forms
from mtp_jax.training import data, sharding
from mtp_jax.training import features as features_lib
from mtp_jax.training import loss as loss_lib

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone


@dataclass(frozen=True)
class Acceptance:
    """Counts over steps."""

    steps: int
    tokens: int  # committed by those steps
    accepted: list[int]  # steps in which draft k was kept
    loss: float | None = None  # where it was measured: soft cross-entropy, mean over all rows and draft steps

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def unconditional(self) -> list[float]:
        """accepted[k] / steps."""
        return [count / self.steps if self.steps else 0.0 for count in self.accepted]

    @property
    def conditional(self) -> list[float]:
        """accepted[k] / accepted[k-1]."""
        before = [self.steps, *self.accepted]
        return [count / base if base else 0.0 for count, base in zip(self.accepted, before, strict=False)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "accept_unconditional": [round(x, 4) for x in self.unconditional],
            "accept_conditional": [round(x, 4) for x in self.conditional],
        } | ({} if self.loss is None else {"loss": self.loss})


def measure(
    head: forms.AnyHead,
    head_params: Any,
    frozen: loss_lib.Frozen,
    backbone: LoadedBackbone,
    examples: Sequence[data.Example],
    config: config_lib.TrainConfig,
    put: Callable[[data.Batch], data.Batch] = lambda batch: batch,
) -> Acceptance:
    """Acceptance on sequences whose answers are greedy ones, and the loss.

    Args:
      put: brings a batch of config.batch_size rows to the devices.
    """
    module = backbone_lib.Backbone(backbone.config, taps=head.config.taps)
    keys, values = head.config.layers_read, tuple(sorted(set(head.config.donors)))
    total, losses, count = Acceptance(0, 0, [0] * config.num_draft), 0.0, 0
    order = np.argsort([len(example.tokens) for example in examples], kind="stable")
    for start in range(0, len(order), config.batch_size):
        chosen = order[start : start + config.batch_size]
        padded = np.concatenate([chosen, np.repeat(chosen[-1:], config.batch_size - len(chosen))])
        batch = data.make_batch(examples, padded, config, None)
        there = put(batch)
        features = features_lib.compute(module, backbone.params, there.tokens, key_layers=keys, value_layers=values)
        found = _judged(head, head_params, frozen, features, there, num_draft=config.num_draft, rows_per_chunk=config.rows_per_chunk)
        correct, valid, loss = sharding.to_host(found)  # [M, B, R]
        own = valid[:, : len(chosen)]
        losses, count = losses + float(loss[:, : len(chosen)][own].sum(dtype=np.float64)), count + int(own.sum())
        for place, index in enumerate(chosen):
            total = _add(total, walk(correct[:, place], np.asarray(batch.rows[place]), examples[index].answer[: batch.lengths[place]]))
    return dataclasses.replace(total, loss=losses / max(count, 1))


@partial(jax.jit, static_argnames=("head", "num_draft", "rows_per_chunk"))
def _judged(
    head: forms.AnyHead,
    head_params: Any,
    frozen: loss_lib.Frozen,
    features: features_lib.Features,
    batch: data.Batch,
    *,
    num_draft: int,
    rows_per_chunk: int,
) -> tuple[Bool[Array, "M B R"], Bool[Array, "M B R"], Float[Array, "M B R"]]:
    """Whether each draft is right, whether it counts, and its loss."""
    found = loss_lib.unroll(head, head_params, frozen, features, batch, num_draft, rows_per_chunk=rows_per_chunk)
    return found.correct, found.valid, found.loss


def walk(correct: np.ndarray, rows: np.ndarray, answer: np.ndarray) -> Acceptance:
    """Walk one sequence, each of its answers from its first token, which the prefill chooses.

    Args:
      correct: [M, R], whether draft k from a row equals the text.
      rows: [R] row numbers, ascending, and then padding.
      answer: [T], True at the tokens of answers.

        answer tokens x_4..x_8, M = 2: x_4 is pending in row 3; if both drafts are right, x_5 x_6 x_7 are committed,
        x_7 is pending in row 6, and the last step can commit x_8 alone
    """
    num_draft = correct.shape[0]
    place = {int(rows[i]): i for i in reversed(range(len(rows)))}  # padding is row 0, and comes last
    leading = np.cumprod(correct.astype(int), axis=0).sum(axis=0)  # [R]
    steps, tokens, accepted = 0, 0, np.zeros(num_draft, int)
    borders = np.flatnonzero(np.diff(np.concatenate([[False], answer, [False]]))).reshape(-1, 2)
    for pending, end in borders.tolist():
        while pending < end - 1:
            # A row with one token left to write has no draft target, and so no entry: nothing of its draft is kept.
            drafts = int(leading[place[pending - 1]]) if pending - 1 in place else 0
            committed = min(drafts + 1, end - 1 - pending)
            accepted[: min(drafts, committed)] += 1
            steps, tokens, pending = steps + 1, tokens + committed, pending + committed
    return Acceptance(steps, tokens, accepted.tolist())


def _add(a: Acceptance, b: Acceptance) -> Acceptance:
    return Acceptance(a.steps + b.steps, a.tokens + b.tokens, [x + y for x, y in zip(a.accepted, b.accepted, strict=True)])
