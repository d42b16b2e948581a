"""Heads in transformers' `gemma4_assistant` layout: config.json and model.safetensors, read onto a Gemma 4 backbone and written.

Where the tensors go (kernels are stored [out, in], the tree has [in, out]; W is the head's width, D the backbone's):

    pre_projection [W, 2D]            pre/kernel             post_projection [D, W]               post/kernel
    model.layers.i.self_attn.q_proj   layers_i_q/kernel      .self_attn.q_norm                    layers_i_q_norm/scale
    .self_attn.o_proj                 layers_i_o/kernel      .mlp.{gate,up,down}_proj             layers_i_mlp/{gate,up,down}/kernel
    .input_layernorm                  layers_i_attn_norm     .post_attention_layernorm            layers_i_post_attn_norm
    .pre_feedforward_layernorm        layers_i_mlp_norm      .post_feedforward_layernorm          layers_i_post_mlp_norm
    .layer_scalar [1]                 layers_i_scalar        model.norm                           norm/scale
    model.embed_tokens [V, W]         unembed/kernel, or with use_ordered_embeddings table [V, W], its rows in the order of
    masked_embedding.token_ordering   draft_ids [V]          masked_embedding.centroids           centroids/kernel

Each head layer reads the last backbone layer of its type that owns its K/V. Queries stand at the pending token's position,
which is what transformers passes: the length of the text, pending token included, minus 1. Two things differ there. A
sliding head layer sees the window's slots and one more; and after a rejection the first rejected draft's slot as well.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax.checkpoints import errors, families, heads, hf, hf_config

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone

CONFIG, TENSORS = "config.json", "model.safetensors"
_TEXT_MODELS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}  # model_type -> of its text_config
_DEFAULTS = {"use_ordered_embeddings": False, "num_centroids": 2048, "centroid_intermediate_top_k": 32, "tie_word_embeddings": True}
_ORDER = "masked_embedding.token_ordering"
_ORIGIN = "mtp_jax"  # field of config.json that says which backbone a head was trained on; other programs ignore it
_ONLY = {"attention_bias": False, "use_double_wide_mlp": False, "enable_moe_block": False, "hidden_size_per_layer_input": 0}
_GEMMA4 = dict(activation="gelu_tanh", qk_norm=True, v_norm=True, sandwich_norms=True, layer_scalars=True, attention_scale=1.0, attention_softcap=None)


def is_assistant(folder: Path) -> bool:
    """Whether a folder's config.json says that it holds an assistant."""
    path = folder / CONFIG
    return path.is_file() and hf.read_json(path).get("model_type") in _TEXT_MODELS


def read(folder: Path, backbone: LoadedBackbone, *, any_backbone: bool = False) -> heads.LoadedHead:
    """Read an assistant's folder as a head for `backbone`.

    Args:
      folder: holds config.json and safetensors, in one file or in shards.
      backbone: a Gemma 4 text model whose K/V have the shape that config.json states.
      any_backbone: True accepts a head that says it was trained on another backbone. A folder that doesn't say is taken at its word.

    Raises:
      UnsupportedModel: the backbone isn't a Gemma 4, or a field has a value that means something else than this head does.
      CheckpointError: a field is missing or impossible, or the head is of another backbone.
      MissingTensor, UnexpectedTensor, MisshapenTensor, DamagedFile: the safetensors aren't what config.json implies.
      ConfigError: the head doesn't fit the backbone's shape.
    """
    path = folder / CONFIG
    if not is_gemma4(backbone.config):
        raise errors.UnsupportedModel(f"{path}: an assistant reads the K/V of a Gemma 4 backbone only; {backbone.name!r} isn't one")
    values = _DEFAULTS | hf.read_json(path)
    config = _head_config(values, backbone.config, path)
    origin = values.get(_ORIGIN) or {}
    trained_on = origin.get("fingerprint", backbone.fingerprint)
    if trained_on != backbone.fingerprint and not any_backbone:
        raise errors.CheckpointError(
            f"{path}: head {folder.resolve().name!r} was trained for another backbone (fingerprint {trained_on}, this backbone {backbone.fingerprint}): "
            "drafts would be poor; pass any_backbone=True to use it all the same"
        )
    tensors = {tensor.name: tensor for tensor in hf.stored(folder, integers=(_ORDER,))}
    ids = np.arange(config.draft_vocab_size, dtype=np.int32)
    if config.output == "centroids":
        ids = _token_ordering(tensors.pop(_ORDER, None), config.draft_vocab_size, folder)
    wide = dataclasses.replace(backbone.config, dtype="float32")
    params = families.assemble(tensors.values(), _table(config, backbone.config, ids), wide, str(folder))
    return heads.LoadedHead(folder.resolve().name, config, params, ids, trained_on, origin.get("backbone", backbone.name))


def write(out: Path, head: heads.LoadedHead, backbone: LoadedBackbone, dtype: str = "float32") -> list[str]:
    """Write a head as an assistant's folder, whole or not at all.

    Args:
      out: folder to make.
      head: in the assistants' form; see `obstacle`.
      backbone: that it drafts for.
      dtype: of the tensors: float32, bfloat16 or float16.

    Returns:
      Names of the tensors.

    Raises:
      CheckpointError: the head hasn't this form, or a value isn't finite in dtype.
      OSError: something is at `out`.
    """
    problem = obstacle(head.mtp_config, backbone.config)
    if problem:
        raise errors.CheckpointError(f"head {head.name!r} can't be written as an assistant: {problem}")
    leaves, table = heads.flatten(head.params), _table(head.mtp_config, backbone.config, head.draft_ids)
    tensors: dict[str, np.ndarray] = {}
    for name, entry in table.entries.items():
        leaf = np.asarray(leaves["/".join(entry.path)])
        stored = leaf.T if entry.path[-1] == "kernel" else leaf
        by_entry = entry.path[0] in ("unembed", "table")  # rows in the order of the draft vocabulary; files have that of the ids
        tensors[name] = stored[np.argsort(head.draft_ids)] if by_entry else stored
    if head.mtp_config.output == "centroids":
        tensors[_ORDER] = head.draft_ids.astype(np.int64)
    data = heads.serialise(tensors, dtype, str(out / TENSORS), {"format": "pt"})  # transformers asks for this entry
    text = json.dumps(_config_json(head, backbone, dtype), indent=1) + "\n"
    files.write_folder(out, {TENSORS: data, CONFIG: text.encode()})
    return sorted(tensors)


def obstacle(config: config_lib.HeadConfig, backbone: config_lib.BackboneConfig) -> str | None:
    """Why a head of this shape can't be written as an assistant, in words that name the field; None if it can."""
    if not is_gemma4(backbone):
        return "its backbone isn't a Gemma 4"
    last = {donor: kind for kind in ("sliding", "full") if kind in backbone.layer_types for donor in [backbone.donor(kind)]}
    rules = [
        ("norms", config.norms == "sandwich", "must be 'sandwich'"),
        ("layer_scalars", config.layer_scalars, "must be on"),
        ("input_norms", not config.input_norms, "must be off"),
        ("output", config.output in ("own", "centroids"), "must be 'own' or 'centroids'"),
        ("pointer", not config.pointer, "must be off"),
        ("draft_vocab_size", config.draft_vocab_size == config.backbone_vocab_size, f"must be the whole vocabulary of {config.backbone_vocab_size}"),
        ("query_position", config.query_position == "pending", "must be 'pending'"),
        ("donors", set(config.donors) <= set(last), f"must be of {sorted(last)}, the last layer of each type that owns its K/V"),
        ("donors", last.get(config.donors[-1]) == "full", "the last must be a full-attention layer"),
    ]
    for name, met, rule in rules:
        if not met:
            return f"{name}={getattr(config, name)!r}: {rule}"
    return None


def is_gemma4(backbone: config_lib.BackboneConfig) -> bool:
    """Whether a backbone's layers compute what a Gemma 4's do."""
    return all(getattr(backbone, name) == value for name, value in _GEMMA4.items())


def _head_config(values: dict[str, Any], backbone: config_lib.BackboneConfig, path: Path) -> config_lib.HeadConfig:
    """HeadConfig of config.json, after checking that its text model is one whose K/V are the backbone's."""
    expected = _TEXT_MODELS[values["model_type"]]
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise errors.CheckpointError(f"{path}: text_config={text!r}: must be an object")
    if text.get("model_type", expected) != expected:
        raise errors.UnsupportedModel(f"{path}: text_config.model_type={text['model_type']!r}: must be {expected!r}")
    text = {"model_type": expected, "hidden_size_per_layer_input": 256 * (expected == "gemma4_text")} | text
    for name, only in _ONLY.items():
        if text.get(name, only) != only:
            raise errors.UnsupportedModel(f"{path}: text_config.{name}={text[name]!r}: only {only!r} is supported")
    for name in ("use_ordered_embeddings", "tie_word_embeddings"):
        if not isinstance(values[name], bool):
            raise errors.CheckpointError(f"{path}: {name}={values[name]!r}: must be true or false")
    if not values["tie_word_embeddings"]:
        raise errors.UnsupportedModel(f"{path}: tie_word_embeddings=False: only True is supported")
    if values.get("backbone_hidden_size", 1536) != backbone.width:
        raise errors.CheckpointError(f"{path}: backbone_hidden_size={values.get('backbone_hidden_size', 1536)!r}: this backbone's width is {backbone.width}")
    count = text.get("num_hidden_layers", hf_config.FAMILIES[expected].defaults["num_hidden_layers"])
    if text.get("num_kv_shared_layers") not in (None, 0, count):
        raise errors.UnsupportedModel(f"{path}: text_config.num_kv_shared_layers={text['num_kv_shared_layers']!r}: must be num_hidden_layers={count!r}")
    # All layers share the backbone's K/V; without that the rest reads as a model of its own.
    model = hf_config.parse(text | {"num_kv_shared_layers": 0}, path, "float32")
    _check_kv(model, backbone, path)
    ordered = values["use_ordered_embeddings"]
    fields = dict(
        donors=tuple(backbone.donor(kind) for kind in model.layer_types),
        width=model.width,
        mlp_width=model.mlp_width,
        num_heads=model.num_heads,
        draft_vocab_size=model.vocab_size,
        backbone_width=backbone.width,
        backbone_vocab_size=backbone.vocab_size,
        backbone_layers=backbone.num_layers,
        query_position="pending",
        pointer=False,
        norm_eps=model.norm_eps,
        norms="sandwich",
        layer_scalars=True,
        output="centroids" if ordered else "own",
        num_centroids=values["num_centroids"] if ordered else 0,
        top_centroids=values["centroid_intermediate_top_k"] if ordered else 0,
    )
    config = config_lib.from_dict(config_lib.HeadConfig, fields, where=str(path))
    if model.vocab_size != backbone.vocab_size:
        raise errors.CheckpointError(f"{path}: text_config.vocab_size={model.vocab_size}: this backbone's vocabulary is {backbone.vocab_size}")
    config.check_fits(backbone)
    return config


def _check_kv(model: config_lib.BackboneConfig, backbone: config_lib.BackboneConfig, path: Path) -> None:
    """Raise unless each layer type of the head's text model attends as the backbone's layers of that type do."""
    for index, kind in enumerate(model.layer_types):
        if kind not in backbone.layer_types:
            raise errors.CheckpointError(f"{path}: layer_types: layer {index} is {kind}, and this backbone has no such layer")
        donor = backbone.donor(kind)
        for name in ("head_dim_of", "kv_heads_of", "window", "rope"):
            found, wanted = getattr(model, name)(index), getattr(backbone, name)(donor)
            if found != wanted:
                field = {"head_dim_of": "head_dim", "kv_heads_of": "num_key_value_heads", "window": "sliding_window", "rope": "rope_parameters"}[name]
                raise errors.CheckpointError(f"{path}: {field} of {kind} layers is {found}: this backbone's is {wanted}")
    if model.activation != backbone.activation:
        raise errors.UnsupportedModel(f"{path}: hidden_activation={model.activation!r}: this backbone's is {backbone.activation!r}")


def _token_ordering(tensor: families.StoredTensor | None, size: int, where: Path) -> np.ndarray:
    """Token id of each entry of the clusters, int32 [V], after checking that it is an order."""
    if tensor is None:
        raise errors.MissingTensor(f"{where}: tensor {_ORDER!r} [{size}] is missing")
    if tensor.shape != (size,):
        raise errors.MisshapenTensor(f"{where}: tensor {_ORDER!r} has shape {list(tensor.shape)}; must have [{size}]")
    ids = tensor.read(0, size)
    if not np.array_equal(np.sort(ids), np.arange(size)):
        raise errors.CheckpointError(f"{where}: tensor {_ORDER!r} must hold each token id of 0..{size - 1} once")
    return ids.astype(np.int32)


def _table(config: config_lib.HeadConfig, backbone: config_lib.BackboneConfig, ids: np.ndarray) -> families.Table:
    """Stored name -> leaf of the head's tree. `ids` is the order of the leaf "table"."""
    from mtp_jax.models.head import param_shapes

    layer = "model.layers.{}."
    names = {
        "pre": "pre_projection.weight",
        "post": "post_projection.weight",
        "norm": "model.norm.weight",
        "unembed": "model.embed_tokens.weight",
        "table": "model.embed_tokens.weight",
        "centroids": "masked_embedding.centroids.weight",
        "q": layer + "self_attn.q_proj.weight",
        "q_norm": layer + "self_attn.q_norm.weight",
        "o": layer + "self_attn.o_proj.weight",
        **{f"mlp/{part}": f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
        "attn_norm": layer + "input_layernorm.weight",
        "post_attn_norm": layer + "post_attention_layernorm.weight",
        "mlp_norm": layer + "pre_feedforward_layernorm.weight",
        "post_mlp_norm": layer + "post_feedforward_layernorm.weight",
        "scalar": layer + "layer_scalar",
    }
    entries: dict[str, families.Entry] = {}
    for flat, shape in param_shapes(config, backbone).items():
        path = tuple(flat.split("/"))
        key = flat.removesuffix("/kernel").removesuffix("/scale")
        index = ""
        if key.startswith("layers_"):
            _, index, key = key.split("_", 2)
        name = names[key].format(index)
        if path[-1] == "kernel":
            entries[name] = families.Entry(path, shape[::-1], np.transpose, 1)
        elif path[-1] == "table":
            entries[name] = families.Entry(path, shape, lambda rows: rows[ids])
        else:
            entries[name] = families.Entry(path, shape, np.asarray, 0)
    return families.Table(entries, copies={"lm_head.weight": names["unembed"]})


def _config_json(head: heads.LoadedHead, backbone: LoadedBackbone, dtype: str) -> dict[str, Any]:
    """config.json of a head that has the form."""
    config, bb = head.mtp_config, backbone.config
    kinds = [bb.layer_types[donor] for donor in config.donors]
    rope: dict[str, Any] = {}
    for kind in sorted({*kinds, "full", "sliding"}):
        layer = next((index for index, other in enumerate(bb.layer_types) if other == kind), 0)
        found = bb.rope(layer)
        rope[f"{kind}_attention"] = {"rope_type": "default", "rope_theta": found.theta}
        if kind == "full":
            rope["full_attention"] |= {"rope_type": "proportional", "partial_rotary_factor": found.fraction}
            if found.scaling is not None:
                rope["full_attention"]["factor"] = found.scaling.factor
    text = {
        "model_type": "gemma4_text",
        "dtype": dtype,
        "vocab_size": config.draft_vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_kv_shared_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": bb.num_kv_heads,
        "head_dim": bb.head_dim,
        "global_head_dim": bb.full_head_dim or bb.head_dim,
        "num_global_key_value_heads": bb.full_kv_heads,
        "attention_k_eq_v": bb.full_kv_heads is not None,  # without it the number before is not looked at; the head makes no values
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "sliding_window": bb.sliding_window or bb.max_positions,
        "rope_parameters": rope,
        "max_position_embeddings": bb.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    }
    values = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "dtype": dtype,
        "backbone_hidden_size": config.backbone_width,
        "tie_word_embeddings": True,
        "use_ordered_embeddings": config.output == "centroids",
        "text_config": text,
        _ORIGIN: {"head": head.name, "backbone": head.backbone_name or backbone.name, "fingerprint": head.fingerprint},
    }
    if config.output == "centroids":
        values |= {"num_centroids": config.num_centroids, "centroid_intermediate_top_k": config.top_centroids}
    return values


__all__ = ["is_assistant", "is_gemma4", "obstacle", "read", "write"]
