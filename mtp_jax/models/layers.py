"""Building blocks shared by the backbone and the head: dense, norm, rotary embedding, attention, gated MLP.

Numbers: norms, softmax and rotary angles are float32; matrix products run in the dtype of the parameters.

Column blocks. A kernel [in, out] may be stored as [out / c, in, c] ("column blocks", c = `COLUMN_BLOCK`). XLA's CPU
backend then multiplies 2..16 rows at nearly the cost of one, because each block stays in the innermost cache, and
every row's result is bit-identical whatever the number of rows: the property that makes verification exact to the
bit on CPU. The same values, another order; `to_column_blocks` converts a parameter tree.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

COLUMN_BLOCK = 16  # float32 values in one 64-byte cache line


class Dense(nn.Module):
    """y = x · kernel, without bias. The kernel is [in, out], or column blocks when `column_blocks` and 16 divides out."""

    features: int
    column_blocks: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        shape = kernel_shape(x.shape[-1], self.features, self.column_blocks)
        kernel = self.param("kernel", nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-2, out_axis=-1), shape, self.dtype)
        return matmul(x.astype(kernel.dtype), kernel)


def kernel_shape(inputs: int, outputs: int, column_blocks: bool) -> tuple[int, ...]:
    """Shape of a kernel in the plain or the column-block layout."""
    if column_blocks and outputs % COLUMN_BLOCK == 0:
        return (outputs // COLUMN_BLOCK, inputs, COLUMN_BLOCK)
    return (inputs, outputs)


def table_shape(rows: int, width: int, column_blocks: bool) -> tuple[int, ...]:
    """Shape of a token table [V, D]; in column blocks it is stored as the unembedding it also serves as, [V/c, D, c]."""
    blocked = kernel_shape(width, rows, column_blocks)
    return blocked if len(blocked) == 3 else (rows, width)


def matmul(x: Float[Array, "*rows in"], kernel: Array) -> Float[Array, "*rows out"]:
    """x [..., in] times a kernel in either layout -> [..., out]."""
    if kernel.ndim == 2:
        return x @ kernel
    rows = x.reshape(-1, x.shape[-1])
    blocks = jnp.broadcast_to(rows, (kernel.shape[0], *rows.shape))
    product = lax.dot_general(blocks, kernel, (((2,), (1,)), ((0,), (0,))))  # [out/c, rows, c]
    return product.swapaxes(0, 1).reshape(*x.shape[:-1], -1)


def to_column_blocks(kernel: Array) -> Array:
    """[in, out] -> [out/c, in, c] where c divides out; otherwise unchanged."""
    inputs, outputs = kernel.shape
    if outputs % COLUMN_BLOCK:
        return kernel
    return kernel.reshape(inputs, outputs // COLUMN_BLOCK, COLUMN_BLOCK).swapaxes(0, 1)


def tree_to_column_blocks(params: dict[str, Any]) -> dict[str, Any]:
    """Convert every `kernel` of a parameter tree, and the embedding table as the transposed unembedding it serves as."""

    def convert(path: tuple[Any, ...], leaf: Array) -> Array:
        name = path[-1].key
        if name == "kernel":
            return to_column_blocks(leaf)
        if name == "embedding":
            blocked = to_column_blocks(leaf.T)
            return blocked if blocked.ndim == 3 else leaf
        return leaf

    return jax.jit(lambda tree: jax.tree_util.tree_map_with_path(convert, tree))(params)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, in float32; the result has x's dtype. Zhang & Sennrich 2019."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale).astype(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    width: int
    hidden: int
    column_blocks: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = Dense(self.hidden, self.column_blocks, self.dtype, name="gate")(x)
        up = Dense(self.hidden, self.column_blocks, self.dtype, name="up")(x)
        return Dense(self.width, self.column_blocks, self.dtype, name="down")(nn.silu(gate) * up)


def rotate(x: Float[Array, "B T N H"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T N H"]:
    """Rotary position embedding, half-split pairs (i, i + H/2); angles in float32. Su et al. 2021."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies  # [B, T, 1, H/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def visible(last_slot: Int[Array, "B T"], num_slots: int, query_position: Int[Array, "B T"], window: int | None) -> Bool[Array, "B T S"]:
    """True where a query may look: slots 0..last_slot, and inside the window counted back from the query's position.

    Worked row: last_slot 4, query_position 5, window 3 -> slots 3 and 4 (position 5 itself is the third, and has no slot yet).
    """
    slots = jnp.arange(num_slots)
    mask = slots <= last_slot[..., None]
    if window is not None:
        mask &= slots > query_position[..., None] - window
    return mask


def attend(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T N*H"]:
    """Grouped-query attention over cached keys and values; scores scaled by H^-1/2, softmax in float32.

    A row that may see no slot at all gets zeros, not an average of what it may not see.
    """
    batch, length, num_heads, head_dim = queries.shape
    num_kv = keys.shape[1]
    grouped = queries.reshape(batch, length, num_kv, num_heads // num_kv, head_dim)
    grouped = jnp.einsum("BTKGH->BKGTH", grouped).reshape(batch, num_kv, -1, head_dim)  # [B, K, G*T, H]
    scores = jnp.einsum("BKRH,BKSH->BKRS", grouped, keys).astype(jnp.float32) * head_dim**-0.5
    scores = scores.reshape(batch, num_kv, -1, length, keys.shape[2])  # [B, K, G, T, S]
    probs = masked_softmax(scores, mask[:, None, None]).astype(values.dtype)
    out = jnp.einsum("BKRS,BKSH->BKRH", probs.reshape(batch, num_kv, -1, keys.shape[2]), values)
    out = out.reshape(batch, num_kv, -1, length, head_dim)
    return jnp.einsum("BKGTH->BTKGH", out).reshape(batch, length, num_heads * head_dim)


def masked_softmax(scores: Float[Array, "*rows S"], mask: Bool[Array, "*rows S"]) -> Float[Array, "*rows S"]:
    """Softmax over the visible entries of the last axis; exactly 0 elsewhere, and everywhere in a row that sees nothing."""
    lowest = jnp.finfo(scores.dtype).min
    probs = nn.softmax(jnp.where(mask, scores, lowest), axis=-1)
    return jnp.where(mask, probs, 0.0)
