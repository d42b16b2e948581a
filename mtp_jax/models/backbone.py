"""The frozen decoder-only Transformer: grouped-query attention, rotary embedding, RMS norms, gated MLP.

One module for every family; what differs is data (see `BackboneConfig`). One layer, with every switch on:

    x = x + post_attn_norm(attention(attn_norm(x)))
    x = x + post_mlp_norm(mlp(mlp_norm(x)))
    x = x + norm(project(activation(gate(x)) * own_input))         the layer's own embedding of the token
    x = x * scalar

Two uses of one forward pass:
    with a cache     tokens go to slots lengths..lengths+T-1 and see the slots before them (prefill, verify);
    without          tokens are a whole sequence from position 0; the returned cache holds just their K/V (training).

With `taps`, what a pass hands over of each token is its state after the final norm and, behind it, the residual stream after so many
layers, side by side; logits come from the first alone.

Sources: Touvron et al. 2023 (Llama), Ainslie et al. 2023 (GQA), Yang et al. 2025 (Qwen 3), the technical reports of
Gemma 2 and 3, and for Gemma 4 the computation in transformers 5.24.
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

Slots = cache_lib.KeysValues | cache_lib.View | None  # of a layer: its own, or what the owner of its K/V attends to; None without a cache


class BackboneOutput(struct.PyTreeNode):
    """What one forward pass gives."""

    hidden: Float[Array, "B T E"]  # after the final norm, and after each tap: what the head reads
    logits: Float[Array, "B T V"] | None  # float32; None when not asked for
    cache: cache_lib.Cache  # K/V of these tokens added; `lengths` as it came in: committing is the caller's


class Backbone(nn.Module):
    """Transformer driven by its config. `column_blocks` selects the kernel layout (see layers.py).

    A tap of t is the residual stream after t layers, 1..num_layers, where layer t would take it up; no tap is the usual case.
    """

    config: config_lib.BackboneConfig
    column_blocks: bool = False
    taps: tuple[int, ...] = ()

    def setup(self) -> None:
        cfg = self.config
        self.embed = nn.Embed(cfg.vocab_size, cfg.width, dtype=cfg.dtype, param_dtype=cfg.dtype)
        self.layers = [Layer(cfg, index, self.column_blocks) for index in range(cfg.num_layers)]
        self.final_norm = layers.RMSNorm(cfg.norm_eps)
        if cfg.per_layer_input_width:
            self.layer_inputs = LayerInputs(cfg, self.column_blocks)
        if not self.reads_table_as_unembedding:
            self.unembed = layers.Dense(cfg.vocab_size, self.column_blocks, cfg.dtype)

    @property
    def reads_table_as_unembedding(self) -> bool:
        """Tied embeddings, except in column blocks: there the unembedding is a tree entry of its own, in its own layout."""
        return self.config.tied_embeddings and not self.column_blocks

    @property
    def hidden_width(self) -> int:
        """E."""
        return self.config.width * (1 + len(self.taps))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        cache: cache_lib.Cache | None = None,
        *,
        counts: Int[Array, " B"] | None = None,
        with_logits: bool = True,
        depth: int | None = None,
    ) -> BackboneOutput:
        """Run T tokens of each row.

        Args:
          tokens: token ids, 0..V-1.
          cache: K/V of the tokens before these; None when these are the first.
          counts: how many of each row's tokens are text, the rest being padding. Rings need to know, and without it take only
            as many tokens as they have slots beyond the window; other layers don't look at it.
          with_logits: False saves the product with the unembedding.
          depth: run so many of the first layers only, 1..num_layers, with a cache; slots of the others come back as they are. None runs all.
            Not together with taps.
        """
        cfg = self.config
        start = jnp.zeros(tokens.shape[:1], jnp.int32) if cache is None else cache.lengths
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        x = scale_embedding(self.embed(tokens), cfg.embedding_scale)
        own_inputs = self.layer_inputs(tokens, x) if cfg.per_layer_input_width else None  # [B, T, layers, width]
        span = cache_lib.Span(start, counts, tokens.shape[1] if cache is None else cache.num_slots)
        views: list[cache_lib.View] = []
        filled: list[cache_lib.KeysValues] = []
        tapped: dict[int, Array] = {}
        for index, layer in enumerate(self.layers[:depth]):
            if index < cfg.num_kv_layers:
                slots = None if cache is None else (cache.keys[index], cache.values[index])
            else:
                slots = views[cfg.kv_owner(index)]
            x, view, kv = layer(x, positions, slots, span, None if own_inputs is None else own_inputs[:, :, index])
            views.append(view)
            filled.append(kv)
            if index + 1 in self.taps:
                tapped[index + 1] = x
        hidden = self.final_norm(x)
        logits = self.logits(hidden) if with_logits or self.is_initializing() else None
        if self.taps:
            hidden = jnp.concatenate([hidden, *(tapped[tap] for tap in self.taps)], axis=-1)
        if depth is not None and cache is not None:
            filled += list(zip(cache.keys, cache.values, strict=True))[depth:]
        keys, values = zip(*filled[: cfg.num_kv_layers], strict=True)
        return BackboneOutput(hidden=hidden, logits=logits, cache=cache_lib.Cache(keys=keys, values=values, lengths=start, num_slots=span.num_slots))

    def logits(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Float32 logits of hidden states (after the final norm; taps behind it are not looked at)."""
        hidden = hidden[..., : self.config.width]
        raw = self.embed.attend(hidden) if self.reads_table_as_unembedding else self.unembed(hidden)
        return layers.softcap(raw.astype(jnp.float32), self.config.final_softcap)


def scale_embedding(rows: Float[Array, "*any D"], scale: float) -> Float[Array, "*any D"]:
    """Rows of a token table times `scale`, which is first rounded to their dtype, as the models were trained: in bfloat16
    the square root of 3072, 55.43, is 55.5."""
    return rows if scale == 1.0 else rows * jnp.asarray(scale, rows.dtype)


def unembedding_rows(params: dict[str, Any], config: config_lib.BackboneConfig, ids: Int[Array, " C"]) -> Float[Array, "C D"]:
    """Rows of the unembedding for the tokens `ids`, from parameters in the plain layout. The final soft cap is not in them."""
    return params["embed"]["embedding"][ids] if config.tied_embeddings else params["unembed"]["kernel"].T[ids]


def in_column_blocks(params: dict[str, Any]) -> bool:
    """Whether `to_column_blocks` has made these parameters."""
    return "q" not in params["layers_0"]["attn"]


def to_column_blocks(params: dict[str, Any], config: config_lib.BackboneConfig) -> dict[str, Any]:
    """Parameters in the layout of `Backbone(config, column_blocks=True)`. The token tables are shared, not copied."""
    blocked = {name: value for name, value in params.items() if name not in ("embed", "layer_inputs")}
    if config.tied_embeddings:
        blocked["unembed"] = {"kernel": params["embed"]["embedding"].T}
    blocked = {**layers.to_column_blocks(blocked), "embed": params["embed"]}
    if config.per_layer_input_width:
        inputs = params["layer_inputs"]
        rest = layers.to_column_blocks({name: value for name, value in inputs.items() if name != "embed"})
        blocked["layer_inputs"] = {**rest, "embed": inputs["embed"]}
    return blocked


class LayerInputs(nn.Module):
    """Every layer's own input: an embedding of the token, mixed with a projection of the model's embedding."""

    config: config_lib.BackboneConfig
    column_blocks: bool

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"], embedded: Float[Array, "B T D"]) -> Float[Array, "B T layers width"]:
        cfg = self.config
        shape = (*tokens.shape, cfg.num_layers, cfg.per_layer_input_width)
        total = cfg.num_layers * cfg.per_layer_input_width
        table = nn.Embed(cfg.per_layer_vocab_size or cfg.vocab_size, total, dtype=cfg.dtype, param_dtype=cfg.dtype, name="embed")
        own = scale_embedding(table(tokens), cfg.per_layer_input_width**0.5).reshape(shape)
        projected = layers.Dense(total, self.column_blocks, cfg.dtype, name="project")(embedded).reshape(shape)
        projected = layers.RMSNorm(cfg.norm_eps, name="norm")(projected.astype(jnp.float32) * cfg.width**-0.5)
        return ((projected + own) * 2**-0.5).astype(cfg.dtype)


class Layer(nn.Module):
    """One layer of the Transformer (see the top of the file); which of its parts are there is the config's to say."""

    config: config_lib.BackboneConfig
    index: int
    column_blocks: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], slots: Slots, span: cache_lib.Span, own_input: Array | None
    ) -> tuple[Array, cache_lib.View, cache_lib.KeysValues]:
        cfg = self.config
        mixed, view, kv = Attention(cfg, self.index, self.column_blocks, name="attn")(self._norm("attn_norm", x), positions, slots, span)
        x = x + (self._norm("post_attn_norm", mixed) if cfg.sandwich_norms else mixed)
        mlp = layers.GatedMLP(cfg.width, cfg.mlp_width_of(self.index), self.column_blocks, cfg.dtype, cfg.activation, cfg.mlp_bias, name="mlp")
        mapped = mlp(self._norm("mlp_norm", x))
        x = x + (self._norm("post_mlp_norm", mapped) if cfg.sandwich_norms else mapped)
        if own_input is not None:
            x = x + self._norm("own_input_norm", self._take_in(x, own_input))
        if cfg.layer_scalars:
            x = x * self.param("scalar", nn.initializers.ones, (1,), cfg.dtype)
        return x, view, kv

    def _norm(self, name: str, x: Array) -> Array:
        return layers.RMSNorm(self.config.norm_eps, name=name)(x)

    def _take_in(self, x: Float[Array, "B T D"], own_input: Float[Array, "B T width"]) -> Float[Array, "B T D"]:
        cfg = self.config
        gate = layers.Dense(cfg.per_layer_input_width, self.column_blocks, cfg.dtype, name="own_input_gate")(x)
        gated = layers.activate(gate, cfg.activation) * own_input
        return layers.Dense(cfg.width, self.column_blocks, cfg.dtype, name="own_input_project")(gated)


class Attention(nn.Module):
    """Causal grouped-query self-attention.

    A layer that owns its K/V adds them to its slots when there are any; another attends to what its owner attends to.
    """

    config: config_lib.BackboneConfig
    index: int
    column_blocks: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], slots: Slots, span: cache_lib.Span
    ) -> tuple[Array, cache_lib.View, cache_lib.KeysValues]:
        cfg = self.config
        q, *kv = self._heads(x)
        q = layers.rotate(self._norm("q_norm", q), positions, *cfg.rope(self.index))
        window = cfg.window(self.index)
        if isinstance(slots, cache_lib.View):
            view, kept = slots, (slots.keys, slots.values)
        else:
            kept = self._keys_values(kv, positions)
            view = cache_lib.View(*kept, x.shape[1])
            if slots is not None:
                view, kept = cache_lib.add(slots, kept, span, window)
        mask = layers.visible(positions, view.positions, positions, window)
        mixed = layers.attend(q, view.keys, view.values, mask, cfg.attention_scale_of(self.index), cfg.attention_softcap)
        return layers.Dense(cfg.width, self.column_blocks, cfg.dtype, cfg.output_bias, name="o")(mixed), view, kept

    def _heads(self, x: Float[Array, "B T D"]) -> list[Float[Array, "B T heads H"]]:
        """Queries, and where this layer has such products keys and values."""
        cfg = self.config
        head_dim, kv_heads = cfg.head_dim_of(self.index), cfg.kv_heads_of(self.index)
        widths = {"q": cfg.num_heads * head_dim}
        if cfg.kv_owner(self.index) == self.index:
            widths["k"] = kv_heads * head_dim
            if not cfg.values_are_keys(self.index):
                widths["v"] = kv_heads * head_dim
        parts = layers.joined_dense(x, widths, self.column_blocks, cfg.dtype, cfg.attention_bias)
        return [part.reshape(*x.shape[:2], -1, head_dim) for part in parts]

    def _keys_values(self, products: list[Float[Array, "B T K H"]], positions: Int[Array, "B T"]) -> cache_lib.KeysValues:
        """Keys, normed and rotated, and values, as the cache holds them: [B, K, T, H]."""
        cfg = self.config
        k, v = products[0], products[-1]  # one and the same product where values are keys
        k = layers.rotate(self._norm("k_norm", k), positions, *cfg.rope(self.index))
        if cfg.v_norm:
            v = layers.unit_rms(v, cfg.norm_eps).astype(v.dtype)
        return k.swapaxes(1, 2), v.swapaxes(1, 2)

    def _norm(self, name: str, heads: Float[Array, "B T heads H"]) -> Float[Array, "B T heads H"]:
        return layers.RMSNorm(self.config.norm_eps, name=name)(heads) if self.config.qk_norm else heads
