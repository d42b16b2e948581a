"""A head as a plain safetensors folder for other programs: every tensor as our modules hold it, and a config.json that explains it.

config.json says for each tensor its name, shape, dtype, what its axes are and what it does; `step` is one draft step in
formulas over those names. Nothing here is read back: `heads.save_head` writes what this package loads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax.checkpoints import heads

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone

CONFIG, TENSORS = "config.json", "model.safetensors"
MODEL_TYPE = "mtp_jax_head"
_NORM = "x / sqrt(mean(x * x) + norm_eps) * scale over the last axis, in float32"
_QUERY = "queries, [heads, head dimension] in one axis, heads slowest: as wide as the donor's keys, rotated as the donor's queries are"
_USES = {  # name without its layer -> axes, use; the first that fits
    "pre/kernel": (
        "in: the backbone's embedding of the token (scaled as the backbone scales it), then the hidden state; out: head width",
        "x = [e; h] @ kernel, of the normed inputs where there are norms for them",
    ),
    "token_norm/scale": ("backbone width", "norm of the embedding before pre/kernel"),
    "hidden_norm/scale": ("backbone width", "norm of the hidden state before pre/kernel, the same in every draft step"),
    "post/kernel": ("in: head width; out: backbone width", "hidden state of the next draft step, n @ kernel"),
    "out/kernel": ("in: head width; out: backbone width", "f = n @ kernel, which the backbone's unembedding rows are multiplied with"),
    "unembed/kernel": ("in: head width; out: draft entry", "logits = n @ kernel"),
    "table": ("draft entry, cluster by cluster; head width", "logits = table @ n, of the entries of the top_centroids best clusters only"),
    "centroids/kernel": ("in: head width; out: cluster", "score of each cluster, n @ kernel"),
    "norm/scale": ("head width", "n = norm(x) after the last layer"),
    "gate_kernel": ("in: head width; out: pointer", "with gate_bias: [1 - g, g_1, ..] = softmax([0, n @ gate_kernel + gate_bias])"),
    "gate_bias": ("pointer", "see gate_kernel"),
    "draft_ids": ("draft entry", "token id of each draft entry"),
    "attn_norm/scale": ("head width", "norm before attention"),
    "post_attn_norm/scale": ("head width", "norm of the attention's result, before it is added to x"),
    "mlp_norm/scale": ("head width", "norm before the MLP"),
    "post_mlp_norm/scale": ("head width", "norm of the MLP's result, before it is added to x"),
    "q/kernel": (f"in: head width; out: {_QUERY}", "queries of attn_norm(x)"),
    "q_norm/scale": ("head dimension", "norm of each head's query, before rotation"),
    "o/kernel": ("in: query heads x head dimension; out: head width", "product after attention"),
    "mlp/gate/kernel": ("in: head width; out: MLP width", "down(activation(gate(y)) * up(y)) for y = mlp_norm(x)"),
    "mlp/up/kernel": ("in: head width; out: MLP width", "see mlp/gate"),
    "mlp/down/kernel": ("in: MLP width; out: head width", "see mlp/gate"),
    "scalar": ("one number", "x = x * scalar at the end of the layer"),
}


def write(out: Path, head: heads.LoadedHead, backbone: LoadedBackbone, dtype: str = "float32") -> list[str]:
    """Write a head of any form, whole or not at all.

    Args:
      out: folder to make.
      head: what to write.
      backbone: that it drafts for.
      dtype: of the tensors: float32, bfloat16 or float16.

    Returns:
      Names of the tensors.

    Raises:
      CheckpointError: a value isn't finite in dtype.
      OSError: something is at `out`.
    """
    tensors = {"draft_ids": np.asarray(head.draft_ids, np.int32), **{name: np.asarray(value) for name, value in heads.flatten(head.params).items()}}
    data = heads.serialise(tensors, dtype, str(out / TENSORS))
    values = {
        "model_type": MODEL_TYPE,
        "head": head.name,
        "backbone": {"name": head.backbone_name or backbone.name, "fingerprint": head.fingerprint, "config": config_lib.to_dict(backbone.config)},
        "config": config_lib.to_dict(head.config),
        "step": _step(head.mtp_config),
        "tensors": [_describe(name, value, dtype) for name, value in sorted(tensors.items())],
    }
    files.write_folder(out, {TENSORS: data, CONFIG: (json.dumps(values, indent=1) + "\n").encode()})
    return sorted(tensors)


def _describe(name: str, value: np.ndarray, dtype: str) -> dict[str, Any]:
    key, where = name, ""
    if name.startswith(("layers_", "pointer_")):
        kind, index, key = name.split("_", 2)
        where = f"head layer {index}: " if kind == "layers" else f"pointer over backbone layer {index}: "
    axes, use = _USES[key]
    if name.startswith("pointer_"):
        use = use.replace("attn_norm(x)", "n, [pointers, key heads, head dimension] in one axis")
    stored = dtype if value.dtype.kind != "i" else value.dtype.name
    return {"name": name, "shape": list(value.shape), "dtype": stored, "axes": axes, "use": where + use}


def _step(config: config_lib.HeadConfig) -> list[str]:
    """One draft step of a row with slots 0..p valid and token p+1 pending."""
    position = "p + 1" if config.query_position == "pending" else "p"
    lines = [
        f"norm(x) = {_NORM}",
        "first step: e is the embedding of the pending token, h the backbone's state at p after its final norm; later the draft before and its hidden state",
        "x = [token_norm(e); hidden_norm(h)] @ pre/kernel" if config.input_norms else "x = [e; h] @ pre/kernel",
        "head layer i: x = x + [post_attn_norm](attention(attn_norm(x)) @ o); x = x + [post_mlp_norm](mlp(mlp_norm(x))); x = x * [scalar]; "
        "what is in brackets only where its tensor is there",
        f"attention of layer i: queries at position {position} over slots 0..p of backbone layer donors[i]'s keys (normed, rotated) and values; "
        "the same slots and position in every draft step; a window counts back from p + 1; the score's scale is the donor's own",
        "n = norm(x)",
        {
            "backbone": "logits = unembedding[draft_ids] @ f, with the backbone's unembedding, without its soft cap; f = n @ out/kernel, or n without one",
            "own": "logits = n @ unembed/kernel",
            "centroids": "logits = table @ n for entries of the top_centroids clusters with the highest n @ centroids/kernel; "
            "cluster c holds entries c * size .. (c + 1) * size - 1, size = draft_vocab_size / num_centroids; no other entry is drafted",
        }[config.output],
        "h = n @ post/kernel",
    ]
    if config.pointer:
        lines.append(
            "pointer j: scores of slot s = sum over pointer_donors of mean over key heads of query_j · key_s times the donor's scale; "
            "copy_j = softmax over slots 0..p; q = (1 - g) softmax(logits) + sum_j g_j copy_j, where slot s votes for token s + 1 of the text"
        )
    return [*lines, "draft = draft_ids[argmax(logits)]" if not config.pointer else "draft = argmax(q), over tokens"]


__all__ = ["write"]
