"""Key tables: which tensor of a file goes where in the parameter tree, and how.

A table is data made from a BackboneConfig, so every expected shape comes from the config. `assemble` checks all names
and shapes before it reads the first value, then reads tensor by tensor.

The tree (kernels are [in, out]; files hold their transpose, [out, in]):

    embed/embedding [V, D]                        layers_i/mlp_norm/scale [D]
    layers_i/attn_norm/scale [D]                  layers_i/mlp/{gate,up}/kernel [D, F]
    layers_i/attn/q/kernel [D, N*H]               layers_i/mlp/down/kernel [F, D]
    layers_i/attn/{k,v}/kernel [D, K*H]           final_norm/scale [D]
    layers_i/attn/o/kernel [N*H, D]               unembed/kernel [D, V], unless tied
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import errors


class StoredTensor(NamedTuple):
    """One tensor of a file, not read yet."""

    name: str
    shape: tuple[int, ...]  # as stored, slowest axis first
    read: Callable[[], np.ndarray]  # -> floating-point array of `shape`


@dataclass(frozen=True)
class Entry:
    """Where one stored tensor goes."""

    path: tuple[str, ...]  # keys from the root of the tree
    shape: tuple[int, ...]  # as stored
    convert: Callable[[np.ndarray], np.ndarray]  # stored -> tree


@dataclass(frozen=True)
class Table:
    """All tensors of one family in one file format."""

    entries: dict[str, Entry]
    ignored_suffixes: tuple[str, ...] = ()  # computed buffers that old files carry
    copies: dict[str, str] = field(default_factory=dict)  # name -> name it must equal; holding it is allowed, and redundant


def assemble(
    tensors: Iterable[StoredTensor], table: Table, config: config_lib.BackboneConfig, where: str, only: Collection[tuple[str, ...]] | None = None
) -> dict[str, Any]:
    """Build the parameter tree from stored tensors.

    Args:
      tensors: everything that the checkpoint holds, in any order.
      table: what it should hold.
      config: gives the dtype of the kernels and the embedding; norm scales are float32 always.
      where: file or folder, for messages.
      only: paths in the tree; when given, no other tensor is read (all are checked).

    Returns:
      Nested dict of jax arrays (see the module docstring).

    Raises:
      MissingTensor, UnexpectedTensor (also for a doubled tensor, and for a copy that differs), MisshapenTensor.
    """
    found = _check_names(tensors, table, where)
    for name, original in table.copies.items():
        if name in found:
            _check_copy(found.pop(name), found[original], where)
    tree: dict[str, Any] = {}
    for name, tensor in found.items():
        entry = table.entries[name]
        if only is not None and entry.path not in only:
            continue
        node = tree
        for key in entry.path[:-1]:
            node = node.setdefault(key, {})
        dtype = jnp.float32 if entry.path[-1] == "scale" else jnp.dtype(config.dtype)
        # A copy, never an alias of a mapped file. JAX reads a transposed view as it copies, so no second pass is made.
        node[entry.path[-1]] = jnp.array(entry.convert(tensor.read()), dtype=dtype, copy=True)
    return tree


def _check_names(tensors: Iterable[StoredTensor], table: Table, where: str) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if tensor.name.endswith(table.ignored_suffixes) and table.ignored_suffixes:
            continue
        if tensor.name in found:
            raise errors.UnexpectedTensor(f"{where}: tensor {tensor.name!r} is there twice; each tensor must be there once")
        original = table.copies.get(tensor.name, tensor.name)
        if original not in table.entries:
            raise errors.UnexpectedTensor(f"{where}: tensor {tensor.name!r} {list(tensor.shape)} has no place in this model")
        expected = table.entries[original].shape
        if tuple(tensor.shape) != expected:
            raise errors.MisshapenTensor(f"{where}: tensor {tensor.name!r} has shape {list(tensor.shape)}; the configuration implies {list(expected)}")
        found[tensor.name] = tensor
    missing = [name for name in table.entries if name not in found]
    if missing:
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise errors.MissingTensor(f"{where}: tensor {missing[0]!r} {list(table.entries[missing[0]].shape)} is missing{others}")
    return found


def _check_copy(copy: StoredTensor, original: StoredTensor, where: str) -> None:
    if not np.array_equal(copy.read(), original.read()):
        raise errors.UnexpectedTensor(f"{where}: tie_word_embeddings is true but {copy.name!r} differs from {original.name!r}; they must be equal")


def llama_hf(config: config_lib.BackboneConfig) -> Table:
    """Llama and Mistral in transformers' names."""
    names = {
        "embed": "model.embed_tokens.weight",
        "unembed": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "attn_norm": "model.layers.{}.input_layernorm.weight",
        "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
        **{key: f"model.layers.{{}}.self_attn.{key}_proj.weight" for key in "qkvo"},
        **{key: f"model.layers.{{}}.mlp.{key}_proj.weight" for key in ("gate", "up", "down")},
    }
    copies = {names["unembed"]: names["embed"]} if config.tied_embeddings else {}
    return Table(_llama_entries(config, names, _transpose, _transpose), ("rotary_emb.inv_freq",), copies)


def llama_gguf(config: config_lib.BackboneConfig) -> Table:
    """Llama in llama.cpp's names, with its permuted query and key rows."""
    names = {
        "embed": "token_embd.weight",
        "unembed": "output.weight",
        "final_norm": "output_norm.weight",
        "attn_norm": "blk.{}.attn_norm.weight",
        "mlp_norm": "blk.{}.ffn_norm.weight",
        **{key: f"blk.{{}}.attn_{key}.weight" for key in "qkv"},
        "o": "blk.{}.attn_output.weight",
        **{key: f"blk.{{}}.ffn_{key}.weight" for key in ("gate", "up", "down")},
    }
    return Table(
        _llama_entries(
            config,
            names,
            lambda stored: unpermute(stored, config.num_heads).T,
            lambda stored: unpermute(stored, config.num_kv_heads).T,
        )
    )


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of q/k rows [heads*H, D].

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; transformers and `layers.rotate` rotate halves (0, H/2), (1, H/2+1), ...
    Its converter moves row i of a head to 2i, and row H/2+i to 2i+1; this moves them back.

    Worked row, H = 6: stored [0, 3, 1, 4, 2, 5] -> [0, 1, 2, 3, 4, 5].
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _same(stored: np.ndarray) -> np.ndarray:
    return stored


def _transpose(stored: np.ndarray) -> np.ndarray:
    return stored.T


def _llama_entries(
    config: config_lib.BackboneConfig, names: dict[str, str], query: Callable[[np.ndarray], np.ndarray], key: Callable[[np.ndarray], np.ndarray]
) -> dict[str, Entry]:
    width, queries, keys = config.width, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    entries = {
        names["embed"]: Entry(("embed", "embedding"), (config.vocab_size, width), _same),
        names["final_norm"]: Entry(("final_norm", "scale"), (width,), _same),
    }
    if not config.tied_embeddings:
        entries[names["unembed"]] = Entry(("unembed", "kernel"), (config.vocab_size, width), _transpose)
    for index in range(config.num_layers):
        layer = f"layers_{index}"
        stored = {name: template.format(index) for name, template in names.items()}
        entries |= {
            stored["attn_norm"]: Entry((layer, "attn_norm", "scale"), (width,), _same),
            stored["q"]: Entry((layer, "attn", "q", "kernel"), (queries, width), query),
            stored["k"]: Entry((layer, "attn", "k", "kernel"), (keys, width), key),
            stored["v"]: Entry((layer, "attn", "v", "kernel"), (keys, width), _transpose),
            stored["o"]: Entry((layer, "attn", "o", "kernel"), (width, queries), _transpose),
            stored["mlp_norm"]: Entry((layer, "mlp_norm", "scale"), (width,), _same),
            stored["gate"]: Entry((layer, "mlp", "gate", "kernel"), (config.mlp_width, width), _transpose),
            stored["up"]: Entry((layer, "mlp", "up", "kernel"), (config.mlp_width, width), _transpose),
            stored["down"]: Entry((layer, "mlp", "down", "kernel"), (width, config.mlp_width), _transpose),
        }
    return entries


__all__ = ["Entry", "StoredTensor", "Table", "assemble", "llama_gguf", "llama_hf", "unpermute"]
