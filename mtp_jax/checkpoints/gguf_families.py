"""What llama.cpp's architectures mean here: metadata -> fields of BackboneConfig, and which tensor goes where in the tree.

Names and defaults are those of llama.cpp's loader (src/llama-arch.cpp, src/llama-model.cpp). Its files hold norm scales
as they are multiplied (Gemma's 1 + w is written out), and of these families permute the query and key rows of Llama only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import errors, families

if TYPE_CHECKING:
    from mtp_jax.checkpoints.gguf import GGUFFile

_SIZES = {  # field of BackboneConfig -> key under the architecture's name
    "width": "embedding_length",
    "mlp_width": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "max_positions": "context_length",
}
_COMMON_KEYS = (
    "vocab_size",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
)
_HARMLESS = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}  # at these values only
_GEMMA_PERIOD, _GEMMA_LOCAL_THETA = 6, 10_000.0  # where the file doesn't say: five sliding layers, then a full one
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True)
class Architecture:
    """One value of general.architecture."""

    fields: Callable[[GGUFFile, dict[str, Any]], dict[str, Any]]  # file, sizes -> the switches of BackboneConfig
    keys: tuple[str, ...] = ()  # that `fields` reads besides the common ones
    permuted: bool = False  # query and key rows are in llama.cpp's own order


def config_fields(file: GGUFFile) -> dict[str, Any]:
    """Every field of BackboneConfig but dtype.

    Raises:
      UnsupportedModel: another architecture, or a key of it that the backbone doesn't implement.
      CheckpointError: a key is missing.
    """
    name = architecture_name(file)
    architecture = ARCHITECTURES[name]
    _refuse_unknown_keys(file, name, {*_SIZES.values(), *_COMMON_KEYS, *architecture.keys})
    sizes = {field: file.integer(f"{name}.{key}") for field, key in _SIZES.items()}
    sizes["num_kv_heads"] = file.integer(f"{name}.attention.head_count_kv", sizes["num_heads"])
    sizes["head_dim"] = file.integer(f"{name}.attention.key_length", sizes["width"] // max(sizes["num_heads"], 1))
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        value = file.integer(key, sizes["head_dim"])
        if value != sizes["head_dim"]:
            raise errors.UnsupportedModel(f"{file.path}: {key}={value}: must equal the head dimension {sizes['head_dim']}")
    sizes["vocab_size"] = file.integer(f"{name}.vocab_size", file.shapes.get("token_embd.weight", (0,))[0])
    common = dict(
        rope_theta=file.get(f"{name}.rope.freq_base", 10_000.0),
        norm_eps=file.get(f"{name}.attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in file.shapes,
        rope_scaling=_rope_scaling(file, name),
    )
    return sizes | common | architecture.fields(file, sizes)


def architecture_name(file: GGUFFile) -> str:
    name = file.get("general.architecture")
    if name not in ARCHITECTURES:
        raise errors.UnsupportedModel(f"{file.path}: general.architecture={name!r}: only {', '.join(map(repr, ARCHITECTURES))} are supported")
    return name


def table(name: str, config: config_lib.BackboneConfig) -> families.Table:
    """All tensors of an architecture's file."""
    layer = "blk.{}."
    names = {
        "embed": "token_embd.weight",
        "unembed": "output.weight",
        "final_norm": "output_norm.weight",
        "attn_norm": layer + "attn_norm.weight",
        "mlp_norm": layer + "ffn_norm.weight",
        "post_attn_norm": layer + "post_attention_norm.weight",
        "post_mlp_norm": layer + "post_ffw_norm.weight",
        **{key: f"{layer}attn_{key}.weight" for key in ("q", "k", "v", "q_norm", "k_norm")},
        "o": layer + "attn_output.weight",
        **{key: f"{layer}ffn_{key}.weight" for key in ("gate", "up", "down")},
    }
    permuted = {"q": config.num_heads, "k": config.num_kv_heads} if ARCHITECTURES[name].permuted else {}
    return families.Table(families.entries(config, names, {key: partial(_unpermuted_kernel, heads=heads) for key, heads in permuted.items()}))


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of q/k rows [heads*H, D].

    llama.cpp rotates neighbours (0, 1), (2, 3), ... of a Llama; transformers and `layers.rotate` rotate halves (0, H/2),
    (1, H/2+1), ... Its converter moves row i of a head to 2i, and row H/2+i to 2i+1; this moves them back.

    Worked row, H = 6: stored [0, 3, 1, 4, 2, 5] -> [0, 1, 2, 3, 4, 5].
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _unpermuted_kernel(rows: np.ndarray, heads: int) -> np.ndarray:
    return unpermute(rows, heads).T


def _rope_scaling(file: GGUFFile, name: str) -> config_lib.RopeScaling | None:
    """llama.cpp takes a factor without a type to be linear, and a factor of 0 to be none."""
    kind, factor = file.get(f"{name}.rope.scaling.type", "linear"), file.get(f"{name}.rope.scaling.factor", 1.0)
    if kind not in ("none", "linear"):
        raise errors.UnsupportedModel(f"{file.path}: {name}.rope.scaling.type={kind!r}: only 'none' and 'linear' are supported")
    if kind == "none" or factor in (0.0, 1.0):
        return None
    return config_lib.from_dict(config_lib.RopeScaling, {"kind": "linear", "factor": factor}, where=f"{file.path}: {name}")


def _gemma3_fields(file: GGUFFile, sizes: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3 text (technical report, arXiv:2503.19786)."""
    window = file.integer("gemma3.attention.sliding_window", 0)
    period = file.integer("gemma3.attention.sliding_window_pattern", _GEMMA_PERIOD)
    if period < 1:
        raise errors.CheckpointError(f"{file.path}: gemma3.attention.sliding_window_pattern={period}: must be at least 1")
    layers = sizes["num_layers"]
    # Scores are scaled by head_dim, but by width / num_heads in the 27B model, which the file doesn't say.
    large = layers == _GEMMA3_27B_LAYERS
    return dict(
        activation="gelu_tanh",
        qk_norm=True,
        sandwich_norms=True,
        embedding_scale=sizes["width"] ** 0.5,
        attention_scale=(sizes["width"] / sizes["num_heads"]) ** -0.5 if large else None,
        layer_types=tuple("sliding" if index % period < period - 1 else "full" for index in range(layers)) if window else ("full",) * layers,
        sliding_window=window or None,
        local_rope_theta=file.get("gemma3.rope.freq_base_swa", _GEMMA_LOCAL_THETA) if window else None,
        final_softcap=file.get("gemma3.final_logit_softcapping", None),
    )


def _refuse_unknown_keys(file: GGUFFile, name: str, known: set[str]) -> None:
    for key in file.keys():
        short = key.removeprefix(f"{name}.")
        if short == key or short in known:
            continue
        value = file.get(key)
        if short not in _HARMLESS or value != _HARMLESS[short]:
            allowed = f"only {_HARMLESS[short]!r} is supported" if short in _HARMLESS else "this key is not supported"
            raise errors.UnsupportedModel(f"{file.path}: {key}={value!r}: {allowed}")


ARCHITECTURES = {
    "llama": Architecture(lambda file, sizes: {}, permuted=True),
    "qwen3": Architecture(lambda file, sizes: {"qk_norm": True}),
    "gemma3": Architecture(
        _gemma3_fields, keys=("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa", "final_logit_softcapping")
    ),
}

__all__ = ["ARCHITECTURES", "Architecture", "architecture_name", "config_fields", "table", "unpermute"]
