"""The backbone and the head once more, slowly: plain numpy in float64, one row, one position at a time, no cache, no masks.

Written from the description of the computation, not from the package: loops instead of einsums, slices instead of masks. Parameters are those
of the package in the plain layout (nested dicts, kernels [in, out]).
"""

from __future__ import annotations

from typing import Any

import numpy as np


def backbone(
    params: dict[str, Any], config: Any, tokens: list[int], stream: list[np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Hidden states after the final norm [T, D], logits [T, V], and K and V of every layer [K, T, H], of one text.

    `stream` takes the residual stream [T, D] of the embeddings and after every layer, where there is one.
    """
    table = _array(params["embed"]["embedding"])
    x = table[np.asarray(tokens)]
    keys, values = [], []
    stream = [] if stream is None else stream
    stream.append(x)
    for index in range(config.num_layers):
        layer = params[f"layers_{index}"]
        normed = rms_norm(x, layer["attn_norm"]["scale"], config.norm_eps)
        q, k, v = (_heads(normed @ _array(layer["attn"][name]["kernel"]), config.head_dim) for name in "qkv")
        q, k = (np.stack([rope(row, position, config.rope_theta) for position, row in enumerate(part)]) for part in (q, k))
        window = config.sliding_window if config.layer_types[index] == "sliding" else len(tokens)
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)  # [K, T, H]
        mixed = np.stack([attend(q[i], k, v, range(max(0, i - window + 1), i + 1)) for i in range(len(tokens))])
        x = x + mixed @ _array(layer["attn"]["o"]["kernel"])
        x = x + gated_mlp(rms_norm(x, layer["mlp_norm"]["scale"], config.norm_eps), layer["mlp"])
        keys.append(k)
        values.append(v)
        stream.append(x)
    hidden = rms_norm(x, params["final_norm"]["scale"], config.norm_eps)
    unembedding = table.T if config.tied_embeddings else _array(params["unembed"]["kernel"])
    return hidden, hidden @ unembedding, keys, values


def draft_step(
    params: dict[str, Any],
    config: Any,
    backbone_config: Any,
    embedded: np.ndarray,
    hidden: np.ndarray,
    keys: dict[int, np.ndarray],
    values: dict[int, np.ndarray],
    last_slot: int,
    unembedding: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, float | None]:
    """One draft step of one row: logits [C], the next hidden [D], copy weight of each slot [last_slot + 1] and the gate.

    `keys` and `values` [K, S, H] by backbone layer; `unembedding` [C, D].
    """
    position = last_slot + 1 if config.query_position == "pending" else last_slot
    if config.input_norms:
        embedded = rms_norm(embedded, params["token_norm"]["scale"], config.norm_eps)
        hidden = rms_norm(hidden, params["hidden_norm"]["scale"], config.norm_eps)
    x = np.concatenate([embedded, hidden]) @ _array(params["pre"]["kernel"])
    for index, donor in enumerate(config.donors):
        normed = rms_norm(x, params[f"layers_{index}_attn_norm"]["scale"], config.norm_eps)
        q = (normed @ _array(params[f"layers_{index}_q"]["kernel"])).reshape(-1, backbone_config.head_dim)
        q = rope(q, position, backbone_config.rope_theta)
        mixed = attend(q, keys[donor], values[donor], visible_slots(backbone_config, donor, last_slot))
        x = x + mixed @ _array(params[f"layers_{index}_o"]["kernel"])
        normed = rms_norm(x, params[f"layers_{index}_mlp_norm"]["scale"], config.norm_eps)
        x = x + gated_mlp(normed, params[f"layers_{index}_mlp"])
    n = rms_norm(x, params["norm"]["scale"], config.norm_eps)
    features = n @ _array(params["out"]["kernel"]) if "out" in params else n
    copy, gate = point(params, config, backbone_config, n, keys, last_slot, position) if config.pointer else (None, None)
    return unembedding @ features, n @ _array(params["post"]["kernel"]), copy, gate


def point(
    params: dict[str, Any], config: Any, backbone_config: Any, n: np.ndarray, keys: dict[int, np.ndarray], last_slot: int, position: int
) -> tuple[np.ndarray, float]:
    """Weight of each slot 0..last_slot, and the gate. Each pointer head scores a slot by the mean over key heads, summed over donors."""
    head_dim, num_kv = backbone_config.head_dim, backbone_config.num_kv_heads
    slots = sorted(set.intersection(*(set(visible_slots(backbone_config, donor, last_slot)) for donor in config.pointer_donors)))
    scores = np.zeros((config.pointer_heads, len(slots)))
    for donor in config.pointer_donors:
        q = rope((n @ _array(params[f"pointer_{donor}_q"]["kernel"])).reshape(-1, head_dim), position, backbone_config.rope_theta)
        for pointer in range(config.pointer_heads):
            for place, slot in enumerate(slots):
                scores[pointer, place] += np.mean([q[pointer * num_kv + head] @ keys[donor][head, slot] for head in range(num_kv)]) / np.sqrt(head_dim)
    shares = softmax(np.concatenate([[0.0], n @ _array(params["gate_kernel"]) + _array(params["gate_bias"])]))[1:]
    weights = np.zeros(last_slot + 1)
    for pointer in range(config.pointer_heads):
        weights[slots] += shares[pointer] / shares.sum() * softmax(scores[pointer])
    return weights, float(shares.sum())


def dense_q(
    logits: np.ndarray, copy: np.ndarray | None, gate: float | None, ids: np.ndarray, followers: np.ndarray, last_slot: int, vocab_size: int
) -> np.ndarray:
    """The draft distribution over the whole vocabulary [V]: q(v) = (1 - g) softmax(v) + g * weight of visible slots followed by v."""
    q = np.zeros(vocab_size)
    q[np.asarray(ids)] = softmax(logits)
    if copy is None or gate is None:
        return q
    q *= 1 - gate
    for slot in range(last_slot + 1):
        q[followers[slot]] += gate * copy[slot]
    return q


def draft(
    params: dict[str, Any],
    config: Any,
    ids: np.ndarray,
    backbone_params: dict[str, Any],
    backbone_config: Any,
    tokens: list[int],
    num_draft: int,
) -> tuple[list[int], list[np.ndarray]]:
    """Greedy drafts after `tokens`, whose last is pending, and the distribution of each."""
    hidden_states, _, keys, values = backbone(backbone_params, backbone_config, tokens[:-1])
    table = _array(backbone_params["embed"]["embedding"])
    unembedding = (table if backbone_config.tied_embeddings else _array(backbone_params["unembed"]["kernel"]).T)[np.asarray(ids)]
    last_slot, hidden, token = len(tokens) - 2, hidden_states[-1], tokens[-1]
    drafts, distributions = [], []
    for _ in range(num_draft):
        logits, hidden, copy, gate = draft_step(
            params, config, backbone_config, table[token], hidden, dict(enumerate(keys)), dict(enumerate(values)), last_slot, unembedding
        )
        q = dense_q(logits, copy, gate, ids, np.asarray(tokens[1:]), last_slot, backbone_config.vocab_size)
        token = int(np.argmax(q))
        drafts.append(token)
        distributions.append(q)
    return drafts, distributions


def greedy_text(params: dict[str, Any], config: Any, prompt: list[int], count: int) -> list[int]:
    """`count` tokens, each the argmax after a whole forward pass."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(np.argmax(backbone(params, config, text)[1][-1])))
    return text[len(prompt) :]


def visible_slots(config: Any, layer: int, last_slot: int) -> range:
    """Slots a draft query sees in `layer`: up to last_slot, and in a sliding layer inside the window of the pending token's position."""
    if config.layer_types[layer] == "full":
        return range(last_slot + 1)
    return range(max(0, last_slot + 1 - config.sliding_window + 1), last_slot + 1)


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, slots: range) -> np.ndarray:
    """Queries [N, H] of one position over the listed slots of [K, S, H]; head n reads key head n // (N / K)."""
    group = len(q) // len(keys)
    if not len(slots):
        return np.zeros(q.size)
    out = []
    for head, query in enumerate(q):
        k, v = keys[head // group][slots.start : slots.stop], values[head // group][slots.start : slots.stop]
        out.append(softmax(k @ query / np.sqrt(len(query))) @ v)
    return np.concatenate(out)


def rope(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """x * cos + rotate_half(x) * sin, as published for Llama; x [heads, H]."""
    head_dim = x.shape[-1]
    angles = position / theta ** (np.arange(0, head_dim, 2) / head_dim)
    cos, sin = np.cos(np.concatenate([angles, angles])), np.sin(np.concatenate([angles, angles]))
    rotated = np.concatenate([-x[:, head_dim // 2 :], x[:, : head_dim // 2]], axis=-1)
    return x * cos + rotated * sin


def rms_norm(x: np.ndarray, scale: Any, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * _array(scale)


def gated_mlp(x: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    gate = x @ _array(params["gate"]["kernel"])
    return (gate / (1 + np.exp(-gate)) * (x @ _array(params["up"]["kernel"]))) @ _array(params["down"]["kernel"])


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max())
    return exponentials / exponentials.sum()


def _heads(x: np.ndarray, head_dim: int) -> np.ndarray:
    return x.reshape(len(x), -1, head_dim)


def _array(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)
