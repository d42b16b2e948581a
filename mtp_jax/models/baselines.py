"""Draft models to compare the MTP head with. None of them reads the backbone's K/V; what they keep instead is their own.

Pair t of a text is (x_{t+1}, h_t): a token, and the backbone's state (after its final norm) that it was chosen from. Slots 0..p valid and
x_{p+1} pending, draft step k takes pair p+k-1, with the draft before and the model's own hidden state from k = 2 on:

    eagle       x = pre [embed; h]                      h' = features = layer(x)              Li et al. 2024 (EAGLE-1), arXiv 2401.15077
    eagle3      x = h                                   h' = layer(x), features = norm(h')    Li et al. 2025 (EAGLE-3), arXiv 2503.01840
    deepseek    x = pre [norm(h); norm(embed)]          h' = layer(x), features = norm(h')    DeepSeek-V3, arXiv 2412.19437, section 2.2
    own_cache   the MTP head of head.py with norms at its inputs, but over K/V made from its own pre [norm(embed); norm(h)] at every true pair
    medusa      features of step k = h_p + silu(heads_k h_p): no token, no layer              Cai et al. 2024, arXiv 2401.10774
    standalone  a small Llama with its own token table, tied: it reads x_0..x_{p+1} and no h  Leviathan et al. 2023, arXiv 2211.17192

    eagle3 reads no last state: its h_t is fuse [low; middle; high], of the residual stream after three numbers of layers, the taps. Its layer
    attends with [norm(embed); norm(x)], twice as wide as x, which alone goes on as the residual. By default the taps are what layers 2, L // 2
    and L - 3 of the backbone's L take in, counted from 0, as in the authors' code.

    logits = features · draft rows of the backbone's unembedding, which is frozen (standalone: · those of its own table)

The layer of eagle, eagle3 and deepseek attends to the true pairs 0..p and to the drafted ones up to its own, each at its own position. The queries
of own_cache stand at p+1 and see the true pairs 0..p in every step, as those of the MTP head see the backbone's slots. K and V of a pair
follow from the pair alone, as there is one layer: a prompt costs no attention, and when drafts are kept, theirs are made anew from the
backbone's states.

Deviations: EAGLE's published code leaves out the first norm of its layer and has a bias in `pre`; EAGLE-3 learns unembedding
rows of its own for the draft vocabulary; DeepSeek's main model hands over its state before the final norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mtp_jax import config as config_lib
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache as cache_lib
from mtp_jax.models import head as head_lib
from mtp_jax.models import layers


class Drafted(struct.PyTreeNode):
    """K/V of the pairs that the draft steps of each row have taken so far; that of step k is entry k - 1. The first of them is a true pair."""

    keys: Float[Array, "B T K M H"]
    values: Float[Array, "B T K M H"]


class PairHead(nn.Module):
    """EAGLE, EAGLE-3 and the DeepSeek-V3 module: one decoder layer over pairs.

    `hidden` of a true pair is what `true_hidden` makes of the backbone's states.
    """

    config: config_lib.BaselineConfig
    backbone: config_lib.BackboneConfig
    column_blocks: bool = False

    def setup(self) -> None:
        cfg, dtype = self.config, self.backbone.dtype
        dense = partial(layers.Dense, column_blocks=self.column_blocks, dtype=dtype)
        norm = partial(layers.RMSNorm, cfg.norm_eps)
        if cfg.kind != "eagle":
            self.hidden_norm, self.embed_norm, self.norm = norm(), norm(), norm()
        if cfg.kind == "eagle3":
            self.fuse = dense(cfg.width)
        else:
            self.pre, self.attn_norm = dense(cfg.width), norm()
        self.mlp_norm = norm()
        self.q = dense(cfg.num_heads * cfg.head_dim)
        self.own_k, self.own_v = dense(cfg.num_kv_heads * cfg.head_dim), dense(cfg.num_kv_heads * cfg.head_dim)
        self.o = dense(cfg.width)
        self.mlp = layers.GatedMLP(cfg.width, cfg.mlp_width, self.column_blocks, dtype, self.backbone.activation)

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        keys: Float[Array, "B K S H"],
        values: Float[Array, "B K S H"],
        last_slot: Int[Array, "B T"],
        drafted: Drafted,
        k: int | Int[Array, ""],
        unembedding: layers.Kernel,
    ) -> tuple[head_lib.HeadOutput, Drafted]:
        """Draft step k (from 1) of each row.

        Args:
          embedded: row of the backbone's token table for the newest token of the row (pending, or the previous draft), as stored.
          hidden: that of the true pair p in the first step, later the model's own `hidden`.
          keys, values: of the true pairs, pair t in slot t. Slots 0..p-1 are read.
          last_slot: p of each row, the same in every step.
          drafted: what the step before returned; at first `no_drafts`.
          unembedding: the backbone's unembedding cut to the draft vocabulary.
        """
        if self.is_initializing() and self.config.taps:
            self.fuse_taps(jnp.zeros((1, 1, len(self.config.taps) * self.backbone.width), self.backbone.dtype))
        x, n = self._inputs(embedded, hidden)
        positions = last_slot + k - 1
        added = [kv.swapaxes(1, 2)[:, :, :, None] for kv in self._keys_values(n, positions)]  # [B, T, K, 1, H]
        kept = [
            lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), k - 1, axis=3) for old, new in zip((drafted.keys, drafted.values), added, strict=True)
        ]
        drafted = Drafted(*kept)
        queries = layers.rotate(self._heads(self.q(n)), positions, *_rope(self.backbone))
        before = layers.visible(last_slot - 1, keys.shape[2], last_slot, None)
        x = x + self.o(attend(queries, keys, values, before, drafted, jnp.arange(drafted.keys.shape[3]) < k))
        x = x + self.mlp(self.mlp_norm(x))
        features = x if self.config.kind == "eagle" else self.norm(x)
        logits = layers.matmul(features, unembedding).astype(jnp.float32)
        return head_lib.HeadOutput(logits=logits, hidden=x, features=features, copy=None, gate=None), drafted

    def keys_values(self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> cache_lib.KeysValues:
        """K and V of true pairs, as their slots hold them: [B, K, T, H]."""
        return self._keys_values(self._inputs(embedded, hidden)[1], positions)

    def fuse_taps(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T W"]:
        """One state of the taps, which are last in `hidden`."""
        return self.fuse(hidden[..., -len(self.config.taps) * self.backbone.width :])

    def _inputs(self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"]) -> tuple[Float[Array, "B T W"], Float[Array, "B T A"]]:
        """The residual stream, and what attention makes queries, keys and values of: A is W, of eagle3 2 W."""
        embedded = backbone_lib.scale_embedding(embedded, self.backbone.embedding_scale)
        hidden = hidden.astype(embedded.dtype)
        if self.config.kind == "eagle3":
            return hidden, jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        parts = [self.hidden_norm(hidden), self.embed_norm(embedded)] if self.config.kind == "deepseek" else [embedded, hidden]
        x = self.pre(jnp.concatenate(parts, axis=-1))
        return x, self.attn_norm(x)

    def _keys_values(self, n: Float[Array, "B T A"], positions: Int[Array, "B T"]) -> cache_lib.KeysValues:
        keys = layers.rotate(self._heads(self.own_k(n)), positions, *_rope(self.backbone))
        return keys.swapaxes(1, 2), self._heads(self.own_v(n)).swapaxes(1, 2)

    def _heads(self, x: Float[Array, "B T NH"]) -> Float[Array, "B T N H"]:
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)


def _rope(backbone: config_lib.BackboneConfig) -> config_lib.Rope:
    return config_lib.Rope(backbone.rope_theta, scaling=backbone.rope_scaling)


def no_drafts(config: config_lib.BaselineConfig, batch: int, rows: int, num_draft: int, dtype: Any) -> Drafted:
    """Room for num_draft steps of [B, T] rows."""
    empty = jnp.zeros((batch, rows, config.num_kv_heads, num_draft, config.head_dim), dtype)
    return Drafted(keys=empty, values=empty)


def attend(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    drafted: Drafted,
    taken: Bool[Array, " M"],
) -> Float[Array, "B T N*H"]:
    """`layers.attend` over slots that all rows share, where `mask` is True, together with each row's own drafted pairs, where `taken` is."""
    batch, length, num_heads, head_dim = queries.shape
    num_kv, slots = keys.shape[1:3]
    grouped = queries.reshape(batch, length, num_kv, num_heads // num_kv, head_dim)
    rows = jnp.einsum("BTKGH->BKGTH", grouped).reshape(batch, num_kv, -1, head_dim)
    shared = jnp.einsum("BKRH,BKSH->BKRS", rows, keys).reshape(batch, num_kv, -1, length, slots)
    own = jnp.einsum("BTKGH,BTKMH->BKGTM", grouped, drafted.keys)
    scores = jnp.concatenate([shared, own], axis=-1).astype(jnp.float32) * head_dim**-0.5
    seen = jnp.concatenate([mask, jnp.broadcast_to(taken, (batch, length, len(taken)))], axis=-1)
    probs = layers.masked_softmax(scores, seen[:, None, None]).astype(values.dtype)
    out = jnp.einsum("BKRS,BKSH->BKRH", probs[..., :slots].reshape(batch, num_kv, -1, slots), values).reshape(batch, num_kv, -1, length, head_dim)
    out = out + jnp.einsum("BKGTM,BTKMH->BKGTH", probs[..., slots:], drafted.values)
    return jnp.einsum("BKGTH->BTKGH", out).reshape(batch, length, num_heads * head_dim)


@dataclass(frozen=True)
class OwnCacheHead:
    """The MTP head of one layer over K/V of its own: its parameters are those of `head`, and the kernels own_k and own_v."""

    config: config_lib.BaselineConfig
    backbone: config_lib.BackboneConfig
    column_blocks: bool = False

    @property
    def head(self) -> head_lib.Head:
        """The head; the own K/V are to it what layer 0 of a backbone of one layer would have."""
        cfg, bb = self.config, self.backbone
        head = config_lib.HeadConfig(
            donors=(0,),
            width=cfg.width,
            mlp_width=cfg.mlp_width,
            num_heads=cfg.num_heads,
            draft_vocab_size=cfg.draft_vocab_size,
            backbone_width=cfg.backbone_width,
            backbone_vocab_size=cfg.backbone_vocab_size,
            backbone_layers=1,
            pointer=cfg.pointer_heads > 0,
            pointer_heads=max(cfg.pointer_heads, 1),
            norm_eps=cfg.norm_eps,
            input_norms=True,
        )
        donor = config_lib.BackboneConfig(
            vocab_size=bb.vocab_size,
            width=bb.width,
            mlp_width=bb.mlp_width,
            num_layers=1,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            rope_theta=bb.rope_theta,
            rope_scaling=bb.rope_scaling,
            embedding_scale=bb.embedding_scale,
            activation=bb.activation,
            dtype=bb.dtype,
        )
        return head_lib.Head(head, donor, self.column_blocks)

    def keys_values(self, params: Any, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> cache_lib.KeysValues:
        """K and V of true pairs, from what the head's layer makes its queries of: [B, K, T, H]."""
        cfg = self.config
        embedded = backbone_lib.scale_embedding(embedded, self.backbone.embedding_scale)

        def norm(name: str, x: Array) -> Array:
            return (layers.unit_rms(x, cfg.norm_eps) * params[name]["scale"]).astype(x.dtype)

        inputs = [norm("token_norm", embedded), norm("hidden_norm", hidden.astype(embedded.dtype))]
        n = norm("layers_0_attn_norm", layers.matmul(jnp.concatenate(inputs, axis=-1), params["pre"]["kernel"]))
        keys, values = (layers.matmul(n, params[name]["kernel"]).reshape(*n.shape[:2], -1, cfg.head_dim) for name in ("own_k", "own_v"))
        return layers.rotate(keys, positions, *_rope(self.backbone)).swapaxes(1, 2), values.swapaxes(1, 2)


def true_hidden(model: PairHead, params: Any, hidden: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
    """What true pairs have of the backbone's states: the states as they are, or the taps, fused."""
    if not model.config.taps:
        return hidden
    fused: Any = model.apply({"params": params}, hidden, method="fuse_taps")
    return fused


def keys_values(
    model: PairHead | OwnCacheHead, params: Any, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T E"], positions: Int[Array, "B T"]
) -> cache_lib.KeysValues:
    """K and V [B, K, T, H] of the true pairs at `positions`, of either kind of model that keeps them, from the backbone's states."""
    if isinstance(model, OwnCacheHead):
        return model.keys_values(params, embedded, hidden, positions)
    made: Any = model.apply({"params": params}, embedded, true_hidden(model, params, hidden), positions, method="keys_values")
    return made


class Medusa(nn.Module):
    """M heads on one hidden state. Their kernels lie side by side: one product for all."""

    config: config_lib.BaselineConfig
    backbone: config_lib.BackboneConfig
    column_blocks: bool = False

    @nn.compact
    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T M D"]:
        """Features of every head."""
        width, count = self.backbone.width, self.config.num_draft
        hidden = hidden.astype(self.backbone.dtype)
        mapped = layers.Dense(count * width, self.column_blocks, self.backbone.dtype, name="heads")(hidden)
        return hidden[:, :, None] + nn.silu(mapped).reshape(*hidden.shape[:2], count, width)


@dataclass(frozen=True)
class Standalone:
    """A small language model of the backbone's vocabulary."""

    config: config_lib.BaselineConfig
    backbone: config_lib.BackboneConfig
    column_blocks: bool = False

    @property
    def model(self) -> backbone_lib.Backbone:
        cfg, bb = self.config, self.backbone
        shape = config_lib.BackboneConfig(
            vocab_size=cfg.backbone_vocab_size,
            width=cfg.width,
            mlp_width=cfg.mlp_width,
            num_layers=cfg.num_layers,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            rope_theta=bb.rope_theta,
            rope_scaling=bb.rope_scaling,
            norm_eps=cfg.norm_eps,
            max_positions=bb.max_positions,
            dtype=bb.dtype,
        )
        return backbone_lib.Backbone(shape, self.column_blocks)


Baseline = PairHead | OwnCacheHead | Medusa | Standalone
KINDS: dict[config_lib.BaselineKind, Any] = {
    "standalone": Standalone,
    "eagle": PairHead,
    "eagle3": PairHead,
    "deepseek": PairHead,
    "own_cache": OwnCacheHead,
    "medusa": Medusa,
}


def init_params(config: config_lib.BaselineConfig, backbone: config_lib.BackboneConfig, key: Array) -> dict[str, Any]:
    """Fresh parameters (plain layout); the key is consumed. Medusa's heads start at 0, as in the paper: each drafts the backbone's own next token."""
    config.check_fits(backbone)
    model: Baseline = KINDS[config.kind](config, backbone)
    row, slot = jnp.zeros((1, 1, backbone.width), backbone.dtype), jnp.zeros((1, 1), jnp.int32)
    if isinstance(model, Standalone):
        return jax.jit(model.model.init)(key, slot)["params"]
    if isinstance(model, Medusa):
        return jax.tree.map(jnp.zeros_like, jax.jit(model.init)(key, row)["params"])
    if isinstance(model, OwnCacheHead):
        head_key, keys_key, values_key = jax.random.split(key, 3)
        made = head_lib.init_params(model.head.config, model.head.backbone, head_key)
        shape = (config.width, config.num_kv_heads * config.head_dim)
        for name, own_key in (("own_k", keys_key), ("own_v", values_key)):
            made[name] = {"kernel": (jax.random.normal(own_key, shape) * config.width**-0.5).astype(backbone.dtype)}
        return made
    kv = jnp.zeros((1, config.num_kv_heads, 1, config.head_dim), backbone.dtype)
    unembedding = jnp.zeros((backbone.width, config.draft_vocab_size), backbone.dtype)
    drafted = no_drafts(config, 1, 1, 1, backbone.dtype)
    return jax.jit(model.init, static_argnums=7)(key, row, row, kv, kv, slot, drafted, 1, unembedding)["params"]
