"""Building blocks shared by the backbone and the head: dense, norm, rotary embedding, attention, gated MLP.

Numbers: norms, softmax and rotary angles are float32; matrix products run in the dtype of the parameters.

Column blocks. In the layout of the decode loop on CPU a kernel [in, out] is stored as [out / c, in, c] (c =
`COLUMN_BLOCK`), a very wide one as a tuple of such pieces, and kernels with the same input are joined (q, k and v; gate
and up). XLA's CPU backend then multiplies 2..16 rows at little more than the cost of one, because each block stays in
the innermost cache, and every row's result is bit-identical whatever the number of rows: on CPU, verification is exact
to the bit. The same values, another order: `to_column_blocks` converts a parameter tree.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

COLUMN_BLOCK = 16  # float32 values in one 64-byte cache line
COLUMN_BLOCK_ROWS = 16  # beyond so many rows the plain layout is faster
PIECE_COLUMNS = 3072  # widest product whose broadcast input still fits the outer cache
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}

Kernel = Array | tuple[Array, ...]


class Dense(nn.Module):
    """y = x · kernel, without bias. The kernel is [in, out], or column blocks when `column_blocks`."""

    features: int
    column_blocks: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        plain = nn.initializers.variance_scaling(1.0, "fan_in", "normal")

        def init(key: Array) -> Kernel:
            kernel = plain(key, (x.shape[-1], self.features), self.dtype)
            return block_kernel(kernel) if self.column_blocks else kernel

        return matmul(x.astype(self.dtype), self.param("kernel", init))


def matmul(x: Float[Array, "*rows in"], kernel: Kernel) -> Float[Array, "*rows out"]:
    """x [..., in] times a kernel in either layout -> [..., out]."""
    if isinstance(kernel, tuple):
        return jnp.concatenate([matmul(x, piece) for piece in kernel], axis=-1)
    if kernel.ndim == 2:
        return x @ kernel
    rows = x.reshape(-1, x.shape[-1])
    blocks = jnp.broadcast_to(rows, (kernel.shape[0], *rows.shape))
    product = lax.dot_general(blocks, kernel, (((2,), (1,)), ((0,), (0,))))  # [out/c, rows, c]
    return product.swapaxes(0, 1).reshape(*x.shape[:-1], -1)


def block_kernel(kernel: Float[Array, "in out"]) -> Kernel:
    """[in, out] -> [out/c, in, c], in pieces where it is wide; unchanged where c does not divide out."""
    inputs, outputs = kernel.shape
    if outputs % COLUMN_BLOCK:
        return kernel
    blocks = kernel.reshape(inputs, outputs // COLUMN_BLOCK, COLUMN_BLOCK).swapaxes(0, 1)
    per_piece = PIECE_COLUMNS // COLUMN_BLOCK
    if len(blocks) <= per_piece:
        return blocks
    return tuple(blocks[start : start + per_piece] for start in range(0, len(blocks), per_piece))


def to_column_blocks(params: dict[str, Any]) -> dict[str, Any]:
    """A parameter tree (backbone or head) in the layout that modules with `column_blocks` expect."""

    def convert(tree: dict[str, Any]) -> dict[str, Any]:
        tree = dict(tree)
        for joined, parts in JOINED.items():
            if all(part in tree for part in parts):
                tree[joined] = {"kernel": jnp.concatenate([tree.pop(part)["kernel"] for part in parts], axis=1)}
        return {name: convert(value) if isinstance(value, dict) else (block_kernel(value) if name == "kernel" else value) for name, value in tree.items()}

    return jax.jit(convert)(params)


def joined_dense(x: Float[Array, "*rows in"], widths: dict[str, int], column_blocks: bool, dtype: Any) -> list[Float[Array, "*rows out"]]:
    """Several products of one input, for use inside a compact module: one Dense each, or one joined Dense in column blocks."""
    if not column_blocks:
        return [Dense(width, False, dtype, name=name)(x) for name, width in widths.items()]
    (name,) = [joined for joined, parts in JOINED.items() if parts == tuple(widths)]
    product = Dense(sum(widths.values()), True, dtype, name=name)(x)
    return jnp.split(product, [sum(list(widths.values())[:i]) for i in range(1, len(widths))], axis=-1)


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
        gate, up = joined_dense(x, {"gate": self.hidden, "up": self.hidden}, self.column_blocks, self.dtype)
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
