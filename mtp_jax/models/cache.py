"""The KV cache: two arrays for each layer that owns its K/V, filled by the backbone, read in place by the head.

The cache is an argument and a result, never module state: it rides in the decode loop's carry and is rolled back by
lengths alone. Slot s of a row holds the key and value of that row's token s, so slot and position are the same number.

Slots at or beyond `lengths` hold leftovers of rejected drafts. They are never read: every mask ends at the length,
and the next write covers them.

Rings. A layer with a window may have R slots instead of S, and position q then lies in slot q mod R. After a write that
ended at position `last`, slot r stands for the newest position up to `last` that falls on it, and masks go by that:

    p(r) = last - (last - r) mod R       R = 8, last = 10: slots 0..7 stand for 8 9 10 3 4 5 6 7

Why rejected drafts do no harm. A step of a row with L slots valid writes positions L..L+M, so nothing beyond L+M has ever
been written, and what such a write leaves behind the length lies in slots that later stand for L-R..L+M-R. A query at
position L or later sees positions L-window+1 and up. With

    R >= window + M                      so that L+M-R < L-window+1

those slots are outside every window, and the step's own write takes no slot that one of its queries still needs. One slot
less, and the last draft would overwrite the oldest token that the pending one sees. `check_window_slots` holds the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib

KeysValues = tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]


class Cache(struct.PyTreeNode):
    """Keys (normed and rotated) and values of layers 0..num_kv_layers-1; K and H may differ from layer to layer."""

    keys: tuple[Array, ...]  # per layer [B, K, S, H]
    values: tuple[Array, ...]  # per layer [B, K, S, H]
    lengths: Int[Array, " B"]  # tokens of each row whose K/V are in the cache, 0..S
    num_slots: int = struct.field(pytree_node=False)  # S; a layer with fewer is a ring

    @property
    def window_slots(self) -> int | None:
        """R; None where no layer is a ring."""
        fewest = min(keys.shape[2] for keys in self.keys)
        return fewest if fewest < self.num_slots else None

    def ring_positions(self, layers: Sequence[int]) -> dict[int, Int[Array, "B R"]]:
        """Position that each slot stands for, of those of these layers that are rings."""
        sizes = {layer: self.keys[layer].shape[2] for layer in layers}
        return {layer: ring_positions(size, self.lengths - 1) for layer, size in sizes.items() if size < self.num_slots}


class Span(NamedTuple):
    """Where T new tokens of each row go."""

    start: Int[Array, " B"]  # position of the first
    counts: Int[Array, " B"] | None  # how many of them are text, the rest being padding; None: all of them may be
    num_slots: int  # S of the cache


class View(NamedTuple):
    """What a layer attends to."""

    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S H"]
    positions: int | Int[Array, "B S"]  # of the slots, as `layers.visible` takes them


def check_window_slots(window: int, num_draft: int, window_slots: int) -> None:
    """Raise ConfigError unless rings of so many slots are exact for steps of num_draft drafts (see the top of the file)."""
    if window_slots < window + num_draft:
        rule = f"must be at least {window + num_draft}: a window of {window} and {num_draft} drafts"
        raise config_lib.ConfigError(f"window_slots={window_slots}: {rule}")


def slots_of(config: config_lib.BackboneConfig, layer: int, num_slots: int, window_slots: int | None) -> int:
    """Slots of one layer: R where it has a window and R is given and less than S, otherwise S."""
    ring = config.window(layer) is not None and window_slots is not None
    return min(window_slots, num_slots) if ring and window_slots is not None else num_slots


def empty(config: config_lib.BackboneConfig, batch: int, num_slots: int, window_slots: int | None = None) -> Cache:
    """A cache of zeros with lengths 0; layers with a window are rings of `window_slots` where that is less than `num_slots`."""

    def zeros() -> tuple[Array, ...]:
        sizes = [slots_of(config, layer, num_slots, window_slots) for layer in range(config.num_kv_layers)]
        shapes = [(batch, config.kv_heads_of(layer), size, config.head_dim_of(layer)) for layer, size in enumerate(sizes)]
        return tuple(jnp.zeros(shape, config.dtype) for shape in shapes)

    return Cache(keys=zeros(), values=zeros(), lengths=jnp.zeros((batch,), jnp.int32), num_slots=num_slots)


def ring_positions(window_slots: int, last: Int[Array, " B"]) -> Int[Array, "B R"]:
    """Position that each slot of a ring stands for when `last` is the newest; negative where a slot is still empty."""
    return last[:, None] - (last[:, None] - jnp.arange(window_slots)) % window_slots


def add(slots: KeysValues, new: KeysValues, span: Span, window: int | None) -> tuple[View, KeysValues]:
    """Add T tokens to a layer: what they attend to, and its slots from now on.

    A ring takes the tokens of a step in place. Of tokens that may be padding it keeps those that are text, and they attend to
    the ring as it was, followed by themselves: there may be more of them than the ring holds.
    """
    size, length = slots[0].shape[2], new[0].shape[2]
    if size == span.num_slots:
        slots = write(slots[0], new[0], span.start), write(slots[1], new[1], span.start)
        return View(*slots, size), slots
    assert window is not None
    if span.counts is None:
        check_window_slots(window, length - 1, size)
        slots = write_ring(slots[0], new[0], span.start), write_ring(slots[1], new[1], span.start)
        return View(*slots, ring_positions(size, span.start + length - 1)), slots
    check_window_slots(window, 0, size)
    positions = jnp.concatenate([ring_positions(size, span.start - 1), span.start[:, None] + jnp.arange(length)], axis=1)
    keys, values = (jnp.concatenate([old, added.astype(old.dtype)], axis=2) for old, added in zip(slots, new, strict=True))
    held = ring_positions(size, span.start + span.counts - 1)  # once the text is in
    ahead = held - span.start[:, None]  # of a slot that takes one of the new tokens: which
    taken = [jnp.take_along_axis(added, jnp.clip(ahead, 0, length - 1)[:, None, :, None], axis=2) for added in new]
    kept = [jnp.where((ahead >= 0)[:, None, :, None], take.astype(old.dtype), old) for take, old in zip(taken, slots, strict=True)]
    return View(keys, values, positions), (kept[0], kept[1])


def write(slots: Float[Array, "B K S H"], new: Float[Array, "B K T H"], start: Int[Array, " B"]) -> Float[Array, "B K S H"]:
    """Put `new` into slots start..start+T-1 of each row, in place when `slots` is donated or carried.

    The caller guarantees start + T <= S: a write that does not fit would be moved, silently, onto valid slots.
    """

    def one_row(row: Array, update: Array, begin: Array) -> Array:
        if update.shape[1] == 1 and row.shape[1] > 1:
            # XLA's CPU backend duplicates a write of one slot and copies the whole cache for it, four times a step;
            # writing two slots, of which one keeps its content, is done in place.
            begin, slot = jnp.minimum(begin, row.shape[1] - 2), begin
            pair = lax.dynamic_slice_in_dim(row, begin, 2, axis=1)
            update = jnp.where((begin + jnp.arange(2) == slot)[:, None], update, pair)
        return lax.dynamic_update_slice(row, update, (0, begin, 0))

    return jax.vmap(one_row)(slots, new.astype(slots.dtype), start)


def write_ring(slots: Float[Array, "B K R H"], new: Float[Array, "B K T H"], start: Int[Array, " B"]) -> Float[Array, "B K R H"]:
    """Put `new` into slots (start .. start+T-1) mod R of each row, in place as `write` does; T <= R.

    Two writes of T slots: one where the first token goes, moved back where it would pass the end, and one at slot 0. Each
    puts down the tokens that belong there, and what was there before elsewhere.
    """
    size, length = slots.shape[2], new.shape[2]
    if length == 1:
        return write(slots, new, start % size)

    def one_row(row: Array, update: Array, begin: Array) -> Array:
        at = jnp.minimum(begin, size - length)
        past = begin - at  # tokens that pass the end; token (j - past) mod T is the one for slot at + j, and for slot j
        update = jnp.roll(update, past, axis=1)
        before_end = (jnp.arange(length) >= past)[:, None]
        row = lax.dynamic_update_slice(row, jnp.where(before_end, update, lax.dynamic_slice_in_dim(row, at, length, axis=1)), (0, at, 0))
        return lax.dynamic_update_slice(row, jnp.where(before_end, row[:, :length], update), (0, 0, 0))

    return jax.vmap(one_row)(slots, new.astype(slots.dtype), start % size)


def has_shape(cache: Cache, config: config_lib.BackboneConfig, num_slots: int, window_slots: int | None) -> bool:
    """Whether `empty` would give a cache of this shape."""
    sizes = [slots_of(config, layer, num_slots, window_slots) for layer in range(config.num_kv_layers)]
    return cache.num_slots == num_slots and [keys.shape[2] for keys in cache.keys] == sizes


def grow(cache: Cache, config: config_lib.BackboneConfig, num_slots: int, window_slots: int | None = None) -> Cache:
    """The same text in a cache of the shape that `empty` would give it, with at least as many slots: a copy.

    A layer that is or becomes a ring keeps the positions that fit, among them all that the next query sees.
    """
    last = cache.lengths - 1

    def moved(layer: int, slots: Array) -> Array:
        old, size = slots.shape[2], slots_of(config, layer, num_slots, window_slots)
        if old == cache.num_slots and size == num_slots:
            return jnp.pad(slots, ((0, 0), (0, 0), (0, size - old), (0, 0))) if size > old else jnp.copy(slots)
        positions = ring_positions(size, last) if size < num_slots else jnp.broadcast_to(jnp.arange(size), (len(last), size))
        source = positions % old if old < cache.num_slots else jnp.clip(positions, 0, old - 1)
        return jnp.take_along_axis(slots, source[:, None, :, None], axis=2)  # of a position that was not held, another's: no one sees it

    def all_moved(layers: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(moved(layer, slots) for layer, slots in enumerate(layers))

    return Cache(keys=all_moved(cache.keys), values=all_moved(cache.values), lengths=jnp.copy(cache.lengths), num_slots=num_slots)
