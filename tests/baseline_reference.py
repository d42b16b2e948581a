"""The baselines' draft steps once more, slowly: numpy in float64, one row, everything computed anew from the text; no cache. See reference.py."""

from __future__ import annotations

import numpy as np
import reference

from mtp_jax.checkpoints import load
from mtp_jax.models import baselines


def draft(head: load.LoadedHead, loaded: load.LoadedBackbone, tokens: list[int], given: list[int]) -> list[np.ndarray]:
    """The distribution over the whole vocabulary [V] of each draft after `tokens`, whose last is pending.

    Args:
      given: what is drafted, whatever is most probable: step k + 1 takes given[k - 1].
    """
    kind = head.config.kind
    if kind == "standalone":
        small = baselines.Standalone(head.config, loaded.config).model.config
        logits = [reference.backbone(head.params, small, tokens + given[:k])[1][-1] for k in range(len(given))]
        outside = np.setdiff1d(np.arange(small.vocab_size), head.draft_ids)
        return [reference.softmax(np.where(np.isin(np.arange(len(row)), outside), -np.inf, row)) for row in logits]
    stream: list[np.ndarray] = []
    hidden = reference.backbone(loaded.params, loaded.config, tokens[:-1], stream)[0]
    if kind == "eagle3":
        hidden = np.concatenate([stream[tap] for tap in head.config.taps], axis=1) @ _array(head.params["fuse"]["kernel"])
    table = _array(loaded.params["embed"]["embedding"])
    unembedding = (table if loaded.config.tied_embeddings else _array(loaded.params["unembed"]["kernel"]).T)[head.draft_ids]
    inputs = [tokens[-1], *given[:-1]]
    if kind == "medusa":
        mapped = (hidden[-1] @ _array(head.params["heads"]["kernel"])).reshape(head.config.num_draft, -1)
        return [_spread(head, unembedding @ (hidden[-1] + own / (1 + np.exp(-own))), loaded) for own in mapped[: len(given)]]
    pairs = [(table[token], state) for token, state in zip(tokens[1:], hidden, strict=True)]
    return (_own_cache if kind == "own_cache" else _layer)(head, loaded, tokens, pairs, [table[token] for token in inputs], unembedding)


def _layer(head, loaded, tokens, pairs, inputs, unembedding):
    """EAGLE, EAGLE-3, DeepSeek: a causal layer over the list of pairs, of which each step adds one (the first is there already)."""
    params, config, found = head.params, head.config, []
    for embedded in inputs:
        if found:
            pairs = [*pairs, (embedded, state)]  # noqa: F821  # of the step before
        if config.kind == "eagle3":
            x = np.stack([own for _, own in pairs])
            normed = [(token, params["embed_norm"], own, params["hidden_norm"]) for token, own in pairs]
            n = np.stack([np.concatenate([_norm(head, one, a), _norm(head, other, b)]) for one, a, other, b in normed])
        else:
            x = np.stack([_input(head, *pair) for pair in pairs])
            n = _norm(head, x, params["attn_norm"])
        q, k, v = ((n @ _array(params[name]["kernel"])).reshape(len(x), -1, config.head_dim) for name in ("q", "own_k", "own_v"))
        q, k = (np.stack([reference.rope(row, place, loaded.config.rope_theta) for place, row in enumerate(part)]) for part in (q, k))
        last = x[-1] + reference.attend(q[-1], k.swapaxes(0, 1), v.swapaxes(0, 1), range(len(x))) @ _array(params["o"]["kernel"])
        state = last + reference.gated_mlp(reference.rms_norm(last, params["mlp_norm"]["scale"], config.norm_eps), params["mlp"])
        features = state if config.kind == "eagle" else _norm(head, state, params["norm"])
        found.append(_spread(head, unembedding @ features, loaded))
    return found


def _norm(head, x, params):
    return reference.rms_norm(x, params["scale"], head.config.norm_eps)


def _input(head, embedded, state):
    params = head.params
    if head.config.kind == "deepseek":
        parts = _norm(head, state, params["hidden_norm"]), _norm(head, embedded, params["embed_norm"])
    elif head.config.kind == "own_cache":
        parts = _norm(head, embedded, params["token_norm"]), _norm(head, state, params["hidden_norm"])
    else:
        parts = embedded, state
    return np.concatenate(parts) @ _array(params["pre"]["kernel"])


def _own_cache(head, loaded, tokens, pairs, inputs, unembedding):
    """The MTP head's own reference, with K/V of the true pairs in place of the backbone's."""
    params, config = head.params, head.config
    own = baselines.OwnCacheHead(config, loaded.config).head
    n = reference.rms_norm(np.stack([_input(head, *pair) for pair in pairs]), params["layers_0_attn_norm"]["scale"], config.norm_eps)
    k, v = ((n @ _array(params[name]["kernel"])).reshape(len(n), -1, config.head_dim) for name in ("own_k", "own_v"))
    k = np.stack([reference.rope(row, place, loaded.config.rope_theta) for place, row in enumerate(k)])
    keys, values = {0: k.swapaxes(0, 1)}, {0: v.swapaxes(0, 1)}
    state, found = pairs[-1][1], []
    for embedded in inputs:
        logits, state, copy, gate = reference.draft_step(params, own.config, own.backbone, embedded, state, keys, values, len(pairs) - 1, unembedding)
        found.append(reference.dense_q(logits, copy, gate, head.draft_ids, np.asarray(tokens[1:]), len(pairs) - 1, loaded.config.vocab_size))
    return found


def _spread(head, logits, loaded):
    q = np.zeros(loaded.config.vocab_size)
    q[head.draft_ids] = reference.softmax(logits)
    return q


def _array(x):
    return np.asarray(x, np.float64)
