"""Llama-family GGUF files: metadata -> BackboneConfig, quantised tensors -> parameter tree.

The `gguf` package parses and dequantises. Whatever the file asks for that the backbone doesn't do is refused by name:
a key that is ignored is a model that is quietly another one.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import errors, families

_SIZES = {  # field of BackboneConfig -> key under "llama."
    "width": "embedding_length",
    "mlp_width": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "max_positions": "context_length",
}
_OTHER_KEYS = (
    "vocab_size",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.freq_base",
    "rope.dimension_count",
)
_HARMLESS = {"rope.scaling.type": "none", "expert_count": 0, "expert_used_count": 0, "attention.causal": True}  # at these values only
_ABSENT = object()


class GGUFFile:
    """An open GGUF file: `get(key)` for metadata, `tensors` for the reader's tensors.

    Raises:
      CheckpointError: there is no such file.
      DamagedFile: it isn't GGUF, is cut short, or has tensor data beyond its end.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise errors.CheckpointError(f"{self.path}: no such file")
        try:
            self._reader = _reader_class()(self.path)
            self.tensors = self._reader.tensors
        except Exception as error:  # the reader raises whatever its slicing runs into
            raise errors.DamagedFile(f"{self.path}: not a whole GGUF file: {type(error).__name__}: {error}") from error
        size = self.path.stat().st_size
        first = self._reader.data_offset
        for tensor in self.tensors:
            begin, end = tensor.data_offset, tensor.data_offset + tensor.n_bytes
            if begin < first or end > size:  # before: an offset near 2**64 wraps around
                raise errors.DamagedFile(f"{self.path}: tensor {tensor.name!r} lies at bytes {begin}..{end}; must be inside the data, {first}..{size}")

    def keys(self) -> tuple[str, ...]:
        return tuple(self._reader.fields)

    def get(self, key: str, default: Any = _ABSENT) -> Any:
        """Value of a metadata key; CheckpointError when it is absent and there is no default, DamagedFile when it can't be decoded."""
        found = self._reader.get_field(key)
        if found is None:
            if default is _ABSENT:
                raise errors.CheckpointError(f"{self.path}: key {key!r} is missing")
            return default
        try:
            value = found.contents()
        except Exception as error:
            raise errors.DamagedFile(f"{self.path}: key {key!r} can't be decoded: {error}") from error
        # float32 on disk: the shortest decimal that means it, so that 1e-5 is 1e-5 and not 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value


def read_config(source: str | Path | GGUFFile, dtype: str = "float32") -> config_lib.BackboneConfig:
    """Read a GGUF file's shape and switches.

    Args:
      source: the file, or an open GGUFFile.
      dtype: the config's dtype, which `read_params` casts to.

    Raises:
      UnsupportedModel: another architecture, or a `llama.*` key that the backbone doesn't implement.
      CheckpointError: a key is missing or its value is impossible.
      DamagedFile: see GGUFFile.
    """
    file = _open(source)
    architecture = file.get("general.architecture")
    if architecture != "llama":
        raise errors.UnsupportedModel(f"{file.path}: general.architecture={architecture!r}: only 'llama' is supported")
    _refuse_unknown_keys(file)
    sizes = {name: _integer(file, f"llama.{key}") for name, key in _SIZES.items()}
    sizes["num_kv_heads"] = _integer(file, "llama.attention.head_count_kv", sizes["num_heads"])
    sizes["head_dim"] = _integer(file, "llama.attention.key_length", sizes["width"] // max(sizes["num_heads"], 1))
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        value = _integer(file, key, sizes["head_dim"])
        if value != sizes["head_dim"]:
            raise errors.UnsupportedModel(f"{file.path}: {key}={value}: must equal the head dimension {sizes['head_dim']}")
    shapes = {tensor.name: _shape(tensor) for tensor in file.tensors}
    sizes["vocab_size"] = _integer(file, "llama.vocab_size", shapes.get("token_embd.weight", (0,))[0])
    values = sizes | dict(
        rope_theta=file.get("llama.rope.freq_base", 10_000.0),
        norm_eps=file.get("llama.attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in shapes,
        dtype=dtype,
    )
    try:
        return config_lib.from_dict(config_lib.BackboneConfig, values, where=str(file.path))
    except (config_lib.ConfigError, TypeError) as error:
        raise errors.CheckpointError(str(error)) from error


def read_params(source: str | Path | GGUFFile, config: config_lib.BackboneConfig, only: Collection[tuple[str, ...]] | None = None) -> dict[str, Any]:
    """Dequantise a GGUF file's tensors (or `only` those at these paths) into the tree that `families` describes, kernels in config.dtype.

    Raises:
      MissingTensor, UnexpectedTensor, MisshapenTensor: see `families.assemble`.
      UnsupportedModel: a tensor's quantisation can't be undone.
      DamagedFile: see GGUFFile.
    """
    file = _open(source)
    return families.assemble(_stored(file), families.llama_gguf(config), config, str(file.path), only)


def _open(source: str | Path | GGUFFile) -> GGUFFile:
    return source if isinstance(source, GGUFFile) else GGUFFile(source)


def _stored(file: GGUFFile) -> Iterator[families.StoredTensor]:
    def read(tensor: Any) -> np.ndarray:
        try:
            return _dequantise(np.asarray(tensor.data), tensor.tensor_type)  # a plain array: slicing a memmap is slow
        except NotImplementedError as error:
            raise errors.UnsupportedModel(f"{file.path}: tensor {tensor.name!r} has type {tensor.tensor_type.name}, which can't be dequantised") from error

    for tensor in file.tensors:
        yield families.StoredTensor(tensor.name, _shape(tensor), lambda tensor=tensor: read(tensor))


def _dequantise(data: np.ndarray, kind: Any) -> np.ndarray:
    """Float32 values of a tensor's bytes [rows, bytes per row].

    The package works through 16 rows at a time in Python; blocks don't cross rows, so four rows joined are as good as
    one, and halve the time.
    """
    import gguf

    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[0] % 4:
        return gguf.dequantize(data, kind)
    return gguf.dequantize(data.reshape(data.shape[0] // 4, -1), kind).reshape(data.shape[0], -1)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(reversed(tensor.shape.tolist()))  # ggml lists the fastest axis first


def _integer(file: GGUFFile, key: str, default: Any = _ABSENT) -> int:
    value = file.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise errors.UnsupportedModel(f"{file.path}: {key}={value!r}: must be one integer for the whole model")
    return value


def _refuse_unknown_keys(file: GGUFFile) -> None:
    known = {*_SIZES.values(), *_OTHER_KEYS}
    for key in file.keys():
        name = key.removeprefix("llama.")
        if name == key or name in known:
            continue
        value = file.get(key)
        if name not in _HARMLESS or value != _HARMLESS[name]:
            allowed = f"only {_HARMLESS[name]!r} is supported" if name in _HARMLESS else "this key is not supported"
            raise errors.UnsupportedModel(f"{file.path}: {key}={value!r}: {allowed}")


def _reader_class() -> type:
    """GGUFReader that reads an array in one pass.

    The package's own walk makes several mapped-array views for each string: seconds for a vocabulary and its merges.
    Same parts, same indices, so `ReaderField.contents` works on them; nothing else is changed.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if gguf.GGUFValueType(raw_type) != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            raw_item, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            item, count, start = gguf.GGUFValueType(int(raw_item[0])), int(length[0]), orig_offs + 12
            types = [gguf.GGUFValueType.ARRAY, item]
            if item == gguf.GGUFValueType.STRING:
                strings, end = _strings(np.asarray(self.data), start, count)
                return end - orig_offs, [raw_item, length, *strings], list(range(2, 2 + count)), types
            scalar = self.gguf_scalar_to_np.get(item)
            if scalar is None:
                return super()._get_field_parts(orig_offs, raw_type)
            values = self._get(start, scalar, count)
            if len(values) != count:
                raise ValueError(f"array of {count} values is cut short")
            return start + values.nbytes - orig_offs, [raw_item, length, values], [2], types

    return Reader


def _strings(data: np.ndarray, offset: int, count: int) -> tuple[list[np.ndarray], int]:
    """`count` length-prefixed strings of data [bytes] from `offset`, and the offset after them."""
    strings: list[np.ndarray] = []
    buffer, length_at = data.data, struct.Struct("=Q").unpack_from
    for _ in range(count):
        (length,) = length_at(buffer, offset)
        offset += 8
        if offset + length > len(data):
            raise ValueError("string is cut short")
        strings.append(data[offset : offset + length])
        offset += length
    return strings, offset


__all__ = ["GGUFFile", "read_config", "read_params"]
