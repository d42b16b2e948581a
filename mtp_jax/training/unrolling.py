"""How each form of draft model runs over whole texts, row by row as it runs when decoding.

    prepare(params, frozen, text) -> prepared                     what all rows of a batch share, made once: own K/V, own states
    start(params, frozen, text, prepared, rows) -> carry          before draft step 1 of the rows [B, R]
    step(params, frozen, text, prepared, carry, k, rows) -> output, carry

`frozen` and `text` are those of loss.py; gradients go to `params`. k is a number, or an array where steps are a loop: a carry
keeps its shapes and dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import baselines, forms, layers
from mtp_jax.models import head as head_lib

if TYPE_CHECKING:
    from mtp_jax.training.loss import Frozen, Text


class Unrolling(Protocol):
    """See the top of the file."""

    def prepare(self, params: Any, frozen: Frozen, text: Text) -> Any: ...

    def start(self, params: Any, frozen: Frozen, text: Text, prepared: Any, rows: Int[Array, "B R"]) -> Any: ...

    def step(
        self, params: Any, frozen: Frozen, text: Text, prepared: Any, carry: Any, k: int | Int[Array, ""], rows: Int[Array, "B R"]
    ) -> tuple[head_lib.HeadOutput, Any]: ...


def of(head: forms.AnyHead, num_draft: int) -> Unrolling:
    """The one for this form of head; num_draft is the number of steps there will be."""
    if isinstance(head, baselines.PairHead):
        return _Pairs(head, num_draft)
    if isinstance(head, baselines.OwnCacheHead):
        return _OwnCache(head)
    if isinstance(head, baselines.Medusa):
        return _Medusa(head)
    return _Standalone(head) if isinstance(head, baselines.Standalone) else _ZeroCopy(head)


@dataclass(frozen=True)
class _ZeroCopy:
    """The MTP head: slots are the backbone's, and the carry is the hidden state."""

    head: head_lib.Head

    def prepare(self, params: Any, frozen: Frozen, text: Text) -> tuple[dict[int, Array], dict[int, Array]]:
        return text.keys, text.values

    def start(self, params: Any, frozen: Frozen, text: Text, prepared: Any, rows: Int[Array, "B R"]) -> Float[Array, "B R D"]:
        return _hidden(frozen, text, rows)

    def step(
        self, params: Any, frozen: Frozen, text: Text, prepared: Any, carry: Float[Array, "B R D"], k: int | Int[Array, ""], rows: Int[Array, "B R"]
    ) -> tuple[head_lib.HeadOutput, Float[Array, "B R D"]]:
        keys, values = prepared
        output = self.head.apply({"params": params}, _embedded(frozen, text, rows + k), carry, keys, values, rows, frozen.vocab.unembedding)
        assert isinstance(output, head_lib.HeadOutput)
        return output, output.hidden.astype(frozen.table.dtype)  # as the head would do


@dataclass(frozen=True)
class _OwnCache:
    """The same over own K/V of all true pairs."""

    model: baselines.OwnCacheHead

    def prepare(self, params: Any, frozen: Frozen, text: Text) -> tuple[dict[int, Array], dict[int, Array]]:
        keys, values = _true_pairs(self.model, params, frozen, text)
        return {0: keys}, {0: values}

    def start(self, params: Any, frozen: Frozen, text: Text, prepared: Any, rows: Int[Array, "B R"]) -> Float[Array, "B R D"]:
        return _hidden(frozen, text, rows)

    def step(
        self, params: Any, frozen: Frozen, text: Text, prepared: Any, carry: Float[Array, "B R D"], k: int | Int[Array, ""], rows: Int[Array, "B R"]
    ) -> tuple[head_lib.HeadOutput, Float[Array, "B R D"]]:
        return _ZeroCopy(self.model.head).step(params, frozen, text, prepared, carry, k, rows)


@dataclass(frozen=True)
class _Pairs:
    """EAGLE, EAGLE-3 and DeepSeek: own K/V of all true pairs; the carry is the hidden state, and each row's drafted pairs."""

    model: baselines.PairHead
    num_draft: int

    def prepare(self, params: Any, frozen: Frozen, text: Text) -> tuple[Array, Array]:
        return _true_pairs(self.model, params, frozen, text)

    def start(self, params: Any, frozen: Frozen, text: Text, prepared: Any, rows: Int[Array, "B R"]) -> tuple[Array, baselines.Drafted]:
        batch, count = rows.shape
        hidden = baselines.true_hidden(self.model, params, _hidden(frozen, text, rows)).astype(frozen.table.dtype)
        return hidden, baselines.no_drafts(self.model.config, batch, count, self.num_draft, frozen.table.dtype)

    def step(
        self, params: Any, frozen: Frozen, text: Text, prepared: Any, carry: tuple[Array, baselines.Drafted], k: int | Int[Array, ""], rows: Int[Array, "B R"]
    ) -> tuple[head_lib.HeadOutput, tuple[Array, baselines.Drafted]]:
        hidden, drafted = carry
        keys, values = prepared
        embedded, unembedding = _embedded(frozen, text, rows + k), frozen.vocab.unembedding
        made: Any = self.model.apply({"params": params}, embedded, hidden, keys, values, rows, drafted, k, unembedding)
        output, drafted = made
        return output, (output.hidden.astype(frozen.table.dtype), drafted)


@dataclass(frozen=True)
class _Medusa:
    """The carry is the features of all heads."""

    model: baselines.Medusa

    def prepare(self, params: Any, frozen: Frozen, text: Text) -> tuple[()]:
        return ()

    def start(self, params: Any, frozen: Frozen, text: Text, prepared: Any, rows: Int[Array, "B R"]) -> Float[Array, "B R M D"]:
        features: Any = self.model.apply({"params": params}, _hidden(frozen, text, rows))
        return features

    def step(
        self, params: Any, frozen: Frozen, text: Text, prepared: Any, carry: Float[Array, "B R M D"], k: int | Int[Array, ""], rows: Int[Array, "B R"]
    ) -> tuple[head_lib.HeadOutput, Float[Array, "B R M D"]]:
        return _without_pointer(jnp.take(carry, k - 1, axis=2), frozen.vocab.unembedding), carry


@dataclass(frozen=True)
class _Standalone:
    """Own states at all positions: with the text as input, draft step k of row i is the state at i + k."""

    small: baselines.Standalone

    def prepare(self, params: Any, frozen: Frozen, text: Text) -> Float[Array, "B S W"]:
        output = self.small.model.apply({"params": params}, text.tokens, with_logits=False)
        assert isinstance(output, backbone_lib.BackboneOutput)
        return output.hidden

    def start(self, params: Any, frozen: Frozen, text: Text, prepared: Any, rows: Int[Array, "B R"]) -> tuple[()]:
        return ()

    def step(
        self, params: Any, frozen: Frozen, text: Text, prepared: Any, carry: tuple[()], k: int | Int[Array, ""], rows: Int[Array, "B R"]
    ) -> tuple[head_lib.HeadOutput, tuple[()]]:
        table = params["embed"]["embedding"]
        rows_drafted = table if len(frozen.vocab.ids) == len(table) else table[frozen.vocab.ids]
        return _without_pointer(at(prepared, rows + k), rows_drafted.T), carry


def _without_pointer(features: Float[Array, "B R W"], unembedding: layers.Kernel) -> head_lib.HeadOutput:
    logits = layers.matmul(features, unembedding).astype(jnp.float32)
    return head_lib.HeadOutput(logits=logits, hidden=features, features=features, copy=None, gate=None)


def _true_pairs(model: baselines.PairHead | baselines.OwnCacheHead, params: Any, frozen: Frozen, text: Text) -> tuple[Array, Array]:
    """K/V of the pairs (x_{t+1}, h_t) of every t; that of the last token has no x_{t+1}, and no row sees it."""
    positions = jnp.broadcast_to(jnp.arange(text.tokens.shape[1]), text.tokens.shape)
    return baselines.keys_values(model, params, frozen.table[text.followers], text.hidden, positions)


def _embedded(frozen: Frozen, text: Text, places: Int[Array, "B R"]) -> Float[Array, "B R D"]:
    return frozen.table[at(text.tokens, places)]


def _hidden(frozen: Frozen, text: Text, rows: Int[Array, "B R"]) -> Float[Array, "B R E"]:
    """h_i of the rows, and taps where there are any."""
    return at(text.hidden, rows).astype(frozen.table.dtype)


def at(array: Array, places: Int[Array, "B R"]) -> Array:
    """Entries of [B, T, ...] at [B, R] places; those beyond the end are the last one."""
    places = jnp.minimum(places, array.shape[1] - 1)
    return jnp.take_along_axis(array, places.reshape(*places.shape, *[1] * (array.ndim - 2)), axis=1)


__all__ = ["Unrolling", "at", "of"]
