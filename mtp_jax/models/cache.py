"""The KV cache: two arrays for each layer that owns its K/V, filled by the backbone, read in place by the head.

The cache is an argument and a result, never module state: it rides in the decode loop's carry and is rolled back by
lengths alone. Slot s of a row holds the key and value of that row's token s, so slot and position are the same number.

Slots at or beyond `lengths` hold leftovers of rejected drafts. They are never read: every mask ends at the length,
and the next write covers them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib


class Cache(struct.PyTreeNode):
    """Keys (normed and rotated) and values of layers 0..num_kv_layers-1; K and H may differ from layer to layer."""

    keys: tuple[Array, ...]  # per layer [B, K, S, H]
    values: tuple[Array, ...]  # per layer [B, K, S, H]
    lengths: Int[Array, " B"]  # valid slots of each row, 0..S

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[2]


def empty(config: config_lib.BackboneConfig, batch: int, num_slots: int) -> Cache:
    """A cache of zeros with lengths 0."""

    def zeros() -> tuple[Array, ...]:
        shapes = [(batch, config.kv_heads_of(layer), num_slots, config.head_dim_of(layer)) for layer in range(config.num_kv_layers)]
        return tuple(jnp.zeros(shape, config.dtype) for shape in shapes)

    return Cache(keys=zeros(), values=zeros(), lengths=jnp.zeros((batch,), jnp.int32))


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


def grow(cache: Cache, num_slots: int) -> Cache:
    """The same cache with empty slots added at the end, `num_slots` in all: a copy."""

    def wider(slots: Array) -> Array:
        return jnp.pad(slots, ((0, 0), (0, 0), (0, num_slots - cache.num_slots), (0, 0)))

    return cache.replace(keys=tuple(map(wider, cache.keys)), values=tuple(map(wider, cache.values)))
