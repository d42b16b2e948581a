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
        self.embed = nn.Embed(cfg.vocab_size, cfg.width, dtype=cfg.dtype, param_dtype=cfg.dtype)
        self.layers = [Layer(cfg, index, self.column_blocks) for index in range(cfg.num_layers)]
        self.final_norm = layers.RMSNorm(cfg.norm_eps)
        if not self.reads_table_as_unembedding:
            self.unembed = layers.Dense(cfg.vocab_size, self.column_blocks, cfg.dtype)

    @property
    def reads_table_as_unembedding(self) -> bool:
        """Tied embeddings, except in column blocks: there the unembedding is a tree entry of its own, in its own layout."""
        return self.config.tied_embeddings and not self.column_blocks

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
        raw = self.embed.attend(hidden) if self.reads_table_as_unembedding else self.unembed(hidden)
        return raw.astype(jnp.float32)


def unembedding_rows(params: dict[str, Any], config: config_lib.BackboneConfig, ids: Int[Array, " C"]) -> Float[Array, "C D"]:
    """Rows of the unembedding for the tokens `ids`, from parameters in the plain layout."""
    return params["embed"]["embedding"][ids] if config.tied_embeddings else params["unembed"]["kernel"].T[ids]


def to_column_blocks(params: dict[str, Any], config: config_lib.BackboneConfig) -> dict[str, Any]:
    """Parameters in the layout of `Backbone(config, column_blocks=True)`. The token table is shared, not copied."""
    blocked = {name: value for name, value in params.items() if name != "embed"}
    if config.tied_embeddings:
        blocked["unembed"] = {"kernel": params["embed"]["embedding"].T}
    return {**layers.to_column_blocks(blocked), "embed": params["embed"]}


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

        widths = {"q": cfg.num_heads * cfg.head_dim, "k": cfg.num_kv_heads * cfg.head_dim, "v": cfg.num_kv_heads * cfg.head_dim}
        q, k, v = [part.reshape(*x.shape[:2], -1, cfg.head_dim) for part in layers.joined_dense(x, widths, self.column_blocks, cfg.dtype)]
        q = layers.rotate(q, positions, cfg.rope_theta)
        k = layers.rotate(k, positions, cfg.rope_theta).swapaxes(1, 2)  # [B, K, T, H]
        v = v.swapaxes(1, 2)
        if slots is not None:
            k, v = cache_lib.write(slots[0], k, start), cache_lib.write(slots[1], v, start)
        mask = layers.visible(positions, k.shape[2], positions, cfg.window(self.index))
        mixed = layers.attend(q, k, v, mask)
        return layers.Dense(cfg.width, self.column_blocks, cfg.dtype, name="o")(mixed), (k, v)
