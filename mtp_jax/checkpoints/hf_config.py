"""config.json of a folder in transformers' layout -> BackboneConfig.

A family is data: the switches that all of its models share, what an absent field means, and which values of the fields
that the backbone doesn't implement mean what it does anyway. Any other value is refused by the field's name. Defaults are
those of transformers 5.24, so that a short config.json means here what it means there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import errors


@dataclass(frozen=True)
class Family:
    """What the models of one `model_type` have in common."""

    switches: dict[str, Any]  # fields of BackboneConfig
    defaults: dict[str, Any]  # fields of config.json that may be absent
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # field -> the values that mean what the backbone does
    biases: tuple[str, ...] = ()  # switches that attention_bias turns on
    pattern: int | None = None  # without layer_types, every so many layers one is full; None: see `_layer_types`
    norms_add_one: bool = False  # stored scales are w, the norm multiplies with 1 + w


_ANY_ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "use_bidirectional_attention": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "enable_moe_block": (False, None),
    "attention_k_eq_v": (False, None),
    "num_kv_shared_layers": (0, None),
    "hidden_size_per_layer_input": (0, None),
}
_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048, "rope_theta": 10_000.0}
_GEMMA_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2_DEFAULTS = _GEMMA_DEFAULTS | {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_DEFAULTS = _GEMMA_DEFAULTS | {"vocab_size": 262_208, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
_GEMMA4_DEFAULTS = _GEMMA_DEFAULTS | {
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
_GEMMA4_UNIFIED_DEFAULTS = _GEMMA4_DEFAULTS | {
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}
_GEMMA4 = Family(
    dict(qk_norm=True, v_norm=True, sandwich_norms=True, layer_scalars=True, attention_scale=1.0),
    _GEMMA4_DEFAULTS,
    # "vision" looks ahead between the patches of one image only
    {"use_bidirectional_attention": ("vision", False, None), "rope_scaling": (None,)},
    biases=("attention_bias", "output_bias"),
    pattern=6,
)
FAMILIES = {
    "llama": Family({}, _LLAMA_DEFAULTS, {"sliding_window": (None,)}, biases=("attention_bias", "output_bias")),
    # transformers' defaults for absent fields are a certain model's own; `_parse` wants those stated
    "mistral": Family({}, _LLAMA_DEFAULTS | {"max_position_embeddings": 131_072}),
    "qwen2": Family(dict(attention_bias=True), _LLAMA_DEFAULTS | {"max_position_embeddings": 32_768, "sliding_window": 4096}),
    "qwen3": Family(
        dict(qk_norm=True),
        _LLAMA_DEFAULTS | {"max_position_embeddings": 32_768, "sliding_window": 4096, "head_dim": 128},
        biases=("attention_bias", "output_bias"),
    ),
    "gemma2": Family(dict(sandwich_norms=True), _GEMMA2_DEFAULTS, biases=("attention_bias", "output_bias"), pattern=2, norms_add_one=True),
    "gemma3_text": Family(dict(qk_norm=True, sandwich_norms=True), _GEMMA3_DEFAULTS, biases=("attention_bias", "output_bias"), pattern=6, norms_add_one=True),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": Family(_GEMMA4.switches, _GEMMA4_UNIFIED_DEFAULTS, _GEMMA4.only, _GEMMA4.biases, pattern=6),
}
_WITH_TEXT_CONFIG = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}  # models that see and hear, too
_MUST_STATE = {"mistral": ("sliding_window", "num_key_value_heads", "rms_norm_eps")}
_IMPLEMENTED = {  # fields of _ANY_ONLY that a family does read
    "llama": ("mlp_bias",),
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3_text": ("final_logit_softcapping",),  # transformers reads Gemma 3's attn_logit_softcapping and ignores it: refused
    "gemma4_text": ("final_logit_softcapping", "attention_k_eq_v", "num_kv_shared_layers", "hidden_size_per_layer_input"),
    "gemma4_unified_text": ("final_logit_softcapping", "attention_k_eq_v", "num_kv_shared_layers"),
}
_ACTIVATIONS: dict[str, config_lib.Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}


def family_of(values: dict[str, Any], path: Path) -> tuple[str, Family]:
    """Name and family of the text model that config.json describes; UnsupportedModel for another."""
    kind = values.get("model_type")
    name = _WITH_TEXT_CONFIG.get(kind, kind) if isinstance(kind, str) else ""
    if name not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *_WITH_TEXT_CONFIG]))
        raise errors.UnsupportedModel(f"{path}: model_type={kind!r}: only {known} are supported (no mixtures of experts)")
    return name, FAMILIES[name]


def parse(values: dict[str, Any], path: Path, dtype: str) -> config_lib.BackboneConfig:
    """Turn the object of config.json into a BackboneConfig; see `hf.read_config` for what it raises."""
    name, family = family_of(values, path)
    if values.get("model_type") in _WITH_TEXT_CONFIG:
        if not isinstance(values.get("text_config"), dict):
            raise errors.CheckpointError(f"{path}: field 'text_config' is missing")
        outer = {key: values[key] for key in ("tie_word_embeddings", "quantization_config") if key in values}
        values = values["text_config"] | outer
    for key in _MUST_STATE.get(name, ()):
        if key not in values:
            raise errors.UnsupportedModel(f"{path}: field {key!r} is absent: a {name} model must state it (sliding_window as null)")
    _refuse(values, name, family, path)
    values = family.defaults | {key: value for key, value in values.items() if not (key == "rope_parameters" and value is None)}
    for key in _SIZES.values():
        if key not in values:
            raise errors.CheckpointError(f"{path}: field {key!r} is missing")
    try:
        return config_lib.from_dict(config_lib.BackboneConfig, _fields(values, name, family, path) | {"dtype": dtype}, where=str(path))
    except errors.CheckpointError:
        raise
    except (config_lib.ConfigError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise errors.CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


def _refuse(values: dict[str, Any], name: str, family: Family, path: Path) -> None:
    only = {key: allowed for key, allowed in (_ANY_ONLY | family.only).items() if key not in _IMPLEMENTED.get(name, ())}
    if not family.biases:
        only["attention_bias"] = (bool(family.switches.get("attention_bias")), None)
    for key, allowed in only.items():
        if key in values and values[key] not in allowed:
            raise errors.UnsupportedModel(f"{path}: {key}={values[key]!r}: only {allowed[0]!r} is supported")


def _fields(values: dict[str, Any], name: str, family: Family, path: Path) -> dict[str, Any]:
    """Fields of BackboneConfig but for the dtype."""
    fields: dict[str, Any] = {ours: values[theirs] for ours, theirs in _SIZES.items()} | dict(
        num_kv_heads=_or(values.get("num_key_value_heads"), values["num_attention_heads"]),
        head_dim=_or(values.get("head_dim"), values["hidden_size"] // values["num_attention_heads"]),
        norm_eps=values["rms_norm_eps"],
        tied_embeddings=bool(values["tie_word_embeddings"]),
        max_positions=values["max_position_embeddings"],
        activation=_activation(values, path),
        mlp_bias=bool(values.get("mlp_bias")),
        attention_softcap=values.get("attn_logit_softcapping"),
        final_softcap=values.get("final_logit_softcapping"),
    )
    fields |= family.switches
    if values.get("attention_bias"):
        fields |= dict.fromkeys(family.biases, True)
    fields |= _layers(values, name, family, path)
    fields |= _rope(values, path)
    if name.startswith("gemma"):
        fields["embedding_scale"] = values["hidden_size"] ** 0.5
    if name in ("gemma2", "gemma3_text"):
        fields["attention_scale"] = values["query_pre_attn_scalar"] ** -0.5
    if name.startswith("gemma4"):
        fields |= _gemma4(values, fields["layer_types"], path)
    return fields


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _activation(values: dict[str, Any], path: Path) -> config_lib.Activation:
    key = "hidden_activation" if "hidden_activation" in values else "hidden_act"
    value = values.get(key, "silu")
    if value not in _ACTIVATIONS:
        raise errors.UnsupportedModel(f"{path}: {key}={value!r}: only {' and '.join(map(repr, _ACTIVATIONS))} are supported")
    return _ACTIVATIONS[value]


def _layers(values: dict[str, Any], name: str, family: Family, path: Path) -> dict[str, Any]:
    """`layer_types` and `sliding_window`."""
    stated, implied = values.get("layer_types"), _implied_layer_types(values, name, family)
    kinds = list(stated) if stated else implied
    rule = ""
    if set(kinds) - {"full_attention", "sliding_attention"}:
        rule = "only 'full_attention' and 'sliding_attention' are supported"
    elif name in ("llama", "mistral") and kinds != implied:
        rule = f"model_type {name!r} has layers of one kind, {implied[0] if implied else ''!r}"
    elif name.startswith("qwen") and "sliding_attention" in kinds and not values.get("use_sliding_window"):
        rule = "a sliding layer needs use_sliding_window"
    elif name.startswith("gemma4") and kinds and kinds[-1] != "full_attention":
        rule = "the last must be 'full_attention'"
    if rule:
        raise errors.UnsupportedModel(f"{path}: layer_types={kinds!r}: {rule}")
    window = values.get("sliding_window") if "sliding_attention" in kinds else None
    return dict(layer_types=tuple(kind.removesuffix("_attention") for kind in kinds), sliding_window=window)


def _implied_layer_types(values: dict[str, Any], name: str, family: Family) -> list[str]:
    """What the layers are when config.json has no `layer_types`."""
    count, has_window = values["num_hidden_layers"], values.get("sliding_window") is not None
    if family.pattern is not None:
        pattern = _or(values.get("sliding_window_pattern"), family.pattern) if name == "gemma3_text" else family.pattern
        return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(count)]
    first_sliding = count
    if name == "mistral" and has_window:
        first_sliding = 0
    elif name.startswith("qwen") and has_window and values.get("use_sliding_window"):
        first_sliding = values.get("max_window_layers", 28)
    return ["full_attention" if index < first_sliding else "sliding_attention" for index in range(count)]


def _rope(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Rotary fields from `rope_parameters` (transformers 5: flat, or one object per layer type) or `rope_theta` and `rope_scaling`."""
    found = {name: _or(values.get(name), {}) for name in ("rope_scaling", "rope_parameters")}
    for name, rope in found.items():
        if not isinstance(rope, dict):
            raise errors.UnsupportedModel(f"{path}: {name}={rope!r}: only an object or null is supported")
    full, local = found["rope_parameters"], values.get("rope_local_base_freq")
    by_type = bool(set(full) & {"full_attention", "sliding_attention"})
    if by_type:
        full, sliding = (_or(found["rope_parameters"].get(f"{kind}_attention"), {}) for kind in ("full", "sliding"))
        stated = _one_rope(sliding, "rope_parameters", path)
        if set(stated) - {"rope_theta"}:
            raise errors.UnsupportedModel(f"{path}: rope_parameters={sliding!r}: only rope_type 'default' is supported on sliding layers")
        local = stated.get("rope_theta", local)
    fields = _one_rope(full | found["rope_scaling"], "rope_scaling" if found["rope_scaling"] else "rope_parameters", path)
    fields.setdefault("rope_theta", values.get("rope_theta"))
    if fields["rope_theta"] is None or (by_type and local is None):
        raise errors.CheckpointError(f"{path}: rope_parameters={values.get('rope_parameters')!r}: a 'rope_theta' is missing")
    return fields if local is None else fields | {"local_rope_theta": local}


_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "proportional": {"partial_rotary_factor", "factor"},
}


def _one_rope(rope: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    """Fields of one rope object: rope_theta where it states it, rope_scaling, rotary_fraction."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    stated = {key: value for key, value in rope.items() if key not in ("rope_type", "type", "rope_theta") and value is not None}
    if stated.get("partial_rotary_factor") == 1.0 and kind != "proportional":
        del stated["partial_rotary_factor"]
    if kind not in _ROPE_FIELDS or set(stated) - _ROPE_FIELDS[kind]:
        raise errors.UnsupportedModel(f"{path}: {name}={rope!r}: only null or rope_type {', '.join(_ROPE_FIELDS)} with their own fields is supported")
    missing = sorted(_ROPE_FIELDS[kind] - set(stated))
    if missing and kind != "proportional":
        raise errors.UnsupportedModel(f"{path}: {name}={rope!r}: rope_type {kind!r} must state {missing[0]!r}")
    fields: dict[str, Any] = {}
    if rope.get("rope_theta") is not None:
        fields["rope_theta"] = rope["rope_theta"]
    if kind == "llama3":
        fields["rope_scaling"] = config_lib.RopeScaling(
            kind="llama3",
            factor=stated["factor"],
            low_frequency_factor=stated["low_freq_factor"],
            high_frequency_factor=stated["high_freq_factor"],
            original_positions=stated["original_max_position_embeddings"],
        )
    elif stated.get("factor", 1.0) != 1.0:
        fields["rope_scaling"] = config_lib.RopeScaling(kind="linear", factor=stated["factor"])
    if kind == "proportional":
        fields["rotary_fraction"] = stated.get("partial_rotary_factor", 1.0)
    return fields


def _gemma4(values: dict[str, Any], layer_types: tuple[str, ...], path: Path) -> dict[str, Any]:
    """What Gemma 4 alone has."""
    same = bool(values.get("attention_k_eq_v"))
    full = {"head_dim": values["global_head_dim"], "num_key_value_heads": values.get("num_global_key_value_heads") if same else None}
    if "per_layer_config" in values:  # how transformers 5.24 writes the two above
        full = _of_full_layers(values["per_layer_config"], layer_types, path)
    return dict(
        full_head_dim=full.get("head_dim"),
        full_kv_heads=full.get("num_key_value_heads"),
        keys_are_values=same,
        shared_kv_layers=_or(values.get("num_kv_shared_layers"), 0),
        wide_shared_mlp=bool(values.get("use_double_wide_mlp")),
        per_layer_input_width=_or(values.get("hidden_size_per_layer_input"), 0),
        per_layer_vocab_size=values["vocab_size_per_layer_input"] if values.get("hidden_size_per_layer_input") else None,
    )


def _of_full_layers(by_layer: Any, layer_types: tuple[str, ...], path: Path) -> dict[str, Any]:
    """The overrides of `per_layer_config`, which must be the same on all full layers and absent on the others."""
    full = [str(index) for index, kind in enumerate(layer_types) if kind == "full"]
    stated = {str(index): overrides for index, overrides in _or(by_layer, {}).items() if overrides}
    first = next(iter(stated.values()), {})
    if set(stated) - set(full) or (stated and set(stated) != set(full)) or any(overrides != first for overrides in stated.values()):
        raise errors.UnsupportedModel(f"{path}: per_layer_config={by_layer!r}: only one and the same override of all full layers is supported")
    if set(first) - {"head_dim", "num_key_value_heads"}:
        raise errors.UnsupportedModel(f"{path}: per_layer_config={first!r}: only head_dim and num_key_value_heads are supported")
    return first


__all__ = ["FAMILIES", "Family", "family_of", "parse"]
