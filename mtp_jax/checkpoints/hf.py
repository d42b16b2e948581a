"""Folders in transformers' layout: config.json -> BackboneConfig (see `hf_config`), safetensors (one file or shards) -> parameter tree."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import errors, families, hf_config, streaming

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED_DTYPES = ("F16", "BF16", "F32", "F64")
# Models that see and hear, too: where they keep the text model, by the layouts of transformers 5 and 4, and the rest.
_TEXT_MODEL = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_NOT_TEXT = tuple(
    prefix + part
    for prefix in ("model.", "")
    for part in ("vision_tower.", "audio_tower.", "multi_modal_projector.", "embed_vision.", "embed_audio.", "vision_embedder.")
)


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
    return hf_config.parse(read_json(path), path, dtype)


def read_params(
    folder: str | Path,
    config: config_lib.BackboneConfig,
    only: Collection[tuple[str, ...]] | None = None,
    table_rows: int | None = None,
    shardings: streaming.Shardings | None = None,
) -> dict[str, Any]:
    """Read the weights into the tree that `families` describes, kernels in config.dtype.

    Args:
      folder: a folder in transformers' layout.
      config: from `read_config`.
      only, table_rows, shardings: see `families.assemble`.

    Raises:
      MissingTensor, UnexpectedTensor, MisshapenTensor: see `families.assemble`.
      DamagedFile: a shard is absent or cut short (a download that didn't finish), or lacks a tensor that the index promises.
      UnsupportedModel: a tensor is quantised.
      CheckpointError: the folder holds no safetensors.
    """
    folder = Path(folder)
    path = folder / "config.json"
    _, family = hf_config.family_of(read_json(path), path)
    table = families.transformers_table(config, norms_add_one=family.norms_add_one)
    return families.assemble(_text_only(stored(folder)), table, config, str(folder), only, table_rows, shardings)


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


def _text_only(tensors: Iterable[families.StoredTensor]) -> Iterator[families.StoredTensor]:
    """The text model's tensors, under the names they have when it is alone."""
    for tensor in tensors:
        if tensor.name.startswith(_NOT_TEXT):
            continue
        for prefix, alone in _TEXT_MODEL.items():
            if tensor.name.startswith(prefix):
                tensor = tensor._replace(name=alone + tensor.name.removeprefix(prefix))
                break
        yield tensor


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


def stored(folder: Path, integers: Collection[str] = ()) -> Iterator[families.StoredTensor]:
    """All tensors of a folder's safetensors; those named in `integers` may have any type. See `read_params` for what it raises."""
    import safetensors

    for shard, names in _promised(folder).items():
        path = folder / shard
        try:
            with safetensors.safe_open(path, framework="np") as file:
                held = {name: file.get_slice(name) for name in file.keys()}
                kinds = {name: (tuple(view.get_shape()), view.get_dtype()) for name, view in held.items()}
        except (safetensors.SafetensorError, OSError) as error:
            raise errors.DamagedFile(f"{path}: not a whole safetensors file: {error}") from error
        absent = sorted(names - set(kinds))
        if absent:
            raise errors.DamagedFile(f"{path}: tensor {absent[0]!r} isn't in it, though {_INDEX} says so")
        for name, (shape, dtype) in kinds.items():
            if dtype not in _STORED_DTYPES and name not in integers:
                raise errors.UnsupportedModel(f"{path}: tensor {name!r} has type {dtype}; only {', '.join(_STORED_DTYPES)} are read")
            yield families.StoredTensor(name, shape, partial(_read_rows, path, name))


def _read_rows(path: Path, name: str, begin: int, end: int) -> np.ndarray:
    """Some rows of a tensor. The file is opened for each read: what stays mapped stays counted as this process's memory."""
    import safetensors

    with safetensors.safe_open(path, framework="np") as file:
        return np.asarray(file.get_slice(name)[begin:end])


__all__ = ["read_config", "read_json", "read_params", "stored"]
