"""The MTP head: a light Transformer that reads the backbone's hidden state and, by queries alone, its KV cache.

It has no key or value projections, no cache and no prefill. One draft step of a row whose slots 0..p are valid, with
pending token x_{p+1}:

    u   = pre [norm(embed(token)); norm(hidden)]    token: pending, then the previous draft; hidden: h_p, then the head's own
    u   = layer(u), queries at position p+1 over slots 0..p of the donor layer's K/V, for each head layer
    n   = norm(u)
    logits = n · unembedding (draft vocabulary), hidden' = post n

Without `input_norms` the inputs are taken as they are; a row of the token table is then far smaller than a hidden state.

With `pointer`, a second query-only attention over donor keys weighs the slots, and the weight of slot s goes to the
token that followed it, x_{s+1}: q = (1 - g) softmax(logits) + g copy, with the gate g = sigmoid(w · n + b). A copied
token need not be in the draft vocabulary, so rare words and names of the text can be drafted with a small one.

The form of Gemma 4's assistants is the same with a norm after attention and MLP too, a learnt number that scales each
layer's output, and logits = n · own table (`output="own"`). With "centroids" the table lies in clusters of equal size:
n · centroids ranks them, and only the tokens of the best are scored; all others get the least of those scores minus 1.

The same module serves training, where T rows of a sequence are drafted in parallel (row i sees slots 0..i), and
decoding, where T = 1. Sources: the query-only head of the Gemma 4 assistants, whose computation is that of transformers
5.24; pointer mixture after See et al. 2017.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mtp_jax import config as config_lib
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import layers

GATE_BIAS = -2.0  # the pointer starts with an eighth of the weight


class HeadOutput(struct.PyTreeNode):
    """One draft step of T rows."""

    logits: Float[Array, "B T C"]  # float32, over the draft vocabulary
    hidden: Float[Array, "B T D"]  # recurrent: input of the next draft step
    features: Float[Array, "B T D"]  # what the table's rows are multiplied with; W wide where the table is the head's own
    copy: Float[Array, "B T S"] | None  # float32 pointer weight of each slot, sums to 1 over visible slots (which slots: `pointer_positions`)
    gate: Float[Array, "B T"] | None  # float32 share of the copy distribution


class Head(nn.Module):
    """One MTP head for one backbone shape. Arrays it reads are arguments; nothing of the backbone is a parameter."""

    config: config_lib.HeadConfig
    backbone: config_lib.BackboneConfig
    column_blocks: bool = False

    @nn.compact
    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        keys: dict[int, Float[Array, "B K S H"]],
        values: dict[int, Float[Array, "B K S H"]],
        last_slot: Int[Array, "B T"],
        unembedding: layers.Kernel,
        positions: dict[int, Int[Array, "B S"]] | None = None,
    ) -> HeadOutput:
        """Draft one token of each row.

        Args:
          embedded: row of the backbone's token table for the newest token of the row (pending, or the previous draft),
            as stored: the backbone's scaling of it is done here.
          hidden: h_p of the backbone (after the final norm) in the first draft step, later the head's own `hidden`.
          keys, values: donor K/V by backbone layer, straight from the cache.
          last_slot: p of each row; the same in every draft step. In a ring, the position and not the slot.
          unembedding: the backbone's unembedding cut to the draft vocabulary, [D, C] or column blocks; not looked at
            when the head has its own table.
          positions: of the slots of donors that are rings.
        """
        cfg, bb = self.config, self.backbone
        dense, positions = self._dense, positions or {}
        position = last_slot + 1 if cfg.query_position == "pending" else last_slot
        embedded = backbone_lib.scale_embedding(embedded, bb.embedding_scale)
        hidden = hidden.astype(embedded.dtype)
        x = self._enter(embedded, hidden)
        for index, donor in enumerate(cfg.donors):
            held = positions.get(donor, keys[donor].shape[2])
            x = self._layer(x, index, keys[donor], values[donor], layers.visible(last_slot, held, last_slot + 1, bb.window(donor)), position)
        n = self._norm("norm", x)
        features = n if cfg.output != "backbone" or cfg.width == cfg.backbone_width else dense(cfg.backbone_width, "out")(n)
        copy, gate = self._point(n, keys, last_slot, position, positions) if cfg.pointer else (None, None)
        return HeadOutput(
            logits=self._logits(features, unembedding).astype(jnp.float32),
            hidden=self._recur(n),
            features=features,
            copy=copy,
            gate=gate,
        )

    def _enter(self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """What the first layer takes."""
        if self.config.input_norms:  # as in DeepSeek-V3's module (arXiv 2412.19437, equation 21)
            embedded, hidden = self._norm("token_norm", embedded), self._norm("hidden_norm", hidden)
        return self._dense(self.config.width, "pre")(jnp.concatenate([embedded, hidden], axis=-1))

    def _recur(self, n: Float[Array, "B T W"]) -> Float[Array, "B T D"]:
        """The next draft step's hidden state."""
        return self._dense(self.config.backbone_width, "post")(n)

    def _layer(
        self, x: Float[Array, "B T W"], index: int, keys: Float[Array, "B K S H"], values: Array, mask: Bool[Array, "B T S"], position: Int[Array, "B T"]
    ) -> Float[Array, "B T W"]:
        """One layer of the head over its donor's K/V."""
        cfg, bb, donor, name = self.config, self.backbone, self.config.donors[index], f"layers_{index}"
        after = self._norm if cfg.norms == "sandwich" else lambda _, y: y
        q = self._queries(self._norm(f"{name}_attn_norm", x), cfg.num_heads, donor, position, f"{name}_q")
        mixed = layers.attend(q, keys, values, mask, bb.attention_scale_of(donor), bb.attention_softcap)
        x = x + after(f"{name}_post_attn_norm", self._dense(cfg.width, f"{name}_o")(mixed))
        mlp = layers.GatedMLP(cfg.width, cfg.mlp_width, self.column_blocks, bb.dtype, bb.activation, name=f"{name}_mlp")
        x = x + after(f"{name}_post_mlp_norm", mlp(self._norm(f"{name}_mlp_norm", x)))
        return x * self.param(f"{name}_scalar", nn.initializers.ones, (1,), jnp.float32).astype(x.dtype) if cfg.layer_scalars else x

    def _logits(self, features: Float[Array, "B T W"], unembedding: layers.Kernel) -> Float[Array, "B T C"]:
        cfg = self.config
        if cfg.output == "backbone":
            return layers.matmul(features, unembedding)
        if cfg.output == "own":
            return self._dense(cfg.draft_vocab_size, "unembed")(features)
        table = self.param("table", nn.initializers.normal(cfg.width**-0.5), (cfg.draft_vocab_size, cfg.width), self.backbone.dtype)
        return cluster_logits(features, self._dense(cfg.num_centroids, "centroids")(features), table, cfg.top_centroids)

    def _norm(self, name: str, x: Array) -> Array:
        return layers.RMSNorm(self.config.norm_eps, name=name)(x)

    def _dense(self, features: int, name: str) -> layers.Dense:
        return layers.Dense(features, self.column_blocks, self.backbone.dtype, name=name)

    def _queries(self, x: Float[Array, "B T W"], heads: int, donor: int, position: Int[Array, "B T"], name: str) -> Float[Array, "B T N H"]:
        """Queries for the keys of backbone layer `donor`: normed where the backbone's own are, rotated as its are."""
        bb = self.backbone
        head_dim = bb.head_dim_of(donor)
        q = self._dense(heads * head_dim, name)(x).reshape(*x.shape[:2], heads, head_dim)
        if bb.qk_norm:
            q = layers.RMSNorm(self.config.norm_eps, name=f"{name}_norm")(q)
        return layers.rotate(q, position, *bb.rope(donor))

    def _point(
        self, n: Float[Array, "B T W"], keys: dict[int, Array], last_slot: Int[Array, "B T"], position: Int[Array, "B T"], positions: dict[int, Array]
    ) -> tuple[Float[Array, "B T S"], Float[Array, "B T"]]:
        """Copy weights over slots and the gate. Scores are the mean over key heads of query · key, so one query a key head is enough."""
        cfg, bb = self.config, self.backbone
        ring = pointer_positions(cfg, positions)
        scores = 0.0
        mask = None
        for donor in cfg.pointer_donors:
            kv_heads = bb.kv_heads_of(donor)
            q = self._queries(n, cfg.pointer_heads * kv_heads, donor, position, f"pointer_{donor}_q")
            q = q.reshape(*n.shape[:2], cfg.pointer_heads, kv_heads, -1)
            per_head = jnp.einsum("BTPKH,BKSH->BKPTS", q, keys[donor]).astype(jnp.float32)  # summing over K here as well would copy the keys
            here = per_head.mean(axis=1) * bb.attention_scale_of(donor)
            if ring is not None and donor not in positions:  # beside a ring, only what that one's window shows can be seen
                here = jnp.take_along_axis(here, jnp.maximum(ring, 0)[:, None, None], axis=-1)
            scores += here
            seen = layers.visible(last_slot, keys[donor].shape[2] if ring is None else ring, last_slot + 1, bb.window(donor))
            mask = seen if mask is None else mask & seen
        assert mask is not None
        weights = layers.masked_softmax(jnp.asarray(scores), mask[:, None])  # [B, P, T, S]
        gates = nn.softmax(jnp.concatenate([jnp.zeros((*n.shape[:2], 1)), self._gate(n, cfg.pointer_heads)], axis=-1))[..., 1:]  # [B, T, P]
        gate = gates.sum(axis=-1)
        return jnp.einsum("BTP,BPTS->BTS", gates / gate[..., None], weights), gate

    def _gate(self, n: Float[Array, "B T W"], heads: int) -> Float[Array, "B T P"]:
        bias = self.param("gate_bias", nn.initializers.constant(GATE_BIAS), (heads,), jnp.float32)
        kernel = self.param("gate_kernel", nn.initializers.normal(0.02), (n.shape[-1], heads), jnp.float32)
        return n.astype(jnp.float32) @ kernel + bias


def cluster_logits(features: Float[Array, "B T W"], scores: Float[Array, "B T clusters"], table: Float[Array, "C W"], top: int) -> Float[Array, "B T C"]:
    """Logits of the entries of the `top` best clusters; elsewhere the least of them minus 1, so that none of those is drafted.

    Args:
      features: of each row.
      scores: of each cluster; entries c * C / clusters .. (c + 1) * C / clusters - 1 are those of cluster c.
      table: own rows, cluster by cluster.
      top: number of clusters scored.
    """
    batch, length, clusters = scores.shape
    _, best = lax.top_k(scores, top)  # [B, T, top]
    if batch * length * top < clusters:  # a few rows of a text: reading just their clusters touches less than the table
        by_cluster = table.reshape(clusters, -1, table.shape[-1])
        scored = jnp.einsum("BTW,BTXEW->BTXE", features, by_cluster[best]).astype(jnp.float32)
        floor = scored.min(axis=(2, 3), keepdims=True) - 1.0  # [B, T, 1, 1]
        spread = jnp.broadcast_to(floor, (batch, length, clusters, scored.shape[-1]))
        rows = jnp.arange(batch)[:, None, None], jnp.arange(length)[:, None], best
        return spread.at[rows].set(scored).reshape(batch, length, -1)
    logits = (features @ table.T).astype(jnp.float32).reshape(batch, length, clusters, -1)
    chosen = nn.one_hot(best, clusters, dtype=jnp.bool_).any(axis=2)[..., None]  # [B, T, clusters, 1]
    floor = jnp.where(chosen, logits, jnp.inf).min(axis=(2, 3), keepdims=True) - 1.0
    return jnp.where(chosen, logits, floor).reshape(batch, length, -1)


class DraftVocab(struct.PyTreeNode):
    """The draft vocabulary, and the two lookups made from it once: nothing here is trained."""

    ids: Int[Array, " C"]  # token id of each draft entry
    index: Int[Array, " V"]  # draft entry of each token id; C where the token is not in the draft vocabulary
    unembedding: layers.Kernel  # [D, C] or column blocks: rows of the backbone's unembedding; () where nothing reads them


def draft_vocab(
    ids: Int[Array, " C"], backbone_params: dict[str, Any], backbone: config_lib.BackboneConfig, *, column_blocks: bool = False, with_rows: bool = True
) -> DraftVocab:
    """Cut the backbone's unembedding (of parameters in the plain layout) to the tokens `ids`, unless `with_rows` is off."""
    index = jnp.full((backbone.vocab_size,), len(ids), jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))
    if not with_rows:
        return DraftVocab(ids=ids, index=index, unembedding=())
    rows = backbone_lib.unembedding_rows(backbone_params, backbone, ids)
    return DraftVocab(ids=ids, index=index, unembedding=layers.block_kernel(rows.T) if column_blocks else rows.T)


class Mixture(struct.PyTreeNode):
    """The draft distribution q in log space, over two lists of candidates.

    A token of the text so far stands in `slots` (at its first visible occurrence) with all of its probability, its share
    of the softmax included. `vocab` holds the softmax share of the draft vocabulary; where a token stands in both, the
    entry of `slots` is the right one, and it is never the smaller.
    """

    vocab: Float[Array, "B T C"]  # log((1 - g) softmax)
    slots: Float[Array, "B T S"] | None  # log(q(x_{s+1})), very negative where not a first visible occurrence
    vocab_at_slots: Float[Array, "B T S"] | None  # log((1 - g) softmax(x_{s+1})), -inf where outside the draft vocabulary


def pointer_positions(config: config_lib.HeadConfig, positions: dict[int, Int[Array, "B S"]]) -> Int[Array, "B S"] | None:
    """Positions of the slots that the pointer weighs, those of a ring where one of its donors is a ring; None: slot s is position s."""
    return next((positions[donor] for donor in config.pointer_donors if donor in positions), None)


def mix(
    output: HeadOutput,
    slot_logits: Float[Array, "B T S"] | None,
    followers: Int[Array, "B S"],
    last_slot: Int[Array, "B T"],
    positions: Int[Array, "B S"] | None = None,
) -> Mixture:
    """Combine softmax and copy distribution.

    Args:
      output: of the head.
      slot_logits: the head's logit of the token that follows each slot; -inf where that token is outside the draft vocabulary.
        Only a pointer needs them.
      followers: token x_{s+1} after each slot s; entries beyond a row's last slot are ignored.
      last_slot: p of each row.
      positions: see `pointer_positions`.
    """
    normaliser = nn.logsumexp(output.logits, axis=-1, keepdims=True)
    if output.copy is None or output.gate is None or slot_logits is None:
        return Mixture(vocab=output.logits - normaliser, slots=None, vocab_at_slots=None)
    stay = jnp.log1p(-output.gate)[..., None] - normaliser
    same = (followers[:, :, None] == followers[:, None, :]).astype(jnp.float32)  # [B, S, S]
    copied = jnp.einsum("BTS,BSR->BTR", output.copy, same) * output.gate[..., None]  # weight of all occurrences of the token
    base = slot_logits + stay
    lowest = jnp.finfo(jnp.float32).min
    slots = jnp.where(first_visible(followers, last_slot, positions), jnp.log(jnp.exp(base) + copied + TINY), lowest)
    return Mixture(vocab=output.logits + stay, slots=slots, vocab_at_slots=base)


def gather_slot_logits(logits: Float[Array, "B T C"], index_at_slots: Int[Array, "B S"]) -> Float[Array, "B T S"]:
    """Logit of the token after each slot, read from the draft logits (`index_at_slots` is DraftVocab.index of the followers)."""
    padded = jnp.pad(logits, ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)
    return jnp.take_along_axis(padded, jnp.broadcast_to(index_at_slots[:, None], (*logits.shape[:2], index_at_slots.shape[1])), axis=-1)


TINY = 1e-8  # keeps log finite; far below any probability that matters


def first_visible(followers: Int[Array, "B S"], last_slot: Int[Array, "B T"], positions: Int[Array, "B S"] | None = None) -> Bool[Array, "B T S"]:
    """True at slots <= last_slot whose follower occurs at no earlier slot: each token of the text, or of a ring, once."""
    slots = jnp.arange(followers.shape[1]) if positions is None else positions
    before = slots[..., None, :] < slots[..., None]  # [S, S'], or [B, S, S']
    if positions is not None:
        before &= (positions >= 0)[:, None]
    earlier = (followers[:, :, None] == followers[:, None, :]) & before
    seen = layers.visible(last_slot, followers.shape[1] if positions is None else positions, last_slot, None)
    return ~earlier.any(axis=-1)[:, None] & seen


def greedy(mixture: Mixture, ids: Int[Array, " C"], followers: Int[Array, "B S"]) -> Int[Array, "B T"]:
    """Most probable draft token."""
    best = jnp.argmax(mixture.vocab, axis=-1)
    token = ids[best]
    if mixture.slots is None:
        return token
    slot = jnp.argmax(mixture.slots, axis=-1)
    copied = jnp.take_along_axis(followers, slot.reshape(slot.shape[0], -1), axis=1).reshape(slot.shape)
    return jnp.where(mixture.slots.max(axis=-1) > mixture.vocab.max(axis=-1), copied, token)


def highest(mixture: Mixture) -> Float[Array, "B T"]:
    """Probability of the most probable draft token."""
    best = mixture.vocab.max(axis=-1)
    return jnp.exp(best if mixture.slots is None else jnp.maximum(best, mixture.slots.max(axis=-1)))


def param_shapes(config: config_lib.HeadConfig, backbone: config_lib.BackboneConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every head parameter by flat name ("pre/kernel"), in the plain layout."""
    tree = jax.eval_shape(lambda: init_params(config, backbone, jax.random.key(0)))
    return {"/".join(str(part.key) for part in path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def init_params(config: config_lib.HeadConfig, backbone: config_lib.BackboneConfig, key: Array) -> dict[str, Any]:
    """Fresh head parameters (plain layout); the key is consumed. Residual outputs start small, so that an untrained head is tame."""
    config.check_fits(backbone)
    kv = {donor: jnp.zeros((1, backbone.kv_heads_of(donor), 1, backbone.head_dim_of(donor)), backbone.dtype) for donor in config.layers_read}
    row = jnp.zeros((1, 1, backbone.width), backbone.dtype)
    unembedding = jnp.zeros((backbone.width, config.draft_vocab_size), backbone.dtype)
    return jax.jit(Head(config, backbone).init)(key, row, row, kv, kv, jnp.zeros((1, 1), jnp.int32), unembedding)["params"]
