"""One call from a name or a path to a backbone that can decode."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import catalog, errors, gguf, hf, streaming
from mtp_jax.checkpoints.heads import LoadedHead, load_head, save_head
from mtp_jax.checkpoints.tokenizer import Tokenizer

_SAMPLE_ROWS = 8


@dataclass
class LoadedBackbone:
    """A frozen language model, ready for `models.backbone.Backbone(config)`."""

    name: str  # catalog name, or the folder's or file's name
    config: config_lib.BackboneConfig
    params: dict[str, Any]  # the tree of `families`; kernels in config.dtype, norm scales float32
    tokenizer: Tokenizer
    fingerprint: str  # 16 hex digits; see `fingerprint`


def load_backbone(name_or_path: str | Path, *, dtype: str = "float32", sharding: streaming.Shardings | None = None) -> LoadedBackbone:
    """Load a language model, tensor by tensor, each straight into its dtype and onto its devices.

    Args:
      name_or_path: a catalog name, a folder in transformers' layout, a .gguf file, or a hub's `organisation/name`.
      dtype: of the kernels and the embedding: float32, bfloat16 or float16.
      sharding: of every parameter, or a function from a parameter's path, such as ("layers_0", "attn", "q", "kernel"), to
        its sharding; None is JAX's default device.

    Raises:
      UnknownName: none of these.
      CheckpointError: and its kinds, naming what is wrong with the files (see `gguf`, `hf`, `tokenizer`, `catalog`).
    """
    name, path = _locate(name_or_path)
    if path.is_dir():
        config, tokenizer = hf.read_config(path, dtype), Tokenizer.from_hf(path)
        read = partial(hf.read_params, path)
    else:
        file = gguf.GGUFFile(path)
        config, tokenizer = gguf.read_config(file, dtype), Tokenizer.from_gguf(file)
        read = partial(gguf.read_params, file)
    _check_vocabulary(tokenizer, config, path)
    params = read(config, shardings=sharding)
    wide = dataclasses.replace(config, dtype="float32")
    sample = params if config == wide else read(wide, only=_sample_paths(config), table_rows=_SAMPLE_ROWS)
    return LoadedBackbone(name, config, params, tokenizer, fingerprint(wide, sample))


def read_config(name_or_path: str | Path, *, dtype: str = "float32") -> config_lib.BackboneConfig:
    """The shape of what `load_backbone` would load, without its weights; raises as that does."""
    _, path = _locate(name_or_path)
    return hf.read_config(path, dtype) if path.is_dir() else gguf.read_config(gguf.GGUFFile(path), dtype)


def fingerprint(config: config_lib.BackboneConfig, params: dict[str, Any]) -> str:
    """16 hex digits that tell backbones apart: SHA-256 of the config (without dtype) and of a few weights.

    The sample is the final norm's scale, and the first 8 rows of the embedding and of the last layer's query kernel, as
    float32 bytes. `load_backbone` takes it before any rounding, so a backbone has one fingerprint whatever dtype it is
    loaded in. Two quantisations of one model have different ones.

    Args:
      config: of the backbone.
      params: its float32 parameters in the plain layout; only those of the sample are looked at.
    """
    digest = hashlib.sha256(json.dumps(config.identity(), sort_keys=True).encode())
    for path in _sample_paths(config):
        leaf: Any = reduce(operator.getitem, path, params)
        digest.update(np.asarray(leaf if leaf.ndim == 1 else leaf[:_SAMPLE_ROWS]).astype("<f4").tobytes())
    return digest.hexdigest()[:16]


def _sample_paths(config: config_lib.BackboneConfig) -> list[tuple[str, ...]]:
    return [("final_norm", "scale"), ("embed", "embedding"), (f"layers_{config.num_layers - 1}", "attn", "q", "kernel")]


def _locate(name_or_path: str | Path) -> tuple[str, Path]:
    text, path = str(name_or_path), Path(name_or_path).expanduser()
    if text in catalog.CATALOG:
        return text, catalog.fetch(text)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve().name, path
    if not path.exists() and catalog.is_hub_name(text):
        return text, catalog.fetch(text)
    problem = "is a file of another kind" if path.exists() else "doesn't exist"
    raise errors.UnknownName(
        f"backbone {text!r} {problem}: give a catalog name ({', '.join(sorted(catalog.CATALOG))}), a folder that holds config.json, "
        "model.safetensors and tokenizer.json, or a file that ends in .gguf"
    )


def _check_vocabulary(tokenizer: Tokenizer, config: config_lib.BackboneConfig, path: Path) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise errors.CheckpointError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens; the model's vocab_size={config.vocab_size} must be at least that"
        )


__all__ = ["LoadedBackbone", "LoadedHead", "fingerprint", "load_backbone", "load_head", "read_config", "save_head"]
