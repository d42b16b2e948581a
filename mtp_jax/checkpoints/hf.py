"""Llama-family folders in transformers' layout: config.json -> BackboneConfig, safetensors (one file or shards) -> parameter tree.

A field of config.json that would change the computation, at a value the backbone doesn't implement, is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import errors, families

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_REQUIRED = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_ONLY = {  # field -> the values that mean what the backbone does; an absent field is fine
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "sliding_window": (None,),
}
_STORED_DTYPES = ("F16", "BF16", "F32", "F64")


def read_config(folder: str | Path, dtype: str = "float32") -> config_lib.BackboneConfig:
    """Read FOLDER/config.json.

    Args:
      folder: a folder in transformers' layout.
      dtype: the config's dtype, which `read_params` casts to (whatever torch_dtype says).

    Raises:
      UnsupportedModel: another family, or a field whose value the backbone doesn't implement.
      CheckpointError: the file or a field is missing, or a value is impossible.
      DamagedFile: the file isn't a JSON object.
    """
    path = Path(folder) / "config.json"
    values = read_json(path)
    family = values.get("model_type")
    if family not in ("llama", "mistral"):
        raise errors.UnsupportedModel(f"{path}: model_type={family!r}: only 'llama' and 'mistral' are supported")
    if family == "mistral":  # transformers' defaults for absent fields differ from Llama's; don't guess
        for name in ("sliding_window", "num_key_value_heads", "rms_norm_eps"):
            if name not in values:
                raise errors.UnsupportedModel(f"{path}: field {name!r} is absent: a mistral model must state it (sliding_window as null)")
    for name, allowed in _ONLY.items():
        if name in values and values[name] not in allowed:
            raise errors.UnsupportedModel(f"{path}: {name}={values[name]!r}: only {allowed[0]!r} is supported")
    layer_types = values.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise errors.UnsupportedModel(f"{path}: layer_types={layer_types!r}: only 'full_attention' is supported")
    for field in _REQUIRED.values():
        if field not in values:
            raise errors.CheckpointError(f"{path}: field {field!r} is missing")
    try:
        fields = {name: values[field] for name, field in _REQUIRED.items()} | dict(
            num_kv_heads=_or(values.get("num_key_value_heads"), values["num_attention_heads"]),
            head_dim=_or(values.get("head_dim"), values["hidden_size"] // values["num_attention_heads"]),
            rope_theta=_rope_theta(values, path),
            norm_eps=values.get("rms_norm_eps", 1e-6),
            tied_embeddings=bool(values.get("tie_word_embeddings", False)),
            max_positions=values.get("max_position_embeddings", 2048),
            dtype=dtype,
        )
        return config_lib.from_dict(config_lib.BackboneConfig, fields, where=str(path))
    except errors.CheckpointError:
        raise
    except (config_lib.ConfigError, TypeError, ZeroDivisionError) as error:
        raise errors.CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


def read_params(folder: str | Path, config: config_lib.BackboneConfig, only: Collection[tuple[str, ...]] | None = None) -> dict[str, Any]:
    """Read the weights (or `only` those at these paths) into the tree that `families` describes, kernels in config.dtype.

    Raises:
      MissingTensor, UnexpectedTensor, MisshapenTensor: see `families.assemble`.
      DamagedFile: a shard is absent or cut short (a download that didn't finish), or lacks a tensor that the index promises.
      UnsupportedModel: a tensor is quantised.
      CheckpointError: the folder holds no safetensors.
    """
    folder = Path(folder)
    promised = _promised(folder)
    return families.assemble(_stored(folder, promised), families.llama_hf(config), config, str(folder), only)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; CheckpointError when the file is absent, DamagedFile when it isn't one."""
    if not path.is_file():
        raise errors.CheckpointError(f"{path}: no such file")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bad JSON or bad UTF-8
        raise errors.DamagedFile(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise errors.DamagedFile(f"{path}: holds a {type(values).__name__}; must hold a JSON object")
    return values


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _rope_theta(values: dict[str, Any], path: Path) -> float:
    """Theta from `rope_parameters` (transformers 5) or `rope_theta`; a scaling other than "default" is refused."""
    theta = values.get("rope_theta")
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else rope
        if kind != "default" or set(rope) - {"rope_type", "type", "rope_theta"}:
            raise errors.UnsupportedModel(f"{path}: {name}={rope!r}: only null or rope_type 'default' is supported")
        theta = _or(theta, rope.get("rope_theta"))
    return _or(theta, 10_000.0)


def _promised(folder: Path) -> dict[str, set[str]]:
    """File name -> tensors that the index says it holds (an empty set where there is no index)."""
    if (folder / _SINGLE).is_file():
        return {_SINGLE: set()}
    if not (folder / _INDEX).is_file():
        raise errors.CheckpointError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}; other weight formats aren't read")
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise errors.DamagedFile(f"{folder / _INDEX}: field 'weight_map' must map tensor names to files")
    shards: dict[str, set[str]] = {}
    for name, shard in sorted(weight_map.items()):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise errors.DamagedFile(f"{folder / _INDEX}: tensor {name!r} is in {shard!r}; must be a file of the same folder")
        shards.setdefault(shard, set()).add(name)
    for shard in shards:
        if not (folder / shard).is_file():
            raise errors.DamagedFile(f"{folder / shard}: no such file, though {_INDEX} names it; the download didn't finish")
    return shards


def _stored(folder: Path, promised: dict[str, set[str]]) -> Iterator[families.StoredTensor]:
    import safetensors

    for shard, names in promised.items():
        path = folder / shard
        try:
            file = safetensors.safe_open(path, framework="np")
            held = list(file.keys())
        except (safetensors.SafetensorError, OSError) as error:
            raise errors.DamagedFile(f"{path}: not a whole safetensors file: {error}") from error
        absent = sorted(names - set(held))
        if absent:
            raise errors.DamagedFile(f"{path}: tensor {absent[0]!r} isn't in it, though {_INDEX} says so")
        for name in held:
            view = file.get_slice(name)
            if view.get_dtype() not in _STORED_DTYPES:
                raise errors.UnsupportedModel(f"{path}: tensor {name!r} has type {view.get_dtype()}; only {', '.join(_STORED_DTYPES)} are read")
            yield families.StoredTensor(name, tuple(view.get_shape()), lambda file=file, name=name: np.asarray(file.get_tensor(name)))


__all__ = ["read_config", "read_json", "read_params"]
