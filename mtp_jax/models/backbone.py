"""The frozen decoder-only Transformer (Llama family: pre-norm, grouped-query attention, rotary embedding, gated MLP).

Two uses of one forward pass:
    with a cache     tokens go to slots lengths..lengths+T-1 and see the slots before them (prefill, verify);
    without          tokens are a whole sequence from position 0; the returned cache holds just their K/V (training).

Source: Touvron et al. 2023 (Llama), Ainslie et al. 2023 (GQA).
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib
from mtp_jax.models import cache as cache_lib
from mtp_jax.models import layers


class BackboneOutput(struct.PyTreeNode):
    """What one forward pass gives."""

    hidden: Float[Array, "B T D"]  # after the final norm: what the head reads
    logits: Float[Array, "B T V"] | None  # float32; None when not asked for
    cache: cache_lib.Cache  # K/V of these tokens added; `lengths` as it came in: committing is the caller's


class Backbone(nn.Module):
    """Transformer driven by its config. `column_blocks` selects the kernel layout (see layers.py)."""

    config: config_lib.BackboneConfig
    column_blocks: bool = False

    def setup(self) -> None:
        cfg = self.config
        self.embed = Embedding(cfg.vocab_size, cfg.width, self.column_blocks, cfg.dtype)
        self.layers = [Layer(cfg, index, self.column_blocks) for index in range(cfg.num_layers)]
        self.final_norm = layers.RMSNorm(cfg.norm_eps)
        if not cfg.tied_embeddings:
            self.unembed = layers.Dense(cfg.vocab_size, self.column_blocks, cfg.dtype)

    def __call__(self, tokens: Int[Array, "B T"], cache: cache_lib.Cache | None = None, *, with_logits: bool = True) -> BackboneOutput:
        """Run T tokens of each row.

        Args:
          tokens: token ids, 0..V-1.
          cache: K/V of the tokens before these; None when these are the first.
          with_logits: False saves the product with the unembedding.
        """
        start = jnp.zeros(tokens.shape[:1], jnp.int32) if cache is None else cache.lengths
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        x = self.embed(tokens)
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            slots = None if cache is None else (cache.keys[index], cache.values[index])
            x, (k, v) = layer(x, positions, slots, start)
            keys.append(k)
            values.append(v)
        hidden = self.final_norm(x)
        logits = self.logits(hidden) if with_logits or self.is_initializing() else None
        return BackboneOutput(hidden=hidden, logits=logits, cache=cache_lib.Cache(keys=tuple(keys), values=tuple(values), lengths=start))

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits of hidden states (after the final norm)."""
        raw = self.embed.unembed(hidden) if self.config.tied_embeddings else self.unembed(hidden)
        return raw.astype(jnp.float32)


class Embedding(nn.Module):
    """The token table [V, D]; in the column-block layout it is stored as its own unembedding [V/c, D, c]."""

    vocab_size: int
    width: int
    column_blocks: bool
    dtype: Any

    def setup(self) -> None:
        shape = layers.table_shape(self.vocab_size, self.width, self.column_blocks)
        self.embedding = self.param("embedding", nn.initializers.normal(0.02), shape, self.dtype)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return embed(self.embedding, tokens)

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        kernel = self.embedding.T if self.embedding.ndim == 2 else self.embedding
        return layers.matmul(hidden.astype(kernel.dtype), kernel)


def embed(table: Array, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
    """Rows of a token table in either layout."""
    if table.ndim == 3:
        return table[tokens // layers.COLUMN_BLOCK, :, tokens % layers.COLUMN_BLOCK]
    return table[tokens]


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: config_lib.BackboneConfig
    index: int
    column_blocks: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], slots: tuple[Array, Array] | None, start: Int[Array, " B"]
    ) -> tuple[Array, tuple[Array, Array]]:
        cfg = self.config
        normed = layers.RMSNorm(cfg.norm_eps, name="attn_norm")(x)
        mixed, slots = Attention(cfg, self.index, self.column_blocks, name="attn")(normed, positions, slots, start)
        x = x + mixed
        normed = layers.RMSNorm(cfg.norm_eps, name="mlp_norm")(x)
        return x + layers.GatedMLP(cfg.width, cfg.mlp_width, self.column_blocks, cfg.dtype, name="mlp")(normed), slots


class Attention(nn.Module):
    """Causal grouped-query self-attention; writes its K/V into `slots` when there are any."""

    config: config_lib.BackboneConfig
    index: int
    column_blocks: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], slots: tuple[Array, Array] | None, start: Int[Array, " B"]
    ) -> tuple[Array, tuple[Array, Array]]:
        cfg = self.config

        def project(name: str, heads: int) -> Float[Array, "B T heads H"]:
            return layers.Dense(heads * cfg.head_dim, self.column_blocks, cfg.dtype, name=name)(x).reshape(*x.shape[:2], heads, cfg.head_dim)

        q = layers.rotate(project("q", cfg.num_heads), positions, cfg.rope_theta)
        k = layers.rotate(project("k", cfg.num_kv_heads), positions, cfg.rope_theta).swapaxes(1, 2)  # [B, K, T, H]
        v = project("v", cfg.num_kv_heads).swapaxes(1, 2)
        if slots is not None:
            k, v = cache_lib.write(slots[0], k, start), cache_lib.write(slots[1], v, start)
        mask = layers.visible(positions, k.shape[2], positions, cfg.window(self.index))
        mixed = layers.attend(q, k, v, mask)
        return layers.Dense(cfg.width, self.column_blocks, cfg.dtype, name="o")(mixed), (k, v)
