"""GGUF files: metadata -> BackboneConfig, quantised tensors -> parameter tree.

The `gguf` package parses and dequantises; `gguf_families` knows the architectures. Whatever the file asks
for that the backbone doesn't do is refused by name: a key that is ignored is a model that is quietly another one.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import errors, families, gguf_families, streaming

_ABSENT = object()


class GGUFFile:
    """An open GGUF file: `get(key)` for metadata, `tensors` for the reader's tensors.

    Raises:
      CheckpointError: there is no such file.
      DamagedFile: it isn't GGUF, is cut short, or has tensor data beyond its end.
      UnsupportedModel: a tensor's type is unknown.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise errors.CheckpointError(f"{self.path}: no such file")
        try:
            self._reader = _reader_class()(self.path)
            self.tensors = self._reader.tensors
        except Exception as error:  # the reader raises whatever its slicing runs into
            if isinstance(error, ValueError) and "GGMLQuantizationType" in str(error):
                raise errors.UnsupportedModel(f"{self.path}: a tensor has a type that the gguf package doesn't know: {error}") from error
            raise errors.DamagedFile(f"{self.path}: not a whole GGUF file: {type(error).__name__}: {error}") from error
        size = self.path.stat().st_size
        first = self._reader.data_offset
        for tensor in self.tensors:
            begin, end = tensor.data_offset, tensor.data_offset + tensor.n_bytes
            if begin < first or end > size:  # before: an offset near 2**64 wraps around
                raise errors.DamagedFile(f"{self.path}: tensor {tensor.name!r} lies at bytes {begin}..{end}; must be inside the data, {first}..{size}")

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name, slowest axis first."""
        return {tensor.name: _shape(tensor) for tensor in self.tensors}

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

    def integer(self, key: str, default: Any = _ABSENT) -> int:
        """`get`, for a key that must be one integer; UnsupportedModel where it isn't, as where it differs by layer."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise errors.UnsupportedModel(f"{self.path}: {key}={value!r}: must be one integer for the whole model")
        return value


def read_config(source: str | Path | GGUFFile, dtype: str = "float32") -> config_lib.BackboneConfig:
    """Read a GGUF file's shape and switches.

    Args:
      source: the file, or an open GGUFFile.
      dtype: the config's dtype, which `read_params` casts to.

    Raises:
      UnsupportedModel: another architecture, or a key of it that the backbone doesn't implement.
      CheckpointError: a key is missing or its value is impossible.
      DamagedFile: see GGUFFile.
    """
    file = _open(source)
    try:
        return config_lib.from_dict(config_lib.BackboneConfig, gguf_families.config_fields(file) | {"dtype": dtype}, where=str(file.path))
    except (config_lib.ConfigError, TypeError) as error:
        raise errors.CheckpointError(str(error)) from error


def read_params(
    source: str | Path | GGUFFile,
    config: config_lib.BackboneConfig,
    only: Collection[tuple[str, ...]] | None = None,
    table_rows: int | None = None,
    shardings: streaming.Shardings | None = None,
) -> dict[str, Any]:
    """Dequantise a GGUF file's tensors into the tree that `families` describes, kernels in config.dtype.

    Args:
      source: the file, or an open GGUFFile.
      config: from `read_config`.
      only, table_rows, shardings: see `families.assemble`.

    Raises:
      MissingTensor, UnexpectedTensor, MisshapenTensor: see `families.assemble`.
      UnsupportedModel: a tensor's quantisation can't be undone.
      DamagedFile: see GGUFFile.
    """
    file = _open(source)
    table = gguf_families.table(gguf_families.architecture_name(file), config)
    return families.assemble(_stored(file), table, config, str(file.path), only, table_rows, shardings)


def _open(source: str | Path | GGUFFile) -> GGUFFile:
    return source if isinstance(source, GGUFFile) else GGUFFile(source)


def _stored(file: GGUFFile) -> Iterator[families.StoredTensor]:
    for tensor in file.tensors:
        yield families.StoredTensor(tensor.name, _shape(tensor), functools.partial(_read_rows, file, tensor))


def _read_rows(file: GGUFFile, tensor: Any, begin: int, end: int) -> np.ndarray:
    """Float values of some rows. Read, not mapped: mapped pages would stay counted as this process's memory."""
    row_bytes = tensor.n_bytes // len(tensor.data)
    raw = np.fromfile(file.path, np.uint8, count=(end - begin) * row_bytes, offset=int(tensor.data_offset) + begin * row_bytes)
    if len(raw) != (end - begin) * row_bytes:
        raise errors.DamagedFile(f"{file.path}: tensor {tensor.name!r} is cut short; was the file changed while it was read?")
    try:
        return _dequantise(raw.view(tensor.data.dtype).reshape(end - begin, *tensor.data.shape[1:]), tensor.tensor_type)
    except NotImplementedError as error:
        raise errors.UnsupportedModel(f"{file.path}: tensor {tensor.name!r} has type {tensor.tensor_type.name}, which can't be dequantised") from error


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
