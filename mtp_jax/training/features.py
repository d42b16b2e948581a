"""What the head reads of the backbone, computed once: final hidden states, K/V of the donor layers, and inner states (taps) for a head that reads some.

Training a head needs nothing else of the backbone's forward pass, so computing it once and reading it back makes every
later epoch, and every other head on the same layers, several times cheaper. Logits are never stored; labels come from
the hidden states and the frozen unembedding.

On disk: one flat memory-mapped file per array, all sequences end to end (bfloat16 as its bits, uint16), and `manifest.json` that
ties them to backbone, tokens, layers, taps and dtype. It is written last: until then `unfinished.json` has its place, with the number
of sequences that are safely on disk, and the same build goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import ml_dtypes
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from mtp_jax import files
from mtp_jax.checkpoints.hf import read_json
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.training import data

Dtype = Literal["float16", "bfloat16", "float32"]
UNFINISHED = "unfinished.json"
FLUSH_EVERY = 16  # batches between two notes of how far a build is


class Features(struct.PyTreeNode):
    """The backbone's side of one batch, behind stop_gradient."""

    hidden: Float[data.HostArray, "B T E"]  # as BackboneOutput has them: after the final norm, and after each tap
    keys: Mapping[int, Float[data.HostArray, "B K T H"]]  # by backbone layer
    values: Mapping[int, Float[data.HostArray, "B K T H"]]


class FeatureError(ValueError):
    """A feature folder does not fit the run that wants to use it."""


@partial(jax.jit, static_argnames=("backbone", "key_layers", "value_layers"))
def compute(backbone: backbone_lib.Backbone, backbone_params: Any, tokens: Array, *, key_layers: tuple[int, ...], value_layers: tuple[int, ...]) -> Features:
    """Run the frozen backbone over whole sequences [B, T]; no gradient leads back to it. Taps are those of the module."""
    frozen = jax.lax.stop_gradient(backbone_params)
    output = backbone.apply({"params": frozen}, tokens, with_logits=False)
    assert isinstance(output, backbone_lib.BackboneOutput)
    features = Features(
        hidden=output.hidden,
        keys={layer: output.cache.keys[layer] for layer in key_layers},
        values={layer: output.cache.values[layer] for layer in value_layers},
    )
    return jax.lax.stop_gradient(features)


@dataclass(frozen=True)
class FeatureStore:
    """Memory-mapped features of a list of sequences."""

    arrays: Mapping[str, np.ndarray]  # "hidden" and "tap_N" [total, D], "keys_L" and "values_L" [total, K * H], in the dtype they are stored in
    offsets: np.ndarray  # [sequences + 1]
    kv_heads: Mapping[int, int]  # K by backbone layer

    def batch(self, batch: data.Batch, key_layers: tuple[int, ...], value_layers: tuple[int, ...], taps: tuple[int, ...] = ()) -> Features:
        """Features of a batch in float32, zeros at its padding."""
        return Features(
            hidden=np.concatenate([self._gather(name, batch) for name in _states(taps)], axis=-1) if taps else self._gather("hidden", batch),
            keys={layer: self._heads("keys", layer, batch) for layer in key_layers},
            values={layer: self._heads("values", layer, batch) for layer in value_layers},
        )

    def _heads(self, name: str, layer: int, batch: data.Batch) -> np.ndarray:
        flat = self._gather(f"{name}_{layer}", batch)
        return flat.reshape(*flat.shape[:2], self.kv_heads[layer], -1).swapaxes(1, 2)

    def _gather(self, name: str, batch: data.Batch) -> np.ndarray:
        array = self.arrays[name]
        rows, width = np.asarray(batch.tokens).shape
        out = np.zeros((rows, width, array.shape[1]), np.float32)
        for row, (index, length) in enumerate(zip(np.asarray(batch.index), np.asarray(batch.lengths), strict=True)):
            start = self.offsets[index]
            out[row, :length] = array[start : start + length]
        return out


def build(
    folder: str | Path,
    backbone: backbone_lib.Backbone,
    backbone_params: Any,
    examples: Sequence[data.Example],
    *,
    backbone_fingerprint: str,
    key_layers: tuple[int, ...],
    value_layers: tuple[int, ...],
    max_length: int,
    batch_size: int = 8,
    dtype: Dtype = "float16",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FeatureStore:
    """Compute and store the features of all sequences; the same build, interrupted, goes on where it was.

    Args:
      folder: where they go; what another build left there is written over.
      backbone: module of `backbone_params`; its taps are stored, too.
      examples: sequences, each cut to max_length.
      backbone_fingerprint: of the backbone, for the manifest.
      key_layers: backbone layers whose keys are stored.
      value_layers: the same of values.
      batch_size: sequences computed together.
      dtype: stored, rounded to nearest. float16 has 11 significant bits and ends at 65504, bfloat16 has 8 and float32's range.
      progress: called with (done, total), counting sequences.

    Raises:
      FeatureError: an unknown dtype, or a value that is not finite in it.
    """
    if dtype not in get_args(Dtype):
        raise FeatureError(f"dtype={dtype!r}: must be one of {', '.join(get_args(Dtype))}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = backbone.config
    lengths = np.array([min(len(example.tokens), max_length) for example in examples])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    kv_heads = {layer: config.kv_heads_of(layer) for layer in {*key_layers, *value_layers}}
    manifest = {
        "backbone": backbone_fingerprint,
        "data": data.fingerprint(examples),
        "key_layers": list(key_layers),
        "value_layers": list(value_layers),
        "max_length": max_length,
        "dtype": dtype,
        "backbone_dtype": config.dtype,
        "lengths": lengths.tolist(),
        "kv_heads": {str(layer): count for layer, count in kv_heads.items()},
    }
    if backbone.taps:
        manifest["taps"] = list(backbone.taps)
    begun = _begin(folder, manifest)
    states = _states(backbone.taps)
    widths = dict.fromkeys(states, config.width)
    for name, layers in {"keys": key_layers, "values": value_layers}.items():
        widths |= {f"{name}_{layer}": kv_heads[layer] * config.head_dim_of(layer) for layer in layers}
    arrays = {name: _open(folder / f"{name}.npy", dtype, (int(offsets[-1]), width), new=not begun) for name, width in widths.items()}
    order = np.argsort(lengths, kind="stable")
    for number, start in enumerate(range(begun, len(order), batch_size), 1):
        chosen = order[start : start + batch_size]
        width = -(-int(lengths[chosen].max()) // data.LENGTH_BUCKET) * data.LENGTH_BUCKET
        tokens = np.zeros((batch_size, width), np.int32)
        for row, index in enumerate(chosen):
            tokens[row, : lengths[index]] = examples[index].tokens[: lengths[index]]
        features = compute(backbone, backbone_params, tokens, key_layers=key_layers, value_layers=value_layers)
        flat = dict(zip(states, np.split(np.asarray(features.hidden), len(states), axis=-1), strict=True))
        flat |= {f"keys_{layer}": _flatten(features.keys[layer]) for layer in key_layers}
        flat |= {f"values_{layer}": _flatten(features.values[layer]) for layer in value_layers}
        for name, values in flat.items():
            with np.errstate(over="ignore"):  # told of below
                stored = values.astype(arrays[name].dtype)
            if not np.isfinite(stored).all():
                raise FeatureError(f"{name}: a value does not fit {dtype}; use float32")
            for row, index in enumerate(chosen):
                arrays[name][offsets[index] : offsets[index + 1]] = stored[row, : lengths[index]]
        if number % FLUSH_EVERY == 0:
            _note(folder, manifest, arrays, start + len(chosen))
        progress(start + len(chosen), len(order))
    _note(folder, manifest, arrays, len(order))
    files.write_json(folder / "manifest.json", manifest)
    (folder / UNFINISHED).unlink()
    return FeatureStore(arrays, offsets, kv_heads)


def _begin(folder: Path, manifest: dict[str, Any]) -> int:
    """Sequences that an interrupted build of this very manifest has stored. Otherwise 0, and nothing in the folder counts as features any more."""
    path = folder / UNFINISHED
    before = read_json(path) if path.exists() else {}
    (folder / "manifest.json").unlink(missing_ok=True)
    if before.get("manifest") == manifest:
        return before["sequences"]
    files.write_json(path, {"manifest": manifest, "sequences": 0})
    return 0


def _note(folder: Path, manifest: dict[str, Any], arrays: Mapping[str, np.ndarray], sequences: int) -> None:
    """Bring what was computed to the disk, then write down that it is there."""
    for array in arrays.values():
        assert isinstance(array, np.memmap)
        array.flush()
    files.write_json(folder / UNFINISHED, {"manifest": manifest, "sequences": sequences})


def _open(path: Path, dtype: str, shape: tuple[int, int] | None = None, *, new: bool = False) -> np.ndarray:
    """A memory-mapped array: to write where there is a shape, otherwise to read. The .npy format has no bfloat16, so its bits are stored as uint16."""
    mode = "r" if shape is None else "w+" if new else "r+"
    on_disk = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
    try:
        array = np.lib.format.open_memmap(path, mode, on_disk, shape)
    except ValueError as error:  # numpy's, for a file that is cut short or none of its own
        raise FeatureError(f"{path}: not a whole array file: {error}") from None
    if array.dtype != on_disk:
        raise FeatureError(f"{path}: holds {array.dtype}, and the manifest tells of {dtype}")
    return array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else array


def _states(taps: tuple[int, ...]) -> list[str]:
    """Names of the arrays that `Features.hidden` is stored in, in the order of its last axis."""
    return ["hidden", *(f"tap_{tap}" for tap in taps)]


def _flatten(kv: Array) -> np.ndarray:
    """[B, K, T, H] -> [B, T, K * H]."""
    array = np.asarray(kv).swapaxes(1, 2)
    return array.reshape(*array.shape[:2], -1)


def open_store(
    folder: str | Path,
    examples: Sequence[data.Example],
    *,
    backbone_fingerprint: str,
    key_layers: tuple[int, ...],
    value_layers: tuple[int, ...],
    max_length: int,
    taps: tuple[int, ...] = (),
    dtype: Dtype | None = None,
    backbone_dtype: str = "float32",
) -> FeatureStore:
    """Open a folder written by `build`, after checking that it holds what this run needs.

    Args:
      dtype: in which it is stored; None takes any.
      backbone_dtype: that of the backbone's products when the features were computed.
      others: as in `build`.

    Raises:
      FeatureError: no manifest (the run that wrote it did not finish), or another backbone, data, layers, taps, length or dtype; a file of
        another shape.
    """
    path = Path(folder) / "manifest.json"
    if not path.exists():
        raise FeatureError(f"{path}: missing, so the features were never finished; build them again")
    manifest = read_json(path)
    wanted_values = {"backbone": backbone_fingerprint, "data": data.fingerprint(examples), "max_length": max_length, "dtype": dtype or manifest["dtype"]}
    wanted_values["backbone_dtype"] = backbone_dtype
    manifest.setdefault("backbone_dtype", "float32")  # not written in the first version
    for name, wanted in wanted_values.items():
        if manifest[name] != wanted:
            raise FeatureError(f"{path}: {name} is {manifest[name]!r}, this run has {wanted!r}")
    for name, layers in {"key_layers": key_layers, "value_layers": value_layers, "taps": taps}.items():
        held = manifest.get(name, []) if name == "taps" else manifest[name]  # left out where there are none
        if not set(layers) <= set(held):
            raise FeatureError(f"{path}: {name} holds {held}, this head reads {list(layers)}")
    names = _states(taps) + [f"keys_{layer}" for layer in key_layers] + [f"values_{layer}" for layer in value_layers]
    arrays = {name: _open(Path(folder) / f"{name}.npy", manifest["dtype"]) for name in names}
    old = {layer: manifest.get("num_kv_heads") for layer in manifest["key_layers"]}  # as written before layers could differ
    heads: dict[Any, Any] = manifest.get("kv_heads") or old
    offsets = np.concatenate([[0], np.cumsum(manifest["lengths"])])
    for name, array in arrays.items():
        if len(array) != offsets[-1]:
            raise FeatureError(f"{Path(folder) / name}.npy: holds {len(array)} tokens, {path} tells of {offsets[-1]}")
    return FeatureStore(arrays, offsets, {int(layer): count for layer, count in heads.items()})
