"""Building blocks shared by the backbone and the head: dense, norm, rotary embedding, attention, gated MLP.

Numbers: norms, softmax and rotary angles are float32; matrix products run in the dtype of the parameters.

Column blocks. In the layout of the decode loop on CPU a kernel [in, out] is stored as [out / c, in, c] (c is at most
`COLUMN_BLOCK`), cut into a tuple of pieces, and kernels with the same input are joined (q, k and v; gate and up). XLA's
CPU backend then multiplies 2..16 rows at little more than the cost of one, because each block stays in the innermost
cache; the pieces are what keeps a second core busy; and every row's result is bit-identical whatever the number of rows:
on CPU, verification is exact to the bit. The same values, another order: `to_column_blocks` converts a parameter tree.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mtp_jax import config as config_lib


def _wide_vectors() -> bool:
    """Whether this processor has 512-bit vectors."""
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {})  # type: ignore[union-attr]
    return any(name.startswith(("AVX512", "X86_V4")) for name in (*simd.get("baseline", ()), *simd.get("found", ())))


# Columns of a block that the processor multiplies fastest, and rows up to which the loop uses blocks: beyond them the plain layout
# is faster, or narrow blocks get other last bits (experiments/LOG.md).
COLUMN_BLOCK, COLUMN_BLOCK_ROWS = (64, 48) if _wide_vectors() else (16, 16)
NARROWEST_BLOCK = 16  # float32 values in one 64-byte cache line
PIECE_COLUMNS = 3072  # widest product whose broadcast input still fits the outer cache
MIN_PIECES = 10  # XLA's CPU runtime gives work to a second core only when more than eight operations are ready
SMALL_BYTES = 1 << 20  # smaller kernels stay whole: handing out their pieces would cost more than it gains
JOINED = {"qkv": ("q", "k", "v"), "qk": ("q", "k"), "gate_up": ("gate", "up")}

Kernel = Array | tuple[Array, ...]


class Dense(nn.Module):
    """y = x · kernel (+ bias). The kernel is [in, out], or column blocks when `column_blocks`."""

    features: int
    column_blocks: bool = False
    dtype: Any = jnp.float32
    bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        plain = nn.initializers.variance_scaling(1.0, "fan_in", "normal")

        def init(key: Array) -> Kernel:
            kernel = plain(key, (x.shape[-1], self.features), self.dtype)
            return block_kernel(kernel) if self.column_blocks else kernel

        product = matmul(x.astype(self.dtype), self.param("kernel", init))
        return product + self.param("bias", nn.initializers.zeros, (self.features,), self.dtype) if self.bias else product


def matmul(x: Float[Array, "*rows in"], kernel: Kernel) -> Float[Array, "*rows out"]:
    """x [..., in] times a kernel in either layout -> [..., out]."""
    if not isinstance(kernel, tuple):
        return x @ kernel
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) == 1:
        # XLA generates code of its own for the product of a single row: other last bits, and seconds of compilation for all
        # pieces of a model. Two equal rows cost about the same and run the code that any other number of rows runs.
        return matmul(jnp.concatenate([rows, rows]), kernel)[:1].reshape(*x.shape[:-1], -1)
    products = [block_product(rows, piece) for piece in kernel]
    return jnp.concatenate(products).swapaxes(0, 1).reshape(*x.shape[:-1], -1)  # from [out/c, rows, c]


def block_product(rows: Float[Array, "R in"], piece: Array) -> Array:
    """[R, in] times one piece [blocks, in, c] of a kernel -> [blocks, R, c]."""
    return lax.dot_general(jnp.broadcast_to(rows, (len(piece), *rows.shape)), piece, (((2,), (1,)), ((0,), (0,))))


@partial(jax.jit, static_argnames=("width",))  # called kernel by kernel: a few shapes to compile, instead of one program with every layer in it
def block_kernel(kernel: Float[Array, "in out"], width: int = COLUMN_BLOCK) -> Kernel:
    """[in, out] -> pieces [blocks, in, c] that together hold out/c blocks; unchanged where not even the narrowest block divides out."""
    inputs, outputs = kernel.shape
    while outputs % width and width > NARROWEST_BLOCK:
        width //= 2
    if outputs % width:
        return kernel
    blocks = kernel.reshape(inputs, outputs // width, width).swapaxes(0, 1)
    size = piece_size(len(blocks), kernel.nbytes, width)
    return tuple(blocks[start : start + size] for start in range(0, len(blocks), size))


def piece_size(num_blocks: int, num_bytes: int, width: int) -> int:
    """Blocks in each piece of a kernel: all of a small one; of others, where possible, a divisor that gives MIN_PIECES to 2 * MIN_PIECES pieces."""
    if num_bytes < SMALL_BYTES:
        return num_blocks
    most = min(max(num_blocks // MIN_PIECES, 1), PIECE_COLUMNS // width)
    even = [size for size in range(most, most // 2, -1) if num_blocks % size == 0]
    return even[0] if even else most


def to_column_blocks(params: dict[str, Any]) -> dict[str, Any]:
    """A parameter tree (backbone or head) in the layout that modules with `column_blocks` expect."""

    def convert(tree: dict[str, Any]) -> dict[str, Any]:
        tree = dict(tree)
        for joined, parts in JOINED.items():
            if all(part in tree for part in parts):
                dense = [tree.pop(part) for part in parts]
                tree[joined] = {name: jnp.concatenate([part[name] for part in dense], axis=-1) for name in dense[0]}
        return {name: convert(value) if isinstance(value, dict) else (block_kernel(value) if name == "kernel" else value) for name, value in tree.items()}

    return convert(params)


def joined_dense(x: Float[Array, "*rows in"], widths: dict[str, int], column_blocks: bool, dtype: Any, bias: bool = False) -> list[Float[Array, "*rows out"]]:
    """Several products of one input, for use inside a compact module: one Dense each, or one joined Dense in column blocks."""
    if not column_blocks or len(widths) == 1:
        return [Dense(width, column_blocks, dtype, bias, name=name)(x) for name, width in widths.items()]
    (name,) = [joined for joined, parts in JOINED.items() if parts == tuple(widths)]
    product = Dense(sum(widths.values()), True, dtype, bias, name=name)(x)
    return jnp.split(product, [sum(list(widths.values())[:i]) for i in range(1, len(widths))], axis=-1)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, in float32; the result has x's dtype. Zhang & Sennrich 2019."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        return (unit_rms(x, self.epsilon) * scale).astype(x.dtype)


def unit_rms(x: Float[Array, "*rows D"], epsilon: float) -> Float[Array, "*rows D"]:
    """x / rms(x) over the last axis; float32."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    width: int
    hidden: int
    column_blocks: bool = False
    dtype: Any = jnp.float32
    activation: config_lib.Activation = "silu"
    bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = joined_dense(x, {"gate": self.hidden, "up": self.hidden}, self.column_blocks, self.dtype, self.bias)
        return Dense(self.width, self.column_blocks, self.dtype, self.bias, name="down")(activate(gate, self.activation) * up)


def activate(x: Float[Array, "*any"], activation: config_lib.Activation) -> Float[Array, "*any"]:
    """SiLU, or GELU in its tanh form."""
    return nn.silu(x) if activation == "silu" else nn.gelu(x, approximate=True)


def softcap(x: Float[Array, "*any"], cap: float | None) -> Float[Array, "*any"]:
    """cap * tanh(x / cap): near x where small, never beyond ±cap. None leaves x as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], theta: float, fraction: float = 1.0, scaling: config_lib.RopeScaling | None = None
) -> Float[Array, "B T N H"]:
    """Rotary position embedding, half-split pairs (i, i + H/2); angles in float32. Su et al. 2021.

    Args:
      x: queries or keys.
      positions: of each token.
      theta, fraction, scaling: see `rope_frequencies`.
    """
    half = x.shape[-1] // 2
    frequencies = rope_frequencies(half, theta, fraction, scaling)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies  # [B, T, 1, H/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rope_frequencies(half: int, theta: float, fraction: float = 1.0, scaling: config_lib.RopeScaling | None = None) -> Float[Array, " H/2"]:
    """Angle per position of each of `half` pairs: theta ** (-i / half), scaled; 0 for all but the first `fraction` of them.

    The exponent counts all pairs, turning or not: with a fraction of 1/4, pair 0 still turns by 1 and pair half/4 by none.
    """
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None:
        turns = scaling.original_positions * frequencies / (2 * jnp.pi)  # over the texts of the first training
        kept = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
        kept = jnp.clip(kept, 0.0, 1.0)
        frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
    turning = int(fraction * half)
    return frequencies if turning == half else frequencies * (jnp.arange(half) < turning)


def visible(last: Int[Array, "B T"], positions: int | Int[Array, "B S"], query_position: Int[Array, "B T"], window: int | None) -> Bool[Array, "B T S"]:
    """True where a query may look: positions 0..last, and inside the window counted back from the query's position.

    Worked row: last 4, query_position 5, window 3 -> positions 3 and 4 (position 5 itself is the third, and has no slot yet).

    Args:
      last: newest position each query may see.
      positions: of the slots, negative where a slot is empty; a number S says that slots 0..S-1 hold positions 0..S-1.
      query_position: that each query stands at.
      window: positions a query sees, its own included; None is all.
    """
    held = jnp.arange(positions) if isinstance(positions, int) else positions[:, None]
    mask = held <= last[..., None]
    if window is not None:
        mask &= held > query_position[..., None] - window
    return mask if isinstance(positions, int) else mask & (held >= 0)


def attend(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    scale: float | None = None,
    cap: float | None = None,
) -> Float[Array, "B T N*H"]:
    """Grouped-query attention over cached keys and values; softmax in float32.

    A row that may see no slot at all gets zeros, not an average of what it may not see.

    Args:
      queries, keys, values: normed and rotated as the model wants them.
      mask: True where a query may look.
      scale: factor of the scores; None is H^-1/2.
      cap: soft cap of the scaled scores.
    """
    batch, length, num_heads, head_dim = queries.shape
    num_kv = keys.shape[1]
    grouped = queries.reshape(batch, length, num_kv, num_heads // num_kv, head_dim)
    grouped = jnp.einsum("BTKGH->BKGTH", grouped).reshape(batch, num_kv, -1, head_dim)  # [B, K, G*T, H]
    scores = jnp.einsum("BKRH,BKSH->BKRS", grouped, keys).astype(jnp.float32) * (head_dim**-0.5 if scale is None else scale)
    scores = softcap(scores, cap)
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
