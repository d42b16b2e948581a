"""Key tables: which tensor of a file goes where in the parameter tree, and how.

A table is data made from a BackboneConfig, so every expected shape comes from the config. `assemble` checks all names
and shapes before it reads the first value, then reads tensor by tensor.

The tree (kernels are [in, out]; files hold their transpose, [out, in]):

    embed/embedding [V, D]                        layers_i/mlp_norm/scale [D]
    layers_i/attn_norm/scale [D]                  layers_i/mlp/{gate,up}/kernel [D, F]
    layers_i/attn/q/kernel [D, N*H]               layers_i/mlp/down/kernel [F, D]
    layers_i/attn/{k,v}/kernel [D, K*H]           final_norm/scale [D]
    layers_i/attn/o/kernel [N*H, D]               unembed/kernel [D, V], unless tied

and, where the config's switches ask for them,

    layers_i/attn/{q,k,v,o}/bias, layers_i/mlp/{gate,up,down}/bias
    layers_i/attn/{q,k}_norm/scale [H]            layers_i/own_input_gate/kernel [D, width]
    layers_i/post_attn_norm/scale [D]             layers_i/own_input_project/kernel [width, D]
    layers_i/post_mlp_norm/scale [D]              layers_i/own_input_norm/scale [D]
    layers_i/scalar [1]                           layer_inputs/embed/embedding [V', layers * width]
    layer_inputs/norm/scale [width]               layer_inputs/project/kernel [D, layers * width]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import errors, streaming


class StoredTensor(NamedTuple):
    """One tensor of a file, not read yet."""

    name: str
    shape: tuple[int, ...]  # as stored, slowest axis first
    read: Callable[[int, int], np.ndarray]  # (begin, end) -> floating-point values of those rows, [end - begin, *shape[1:]]


@dataclass(frozen=True)
class Entry:
    """Where one stored tensor goes."""

    path: tuple[str, ...]  # keys from the root of the tree
    shape: tuple[int, ...]  # as stored
    convert: Callable[[np.ndarray], np.ndarray]  # stored -> tree
    rows_axis: int | None = None  # axis of the tree's array along which the stored rows lie; None: `convert` needs all rows at once


@dataclass(frozen=True)
class Table:
    """All tensors of one family in one file format."""

    entries: dict[str, Entry]
    ignored_suffixes: tuple[str, ...] = ()  # computed buffers that old files carry
    copies: dict[str, str] = field(default_factory=dict)  # name -> name it must equal; holding it is allowed, and redundant


def assemble(
    tensors: Iterable[StoredTensor],
    table: Table,
    config: config_lib.BackboneConfig,
    where: str,
    only: Collection[tuple[str, ...]] | None = None,
    table_rows: int | None = None,
    shardings: streaming.Shardings | None = None,
) -> dict[str, Any]:
    """Build the parameter tree from stored tensors.

    Args:
      tensors: everything that the checkpoint holds, in any order.
      table: what it should hold.
      config: gives the dtype of the kernels and the embedding; norm scales are float32 always.
      where: file or folder, for messages.
      only: paths in the tree; when given, no other tensor is read (all are checked).
      table_rows: read only so many first rows of an embedding.
      shardings: one for all arrays, or a function from an array's path in the tree to its own; None is JAX's default device.

    Returns:
      Nested dict of jax arrays (see the module docstring).

    Raises:
      MissingTensor, UnexpectedTensor (also for a doubled tensor, and for a copy that differs), MisshapenTensor.
      CheckpointError: a sharding doesn't fit its array.
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
        node[entry.path[-1]] = streaming.place(tensor, entry, dtype, shardings, where, table_rows)
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
    if any(not np.array_equal(values, original.read(begin, begin + len(values))) for begin, values in streaming.pieces(copy)):
        raise errors.UnexpectedTensor(f"{where}: tie_word_embeddings is true but {copy.name!r} differs from {original.name!r}; they must be equal")


def transformers_table(config: config_lib.BackboneConfig, *, norms_add_one: bool = False) -> Table:
    """Every family in transformers' names.

    Args:
      config: of the backbone.
      norms_add_one: stored norm scales are w, and the model multiplies with 1 + w (Gemma 2 and 3). The tree holds 1 + w.
    """
    layer = "model.layers.{}."
    names = {
        "embed": "model.embed_tokens.weight",
        "unembed": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "layer_inputs_embed": "model.embed_tokens_per_layer.weight",
        "layer_inputs_project": "model.per_layer_model_projection.weight",
        "layer_inputs_norm": "model.per_layer_projection_norm.weight",
        "attn_norm": layer + "input_layernorm.weight",
        "mlp_norm": layer + ("pre_feedforward_layernorm.weight" if config.sandwich_norms else "post_attention_layernorm.weight"),
        "post_attn_norm": layer + "post_attention_layernorm.weight",
        "post_mlp_norm": layer + "post_feedforward_layernorm.weight",
        **{key: f"{layer}self_attn.{key}_proj.weight" for key in "qkvo"},
        **{key: f"{layer}self_attn.{key}.weight" for key in ("q_norm", "k_norm")},
        **{key: f"{layer}mlp.{key}_proj.weight" for key in ("gate", "up", "down")},
        "own_input_gate": layer + "per_layer_input_gate.weight",
        "own_input_project": layer + "per_layer_projection.weight",
        "own_input_norm": layer + "post_per_layer_input_norm.weight",
        "scalar": layer + "layer_scalar",
    }
    copies = {names["unembed"]: names["embed"]} if config.tied_embeddings else {}
    # Published files hold K/V weights of layers that read another's; nothing uses them.
    unused = [names[key].format(index) for index in range(config.num_kv_layers, config.num_layers) for key in ("k", "v", "k_norm")]
    return Table(entries(config, names, {"scale": _add_one} if norms_add_one else {}), ("rotary_emb.inv_freq", *unused), copies)


def _same(stored: np.ndarray) -> np.ndarray:
    return stored


def _transpose(stored: np.ndarray) -> np.ndarray:
    return stored.T


def _add_one(stored: np.ndarray) -> np.ndarray:
    return stored.astype(np.float32) + 1.0


class Part(NamedTuple):
    """One leaf of the tree."""

    key: str  # names it in a table of names, and in one of conversions
    path: tuple[str, ...]
    shape: tuple[int, ...]  # in the tree


def entries(config: config_lib.BackboneConfig, names: dict[str, str], convert: dict[str, Callable[[np.ndarray], np.ndarray]]) -> dict[str, Entry]:
    """Table entries of all leaves that a backbone has.

    Args:
      config: of the backbone.
      names: stored name of each `Part.key`, with {} for the layer's index; a bias's name ends in .bias in place of .weight.
      convert: stored -> tree by `Part.key`, or by "scale" for all norms; a kernel is transposed where neither names it.
    """
    found: dict[str, Entry] = {}
    layers = [(index, part) for index in range(config.num_layers) for part in layer_parts(config, index)]
    for index, part in [(0, part) for part in model_parts(config)] + layers:
        kind = part.path[-1]
        name = names[part.key].format(index)
        name = name.removesuffix(".weight") + ".bias" if kind == "bias" else name
        default, axis = (_transpose, 1) if kind == "kernel" else (_same, 0)
        stored_shape = part.shape[::-1] if kind == "kernel" else part.shape
        special = convert.get(part.key, convert.get(kind))
        found[name] = Entry(part.path, stored_shape, special or default, None if special else axis)
    return found


def model_parts(config: config_lib.BackboneConfig) -> list[Part]:
    """Leaves outside the layers."""
    parts = [Part("embed", ("embed", "embedding"), (config.vocab_size, config.width)), Part("final_norm", ("final_norm", "scale"), (config.width,))]
    if not config.tied_embeddings:
        parts.append(Part("unembed", ("unembed", "kernel"), (config.width, config.vocab_size)))
    if config.per_layer_input_width:
        total = config.num_layers * config.per_layer_input_width
        parts += [
            Part("layer_inputs_embed", ("layer_inputs", "embed", "embedding"), (config.per_layer_vocab_size or config.vocab_size, total)),
            Part("layer_inputs_project", ("layer_inputs", "project", "kernel"), (config.width, total)),
            Part("layer_inputs_norm", ("layer_inputs", "norm", "scale"), (config.per_layer_input_width,)),
        ]
    return parts


def layer_parts(config: config_lib.BackboneConfig, index: int) -> list[Part]:
    """Leaves of one layer."""
    layer, width, own = f"layers_{index}", config.width, config.per_layer_input_width
    mlp_width = config.mlp_width_of(index)
    parts = _attention_parts(config, index)
    for key, inputs, outputs in (("gate", width, mlp_width), ("up", width, mlp_width), ("down", mlp_width, width)):
        parts += _dense(key, (layer, "mlp", key), inputs, outputs, config.mlp_bias)
    if own:
        parts += _dense("own_input_gate", (layer, "own_input_gate"), width, own) + _dense("own_input_project", (layer, "own_input_project"), own, width)
    norms = ["attn_norm", "mlp_norm"] + (["post_attn_norm", "post_mlp_norm"] if config.sandwich_norms else []) + (["own_input_norm"] if own else [])
    parts += [Part(norm, (layer, norm, "scale"), (width,)) for norm in norms]
    return parts + ([Part("scalar", (layer, "scalar"), (1,))] if config.layer_scalars else [])


def _attention_parts(config: config_lib.BackboneConfig, index: int) -> list[Part]:
    path, head_dim, width = (f"layers_{index}", "attn"), config.head_dim_of(index), config.width
    queries, keys = config.num_heads * head_dim, config.kv_heads_of(index) * head_dim
    owner = config.kv_owner(index) == index
    parts = _dense("q", (*path, "q"), width, queries, config.attention_bias) + _dense("o", (*path, "o"), queries, width, config.output_bias)
    for key in ("k", "v"):
        if owner and not (key == "v" and config.values_are_keys(index)):
            parts += _dense(key, (*path, key), width, keys, config.attention_bias)
    if config.qk_norm:
        parts += [Part(norm, (*path, norm, "scale"), (head_dim,)) for norm in (("q_norm", "k_norm") if owner else ("q_norm",))]
    return parts


def _dense(key: str, path: tuple[str, ...], inputs: int, outputs: int, bias: bool = False) -> list[Part]:
    return [Part(key, (*path, "kernel"), (inputs, outputs))] + ([Part(key, (*path, "bias"), (outputs,))] if bias else [])


__all__ = ["Entry", "Part", "StoredTensor", "Table", "assemble", "entries", "layer_parts", "model_parts", "transformers_table"]
